"""IROvA-TS: temperature scaling, then isotonic regression of every class against the rest."""

from ood_toolkit.calibrators.mix_n_match import MixNMatchCalibrator


class IROvATSCalibrator(MixNMatchCalibrator):
    """`mix_n_match(parametric="temperature", nonparametric="isotonic")` under the name its authors gave it.

    More data-efficient than `isotonic` alone. It can change the prediction; `mix_n_match` with its default `irm` is
    the order-preserving composition.
    """

    name = "irova_ts"
    equation = "isotonic of softmax(z / T)"
    paper = "Zhang et al., Mix-n-Match, ICML 2020, arXiv:2003.07329 (IROvA-TS)"

    def __init__(self) -> None:
        super().__init__(parametric="temperature", nonparametric="isotonic")
