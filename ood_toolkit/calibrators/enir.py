"""ENIR: an ensemble of nearly isotonic maps."""

from ood_toolkit.calibrators.averaged_steps import AveragedStepsCalibrator


class ENIRCalibrator(AveragedStepsCalibrator):
    """A weighted mean of maps of the confidence that may decrease a little, fitted by netcal.

    Between `histogram` and `top_label_isotonic`: monotone where the data insist, free where they do not. Slow for
    what it gives: half a minute at 25,000 rows.

    Args:
        score: weights the maps, "BIC" or "AIC".

    Differs from the paper in working on the predicted class's confidence.
    """

    name = "enir"
    paper = (
        "Naeini and Cooper, Binary Classifier Calibration Using an Ensemble of Near Isotonic Regression Models, "
        "ICDM 2016, arXiv:1511.05191"
    )
    cite = "naeini2016enir"
    equation = "g(p) = Σ_λ w_λ g_λ(p), g_λ the near-isotonic regression with penalty λ"
    family = "isotonic"
    method = "ENIR"
