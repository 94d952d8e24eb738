"""Mix-n-Match: a parametric calibrator first, a non-parametric one on its output."""

from typing import Self

from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked, from_spec


class MixNMatchCalibrator(Calibrator):
    """Fits one calibrator, then another on the log-probabilities of the first.

    The first takes out what few numbers can express, so that the second, which needs many rows, has less left to do:
    the paper's composition, for any pair. It keeps the argmax where both parts do; that depends
    on the parts, so it is not claimed for the class.

    Args:
        parametric: spec of the first calibrator.
        nonparametric: spec of the second.
    """

    name = "mix_n_match"
    paper = "Zhang et al., Mix-n-Match, ICML 2020, arXiv:2003.07329"
    cite = "zhang2020mix"
    equation = "nonparametric(log parametric(z))"
    family = "composition"

    def __init__(self, parametric: str = "temperature", nonparametric: str = "irm") -> None:
        super().__init__()
        self.parametric = parametric
        self.nonparametric = nonparametric
        # unfitted here, so that load_state_dict finds where its tensors belong
        self.first = from_spec(parametric, Calibrator)
        self.second = from_spec(nonparametric, Calibrator)

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Fits the first, then the second on what the first gives. Returns itself."""
        logits, labels = checked(logits, labels)
        self.first.fit(logits, labels)
        self.second.fit(self.first.log_probabilities(logits), labels)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) probabilities of the second calibrator."""
        return self.second(self.first.log_probabilities(logits))

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-probabilities of the second calibrator."""
        return self.second.log_probabilities(self.first.log_probabilities(logits))
