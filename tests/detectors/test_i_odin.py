import pytest
import torch

from ood_toolkit.detectors.i_odin import IODINDetector, salient_sign
from ood_toolkit.detectors.odin import ODINDetector
from ood_toolkit.testing import SyntheticClassifier, check_detector, synthetic_images


def literal_score(classifier, image, temperature, eps):
    """One image: the loss is tried with every number of it moved, and the steepest number takes the step."""
    predicted = int(classifier(image.unsqueeze(0)).logits.argmax())

    def log_probability(x):
        return float((classifier(x.unsqueeze(0)).logits[0] / temperature).log_softmax(0)[predicted])

    slopes, nudge = [], 1e-5
    for position in range(image.numel()):
        there, back = image.clone(), image.clone()
        there.view(-1)[position] += nudge
        back.view(-1)[position] -= nudge
        slopes.append((log_probability(there) - log_probability(back)) / (2 * nudge))
    steepest = max(range(len(slopes)), key=lambda k: abs(slopes[k]))
    moved = image.clone()
    moved.view(-1)[steepest] += eps if slopes[steepest] > 0 else -eps
    return 1 - float((classifier(moved.unsqueeze(0)).logits[0] / temperature).softmax(0).max())


@pytest.mark.parametrize(("temperature", "eps"), [(1000.0, 0.0014), (1.0, 0.5), (10.0, 0.1)])
def test_the_number_with_the_steepest_numerical_slope_moves(temperature, eps):
    classifier = SyntheticClassifier().double()
    images = torch.cat([synthetic_images("id")[0][:3], synthetic_images("ood")[0][:3]]).double()
    expected = [literal_score(classifier, image, temperature, eps) for image in images]
    scores = IODINDetector(temperature, eps)(classifier, images)
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("std", [1.0, 0.5])
def test_with_all_numbers_it_is_odin_of_openood(golden, golden_classifier, std):
    # 0.5: images arrive in pixels here and normalised there; one std for all channels keeps the same number largest
    classifier, detector = golden_classifier(std=std), IODINDetector(numbers=10**6)
    scores = [detector(classifier, std * golden.images[f"images_{split}"]) for split in ("id", "ood")]
    golden.check(f"openood/ODIN/T=1000/eps=0.0014/std={std:g}", *scores, offset=-1.0)


def test_one_step_leaves_every_other_number_alone():
    gradient = torch.tensor([[[[0.5, -3.0], [2.0, 0.0]]], [[[1.0, 4.0], [-2.0, 3.0]]]])
    assert salient_sign(gradient, 1).tolist() == [[[[0, -1], [0, 0]]], [[[0, 1], [0, 0]]]]
    assert salient_sign(gradient, 2).tolist() == [[[[0, -1], [1, 0]]], [[[0, 1], [0, 1]]]]
    assert torch.equal(salient_sign(gradient, 99), gradient.sign())


def test_without_a_step_it_is_odin_without_one():
    classifier, images = SyntheticClassifier(), synthetic_images("ood")[0]
    torch.testing.assert_close(IODINDetector(eps=0)(classifier, images), ODINDetector(eps=0)(classifier, images))


def test_it_needs_a_number_to_move():
    with pytest.raises(ValueError, match="numbers must be at least 1"):
        IODINDetector(numbers=0)


@pytest.mark.parametrize("detector", [IODINDetector(), IODINDetector(temperature=1, eps=0.05, numbers=3)])
def test_it_keeps_the_laws(detector):
    check_detector(detector)
