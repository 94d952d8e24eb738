import numpy as np
import pytest
import torch

from ood_toolkit.detectors.ash import ASHBDetector, ASHPDetector, ASHSDetector, concentration, kept_count, largest
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.testing import check_detector

KINDS = {"P": ASHPDetector, "B": ASHBDetector, "S": ASHSDetector}


@pytest.mark.parametrize("tool", ["official-ash", "openood", "openood-vlm", "pytorch-ood", "pytorch-ood-0.2.0"])
@pytest.mark.parametrize("letter", "PBS")
def test_it_equals_the_authors_code_and_the_other_tools(golden, tool, letter):
    detector = KINDS[letter](percentile=65).fit(golden.outputs("fit"))
    golden.check(f"{tool}/ASH-{letter}/p=65", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("tool", ["openood", "openood-vlm"])
def test_on_a_network_it_shapes_the_pooled_features(golden, tool):
    def outputs(images):
        weights = golden.images
        maps = torch.nn.functional.conv2d(images, weights["conv1_w"], weights["conv1_b"], stride=2, padding=1).relu()
        maps = torch.nn.functional.conv2d(maps, weights["conv2_w"], weights["conv2_b"], stride=2, padding=1).relu()
        features, head = maps.mean(dim=(2, 3)), Head(weights["fc_w"], weights["fc_b"])
        labels = torch.full((len(features),), -1)
        return Outputs(logits=head(features), features=features, labels=labels, head=head)

    in_distribution, out = outputs(golden.images["images_id"]), outputs(golden.images["images_ood"])
    detector = ASHBDetector(percentile=65).fit(in_distribution)
    golden.check(f"{tool}/ASH-B/p=65/on=cnn", detector(in_distribution), detector(out))


@pytest.mark.parametrize("width", [1, 3, 10, 64, 1280, 2048])
@pytest.mark.parametrize("percentile", [0, 5, 65, 85, 90, 99.9])
def test_it_keeps_as_many_as_the_authors_code(width, percentile):
    assert kept_count(width, percentile) == max(1, width - int(np.round(width * percentile / 100.0)))


def test_among_equal_features_the_first_ones_are_kept():
    features = torch.tensor([[0.0, 2.0, 2.0, 2.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    expected = [[False, True, True, False, False, True], [True, True, False, False, True, False]]
    assert largest(features, 50).tolist() == expected


def test_the_largest_are_those_of_a_stable_sort():
    features = (3 * torch.randn(200, 37)).round()  # many ties
    order = features.numpy().argsort(axis=1, kind="stable")
    for percentile in (10, 65, 90):
        kept = kept_count(37, percentile)
        mask = largest(features, percentile)
        assert mask.sum(dim=1).eq(kept).all()
        picked = torch.stack([row[m].sort().values for row, m in zip(features, mask, strict=True)])
        expected = torch.stack([row[torch.as_tensor(o[-kept:])] for row, o in zip(features, order, strict=True)])
        torch.testing.assert_close(picked, expected.sort(dim=1).values)


def test_concentration_is_the_ratio_of_the_sums():
    features = torch.rand(20, 30, dtype=torch.float64)
    expected = [row.sum() / row.sort().values[-kept_count(30, 65) :].sum() for row in features]
    torch.testing.assert_close(concentration(features, 65).squeeze(1), torch.stack(expected))


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("percentile", [50, 65])
def test_other_percentiles_keep_the_laws(kind, percentile):
    check_detector(kind(percentile=percentile))


def test_features_of_both_signs_score_finite():
    features = torch.randn(200, 16)
    head = Head.identity(16, features)
    outputs = Outputs(logits=features, features=features, labels=torch.full((200,), -1), head=head)
    for kind in KINDS.values():
        assert kind().fit(outputs)(outputs).isfinite().all()
