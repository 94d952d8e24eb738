"""CARef and CADRef: how far the features stray from the mean of the predicted class, and in which direction."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.gen import generalised_entropy
from ood_toolkit.detectors.rectifier import HEAD_SCORES
from ood_toolkit.detectors.train_rows import class_patterns
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks

_PAPER = (
    "Ling et al., CADRef: Robust Out-of-Distribution Detection via Class-Aware Decoupled Relative Feature Leveraging, "
    "CVPR 2025, arXiv:2503.00325"
)
CONFIDENCES = ("energy", "gen", "maxlogit", "msp")


def predicted_class_means(train: Outputs, absent: str) -> Float[Tensor, "C D"]:
    """The mean feature of the training rows that the model *predicts* to be of each class, right or wrong."""
    what = "a training row predicted to be of it"
    return class_patterns(train, lambda batch: batch.predictions, absent=absent, what=what)


class CARefDetector(Detector):
    """Flags inputs whose features are far from the mean feature of the predicted class, relative to their size.

    Without any hyper-parameter of its own. The score is `‖f − μ_y‖₁ / ‖f‖₁`, μ_y being the mean over the training
    rows with the same *prediction* y.

    Args:
        absent: "mean" lets the mean of all rows stand for a class that is never predicted; "error" refuses it.

    Differs from the authors' code where a class is never predicted: there its mean, and each score against it, is NaN.
    """

    name = "caref"
    paper = f"{_PAPER}, Eq. 6"
    cite = "ling2025cadref"
    equation = "‖f − μ_y‖₁ / ‖f‖₁"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"
    means: Float[Tensor, "C D"]

    allowed = {"absent": ("error", "mean")}

    def __init__(self, absent: str = "mean") -> None:
        super().__init__()
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Learns the mean feature of every predicted class. Returns itself."""
        self.means = predicted_class_means(train, self.absent)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) relative errors, ≥ 0; higher = more out-of-distribution."""
        error = (outputs.features - self.means[outputs.predictions]).abs().sum(dim=1)
        return error / _size(outputs.features)


class CADRefDetector(Detector):
    """Flags inputs whose features stray from the predicted class's mean, judging what raises its logit more mildly.

    Choose it over `CARefDetector` when confident rows have large features: the part of `f − μ_y` that raises the
    predicted logit (its sign agrees with the weight's) is divided by the row's own confidence S(x), the other part
    E_n by the mean confidence of the training rows: `E_p / S(x) + E_n / S̄`, both parts over `‖f‖₁`.

    Args:
        confidence: S: "energy" (log-sum-exp, the paper's), "gen" (one over GEN's entropy of the largest tenth of the
            probabilities, at least 10), "maxlogit" or "msp", the authors' four. It must be positive to make sense.
        absent: "mean" lets the mean of all rows stand for a class that is never predicted; "error" refuses it.

    Follows the authors' code in adding absolute values over `f − μ_y`; Eq. 7 and 8 as printed take the norm of the
    sum, in which terms of either sign would cancel.
    """

    name = "cadref"
    paper = f"{_PAPER}, Eq. 7 to 10"
    cite = "ling2025cadref"
    equation = "(E_p / S(x) + E_n / S̄) / ‖f‖₁ with E_p = Σ_d relu(s_d), E_n = Σ_d relu(−s_d), s = (f − μ_y) ⊙ sign(w_y)"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"
    means: Float[Tensor, "C D"]
    signs: Float[Tensor, "C D"]
    mean_confidence: Float[Tensor, ""]

    def __init__(self, confidence: str = "energy", absent: str = "mean") -> None:
        super().__init__()
        if confidence not in CONFIDENCES:
            raise ValueError(f"confidence must be one of {', '.join(CONFIDENCES)}, got {confidence!r}")
        self.confidence = confidence
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Learns the class means, the weight's signs and the mean confidence. Returns itself."""
        self.means = predicted_class_means(train, self.absent)
        self.signs = train.head.weight.sign()
        total = torch.stack([self._confidence(batch.logits).double().sum() for batch in blocks(train)]).sum()
        self.mean_confidence = (total / len(train)).to(train.head.weight.dtype)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) scaled relative errors; higher = more out-of-distribution."""
        predictions = outputs.predictions
        raising = (outputs.features - self.means[predictions]) * self.signs[predictions]
        size = _size(outputs.features)
        up, down = (part.clamp_min(0).sum(dim=1) / size for part in (raising, -raising))
        return up / self._confidence(outputs.logits) + down / self.mean_confidence

    def _confidence(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
        if self.confidence == "gen":
            return 1 / generalised_entropy(logits, gamma=0.1, top=max(10, logits.shape[1] // 10))
        score = HEAD_SCORES[self.confidence](logits)
        return 1 - score if self.confidence == "msp" else -score


def _size(features: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    return features.abs().sum(dim=1).clamp_min(1e-12)
