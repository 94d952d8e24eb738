"""A classifier, a calibrator, a detector and a threshold as one module: an answer, and whether to believe it."""

import math
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ood_toolkit.calibrators import Calibrator, Identity
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.fitted import NotFitted
from ood_toolkit.models import Classifier
from ood_toolkit.outputs import Outputs


class Verdict(NamedTuple):
    """What a guarded classifier says of N images."""

    probabilities: Float[Tensor, "N C"]
    """Calibrated class probabilities."""
    score: Float[Tensor, " N"]
    """The detector's score; higher = less to be believed."""
    accept: Bool[Tensor, " N"]
    """Whether the score is at most the threshold."""


class GuardedClassifier(nn.Module):
    """One module whose forward gives calibrated probabilities, a score, and an accept/reject verdict.

    Fit its detector and calibrator (before or after wrapping), then `fit_threshold` on held-out in-distribution
    images or scores. The whole state, the threshold too, is in `state_dict()`. `torch.export.export` works for a batch
    of fixed size, where the detector's arithmetic does not depend on the numbers (KNN's second look at near rows does).

    Args:
        model: a `Classifier`, or any module that takes images as `Classifier` gives them.
        detector: scores each image.
        calibrator: turns logits into probabilities; the plain softmax by default.

    Example:
        >>> guarded = EnergyDetector().wrap(model)                         # doctest: +SKIP
        >>> guarded.fit_threshold(held_out_images, false_alarm_rate=0.05)  # doctest: +SKIP
        >>> probabilities, score, accept = guarded(images)                 # doctest: +SKIP
    """

    threshold: Tensor

    def __init__(
        self, model: nn.Module, detector: Detector | LiveDetector, *, calibrator: Calibrator | None = None
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"a guarded classifier takes a torch module, got {model!r}")
        if not isinstance(calibrator, Calibrator | None):
            raise TypeError(f"calibrator must be one such as TemperatureCalibrator(), got {calibrator!r}")
        self.classifier = model if isinstance(model, Classifier) else Classifier(model, taps=detector.taps)
        missing = set(detector.taps) - set(self.classifier.taps)
        if missing:
            raise ValueError(f"{detector.spec} needs the taps {sorted(missing)}; build the Classifier with taps=…")
        self.detector = detector
        self.calibrator = calibrator or Identity()
        self.register_buffer("threshold", torch.tensor(math.nan, dtype=torch.float64))

    def forward(self, images: Tensor) -> Verdict:
        """The verdict on a batch of images, (N, 3, H, W), in pixel units [0, 1] or uint8.

        Raises:
            NotFitted: there is no threshold yet, or the detector or calibrator is unfitted.
        """
        # an exported graph cannot ask what a number is; without a threshold it accepts nothing
        if not torch.compiler.is_compiling() and self.threshold.isnan():
            raise NotFitted("this guarded classifier has no threshold yet; call fit_threshold(held_out) first")
        outputs = self.classifier(images)
        score = self._score(outputs, images)
        return Verdict(self.calibrator(outputs.logits), score, score <= self.threshold)

    def score(self, images: Tensor) -> Float[Tensor, " N"]:
        """The detector's scores of a batch of images; higher = less to be believed."""
        return self._score(self.classifier(images), images)

    def fit_threshold(self, held_out: Tensor | Outputs, false_alarm_rate: float = 0.05) -> Self:
        """Sets the threshold so that a fresh in-distribution image is rejected with at most this probability.

        The threshold is the ⌈(n + 1)(1 − α)⌉-th smallest of the n held-out scores (split conformal prediction), so
        the promise holds on average over held-out sets, for any distribution, if images are exchangeable.

        Args:
            held_out: in-distribution data that the detector was not fitted on: scores (N,), images (N, 3, H, W), or
                outputs.
            false_alarm_rate: α in (0, 1).

        Raises:
            ValueError: too few held-out rows for this rate, NaN scores, or outputs for a live detector.
        """
        if not 0 < false_alarm_rate < 1:
            raise ValueError(f"false_alarm_rate must lie between 0 and 1, got {false_alarm_rate}")
        if not isinstance(held_out, Tensor | Outputs):
            raise TypeError(f"fit_threshold takes scores, images or Outputs as tensors, got {type(held_out).__name__}")
        scores = self._held_out_scores(held_out)
        if scores.isnan().any():
            raise ValueError(f"{int(scores.isnan().sum())} of {len(scores)} held-out scores are NaN")
        rank = math.ceil((len(scores) + 1) * (1 - false_alarm_rate) - 1e-9)
        if rank > len(scores):
            needed = math.ceil(1 / false_alarm_rate) - 1
            raise ValueError(
                f"a false-alarm rate of {false_alarm_rate} needs {needed} held-out rows, got {len(scores)}"
            )
        self.threshold = scores.double().kthvalue(rank).values.to(self.threshold.device)
        return self

    def _held_out_scores(self, held_out: Tensor | Outputs) -> Tensor:
        if isinstance(held_out, Outputs):
            if isinstance(self.detector, LiveDetector):
                raise ValueError(f"{self.detector.spec} runs the model itself: give fit_threshold images or scores")
            return self.detector(held_out)
        return held_out if held_out.ndim == 1 else self.score(held_out)

    def _score(self, outputs: Outputs, images: Tensor) -> Tensor:
        if isinstance(self.detector, LiveDetector):
            return self.detector(self.classifier, images)
        missing = {tap: self.classifier.tap_gaps.get(tap, "") for tap in self.detector.taps if tap not in outputs.taps}
        if missing:
            raise ValueError(f"{self.detector.spec} needs taps that this model does not give: {missing}")
        return self.detector(outputs)
