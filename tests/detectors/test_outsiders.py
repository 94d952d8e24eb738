"""What the base classes do for a detector that somebody else wrote: clear errors, and images as the docs say."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ood_toolkit.detectors import Detector, GramDetector, LiveDetector, RankFeatDetector
from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import SyntheticClassifier, synthetic_images, synthetic_outputs


class Saliency(LiveDetector):
    name = "saliency"

    def score(self, classifier: Differentiable, images: Tensor) -> Tensor:
        inputs = images.clone().requires_grad_()
        logits = classifier.differentiate(inputs).logits
        (gradient,) = torch.autograd.grad(logits.amax(dim=1).sum(), inputs)
        return -gradient.abs().sum(dim=(1, 2, 3))


class Column(Detector):
    name = "column"

    def score(self, outputs: Outputs) -> Tensor:
        return -outputs.logits.amax(dim=1, keepdim=True)


class Mean(Detector):
    name = "mean"

    def score(self, outputs: Outputs) -> Tensor:
        return -outputs.logits.mean(dim=1).mean(dim=0, keepdim=True)


def test_a_live_detector_gets_uint8_images_as_floats_between_0_and_1() -> None:
    classifier = SyntheticClassifier()
    bytes_ = (synthetic_images("id", rows=4)[0] * 255).round().to(torch.uint8)
    torch.testing.assert_close(Saliency()(classifier, bytes_), Saliency()(classifier, bytes_.float() / 255))


@pytest.mark.parametrize(("detector", "shape"), [(Column(), r"\(\d+, 1\)"), (Mean(), r"\(1,\)")])
def test_a_score_that_is_not_one_number_per_row_is_refused_by_its_shape(detector: Detector, shape: str) -> None:
    rows = synthetic_outputs().id
    with pytest.raises(ValueError, match=rf"{type(detector).__name__}.score should give one number per row.*{shape}"):
        detector(rows)


@pytest.mark.parametrize("detector", [RankFeatDetector(), GramDetector()])
def test_a_missing_tap_is_named_beside_those_there_are(detector: Detector) -> None:
    data = synthetic_outputs(detector.taps)
    fitted = detector.fit(data.train)
    with pytest.raises(ValueError, match=rf"{detector.name} reads the tap '{detector.taps[0]}', .* hold the taps \[\]"):
        fitted(replace(data.id, taps={}))
