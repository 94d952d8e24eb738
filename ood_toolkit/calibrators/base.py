"""What every calibrator is: logits in, probabilities out."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.fitted import Fitted

Family = Literal["scaling", "binning", "isotonic", "composition", "prior", "ensemble"]


class Calibrator(Fitted, ABC):
    """Turns logits into probabilities that can be taken at their word, after seeing labelled held-out logits.

    A subclass sets `name`, `paper` and the class facts below, stores its hyper-parameters in `__init__`, learns
    tensors in `fit`, and gives either `forward` alone or, where the method lives in log space, `log_probabilities`
    and a `forward` that exponentiates it.
    """

    family: ClassVar[Family] = "scaling"
    preserves_argmax: ClassVar[bool] = False
    """Whether the most likely class can never change."""
    cite: ClassVar[str] = ""

    @abstractmethod
    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns from held-out logits and their true classes (no unknown ones). Returns itself."""

    @abstractmethod
    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) probabilities; rows sum to 1."""

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-probabilities: calibrated logits, which any detector that reads logits can score."""
        probabilities = self.forward(logits)
        return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


class Identity(Calibrator):
    """The softmax itself: the uncalibrated row of every table."""

    name = "none"
    preserves_argmax = True

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns nothing."""
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) softmax of the logits."""
        return logits.softmax(dim=-1)

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-softmax of the logits."""
        return logits.log_softmax(dim=-1)


class EnsemblePool(Fitted, ABC):
    """Pools the logits of M members into one set of log-probabilities: the one place where a member axis exists.

    The result is a set of logits again, so an ensemble goes through every calibrator and every logit detector.
    """

    family: ClassVar[Family] = "ensemble"
    cite: ClassVar[str] = ""

    def fit(self, member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns from held-out logits of every member. Returns itself."""
        return self

    @abstractmethod
    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-probabilities; their exponentials sum to 1."""
