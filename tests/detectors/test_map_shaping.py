import pytest
import torch

from ood_toolkit.detectors.map_shaping import (
    ASHBMapDetector,
    ASHPMapDetector,
    ASHSMapDetector,
    ReActMapDetector,
    SCALEMapDetector,
)
from ood_toolkit.testing import check_detector

KINDS = (ASHPMapDetector, ASHBMapDetector, ASHSMapDetector, SCALEMapDetector, ReActMapDetector)


@pytest.mark.parametrize(("letter", "kind"), [*zip("PBS", KINDS[:3], strict=True)])
def test_ash_equals_pytorch_ood_on_the_map(golden, golden_classifier, golden_images, letter, kind):
    detector = kind(percentile=65)
    classifier = golden_classifier(*detector.taps)
    detector.fit(golden_images(classifier, "id"))
    scores = [detector(golden_images(classifier, split)) for split in ("id", "ood")]
    golden.check(f"pytorch-ood/ASH-{letter}/p=65/on=cnn", *scores)


def test_react_equals_pytorch_ood_on_the_map(golden, golden_classifier, golden_images):
    key = "pytorch-ood/ReAct/p=90/on=cnn"
    detector = ReActMapDetector(threshold=golden.entries[key]["hyperparameters"]["threshold"])
    classifier = golden_classifier(*detector.taps)
    detector.fit(golden_images(classifier, "id"))
    golden.check(key, *(detector(golden_images(classifier, split)) for split in ("id", "ood")))


def test_scale_is_the_ratio_of_sums_of_the_map(golden, golden_classifier, golden_images):
    detector = SCALEMapDetector(percentile=65)
    classifier = golden_classifier(*detector.taps)
    outputs = golden_images(classifier, "id")
    with torch.no_grad():
        maps = classifier.model[:4](golden.images["images_id"]).double()
    expected = []
    for one in maps:
        numbers = one.flatten().sort(descending=True).values
        kept = len(numbers) - round(len(numbers) * 0.65)
        scaled = one * (numbers.sum() / numbers[:kept].sum()).exp()
        logits = scaled.mean(dim=(1, 2)) @ outputs.head.weight.double().T + outputs.head.bias.double()
        expected.append(-logits.logsumexp(dim=0))
    torch.testing.assert_close(detector.fit(outputs)(outputs).double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_it_keeps_the_laws(kind):
    check_detector(kind)
