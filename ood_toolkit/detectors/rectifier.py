"""Rectifiers: reshape the features, put them through the head again, score the new logits."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.doctor import gini_odds
from ood_toolkit.detectors.energy import energy
from ood_toolkit.detectors.entropy import softmax_entropy
from ood_toolkit.detectors.gen import generalised_entropy
from ood_toolkit.detectors.margin import softmax_margin
from ood_toolkit.detectors.msp import one_minus_msp
from ood_toolkit.outputs import Outputs

HEAD_SCORES: dict[str, Callable[[Float[Tensor, "N C"]], Float[Tensor, " N"]]] = {
    "doctor_alpha": gini_odds,
    "energy": energy,
    "entropy": softmax_entropy,
    "gen": lambda logits: generalised_entropy(logits, gamma=0.1, top=100),
    "margin": softmax_margin,
    "maxlogit": lambda logits: -logits.amax(dim=-1),
    "msp": one_minus_msp,
}
"""What a rectifier can do with its logits, by the name of the detector whose equation, with its defaults, it is."""


class Rectifier(Detector):
    """Scores the logits of reshaped features. A subclass gives `rectify`, or `rectified_logits` where that is cheaper.

    Args:
        score: which equation reads the rectified logits, a key of `HEAD_SCORES`.
    """

    family = "features"
    needs = "head"
    reads = frozenset({"features"})
    cost = "O(CD)"
    head_score_parameter: ClassVar[str] = "score"
    """The hyper-parameter that a composition such as `react+msp` sets."""
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]

    def __init__(self, score: str) -> None:
        super().__init__()
        if score not in HEAD_SCORES:
            raise ValueError(f"a head score is one of {', '.join(sorted(HEAD_SCORES))}, got {score!r}")
        self.head_score = score

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What `__init__` was given. `score` names a method too, so its value is kept under `head_score`."""
        return {**super().hyperparameters, "score": self.head_score}

    def fit(self, train: Outputs) -> Self:
        """Copies the head. Returns itself."""
        self.weight = train.head.weight.clone()
        self.bias = train.head.bias.clone()
        return self

    @abstractmethod
    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The features as the head should see them."""

    def rectified_logits(self, outputs: Outputs) -> Float[Tensor, "N C"]:
        """The head's logits for the rectified features."""
        return linear(self.rectify(outputs.features), self.weight, self.bias)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) head scores of the rectified logits; higher = more out-of-distribution."""
        return HEAD_SCORES[self.head_score](self.rectified_logits(outputs))


def checked_percentile(value: float, name: str = "percentile") -> float:
    """The value itself, or an error if it is no percentile below 100."""
    if not 0 <= value < 100:
        raise ValueError(f"{name} must lie in [0, 100), in percent, got {value}")
    return value
