"""Bayesian binning into quantiles: many histograms, averaged by how likely each makes the labels."""

from ood_toolkit.calibrators.averaged_steps import AveragedStepsCalibrator


class BBQCalibrator(AveragedStepsCalibrator):
    """A weighted mean of histograms of the confidence with different bin counts, fitted by netcal.

    Spares the choice that `histogram` leaves to you, and has many more distinct values, so fewer ties. About two
    seconds at 25,000 rows, whatever the number of classes.

    Args:
        score: weights the histograms, "BIC" or "AIC".

    Differs from the paper in that netcal bins have equal width, not equal mass, and scores are BIC or AIC in place of
    the paper's Bayesian score; and in working on the predicted class's confidence.
    """

    name = "bbq"
    paper = "Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015"
    cite = "naeini2015obtaining"
    equation = "g(p) = Σ_B w_B (share of right rows in the bin of p among B bins)"
    family = "binning"
    method = "BBQ"
