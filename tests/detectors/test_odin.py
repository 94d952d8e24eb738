import pytest
import torch

from ood_toolkit.detectors.odin import ODINDetector, heated_one_minus_msp, towards_prediction
from ood_toolkit.testing import SyntheticClassifier, check_detector, synthetic_images


@pytest.mark.parametrize("tool", ["openood", "openood-vlm", "oodeel", "pytorch-ood"])
def test_it_equals_the_other_tools(golden, golden_classifier, tool):
    classifier = golden_classifier()
    scores = [ODINDetector()(classifier, golden.images[f"images_{split}"]) for split in ("id", "ood")]
    golden.check(f"{tool}/ODIN/T=1000/eps=0.0014/std=1", *scores, offset=_offset(golden, tool))


@pytest.mark.parametrize("tool", ["openood", "openood-vlm", "pytorch-ood"])
def test_eps_is_in_pixel_units(golden, golden_classifier, tool):
    # the peers are given normalised images, x / 0.5, and the std; we are given the pixels
    classifier = golden_classifier(std=0.5)
    scores = [ODINDetector()(classifier, 0.5 * golden.images[f"images_{split}"]) for split in ("id", "ood")]
    golden.check(f"{tool}/ODIN/T=1000/eps=0.0014/std=0.5", *scores, offset=_offset(golden, tool))


def _offset(golden, tool: str) -> float:
    # a confidence, with its sign turned, is our 1 − confidence less 1
    convention = golden.entries[f"{tool}/ODIN/T=1000/eps=0.0014/std=1"]["convention"]
    return (
        -1.0 if convention == "higher=ID" or golden.scores(f"{tool}/ODIN/T=1000/eps=0.0014/std=1")[0].max() < 0 else 0
    )


def test_the_step_is_along_the_numerical_gradient():
    classifier = SyntheticClassifier().double()
    images = synthetic_images("id")[0][:2].double()
    predicted = classifier(images).logits.argmax(dim=1)

    def losses(x):
        return torch.nn.functional.cross_entropy(classifier(x).logits / 1000, predicted, reduction="none")

    moved = towards_prediction(classifier, images, 1000, 0.01) - images
    for position in [(0, 0, 0), (1, 3, 5), (2, 7, 7)]:
        nudge = torch.zeros_like(images)
        nudge[(slice(None), *position)] = 1e-5
        slope = losses(images + nudge) - losses(images - nudge)
        torch.testing.assert_close(moved[(slice(None), *position)], -0.01 * slope.sign())
    assert (losses(images + moved) < losses(images)).all()


def test_without_a_step_it_is_the_heated_msp_in_float64():
    classifier = SyntheticClassifier()
    images = synthetic_images("id")[0]
    expected = 1 - (classifier(images).logits.double() / 1000).softmax(dim=1).amax(dim=1)
    torch.testing.assert_close(ODINDetector(eps=0)(classifier, images), expected, rtol=1e-13, atol=0)


def test_uint8_images_score_as_their_pixels(golden_classifier):
    classifier = golden_classifier()
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(ODINDetector()(classifier, images), ODINDetector()(classifier, images.float() / 255))


def test_almost_equal_confidences_do_not_tie():
    logits = torch.zeros(1000, 10)
    logits[:, 0] = torch.linspace(1, 1.001, 1000)
    assert len(heated_one_minus_msp(logits, 1000.0).unique()) > 990


def test_it_keeps_the_laws():
    check_detector(ODINDetector)
