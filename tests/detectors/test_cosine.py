import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity

from ood_toolkit.detectors import MaxCosineDetector, RelativeCosineDetector
from ood_toolkit.outputs import Outputs


def cosines_to_means(train, test):
    means = torch.stack([train.features[train.labels == c].mean(dim=0) for c in train.labels.unique()])
    return torch.from_numpy(cosine_similarity(test.features.numpy(), means.numpy()))


@pytest.mark.parametrize("peer", ["ninco", "detectors"])
def test_the_largest_cosine_agrees_with_the_other_tools(golden, peer):
    detector = MaxCosineDetector().fit(golden.outputs("fit"))
    golden.check(f"{peer}/MaxCosine", detector(golden.outputs("id")), detector(golden.outputs("ood")), offset=-1.0)


def test_the_relative_cosine_agrees_with_ninco(golden):
    detector = RelativeCosineDetector().fit(golden.outputs("fit"))
    scores = detector(golden.outputs("id")), detector(golden.outputs("ood"))
    golden.check("ninco/RelativeCosine/T=1", *scores, offset=-1.0)


def test_maxcosine_is_one_minus_scikit_learns_largest_cosine(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    expected = 1 - cosines_to_means(train, test).amax(dim=1)
    torch.testing.assert_close(MaxCosineDetector().fit(train)(test), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_rcos_is_one_minus_the_largest_softmax_of_the_cosines(outputs_like, temperature):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    expected = 1 - (cosines_to_means(train, test) / temperature).softmax(dim=1).amax(dim=1)
    scores = RelativeCosineDetector(temperature).fit(train)(test)
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


def test_cosines_near_one_keep_their_digits_in_float32():
    means = torch.eye(3)
    angles = torch.linspace(1e-4, 2e-4, 50)  # 1 − cos is about 1e-8, where 1 − float32 cosine is a multiple of 6e-8
    rows = torch.stack([angles.cos(), angles.sin(), torch.zeros(50)], dim=1)
    detector = MaxCosineDetector().fit(Outputs.from_logits(means, torch.arange(3)))
    expected = 2 * (angles.double() / 2).sin().square()
    torch.testing.assert_close(detector(Outputs.from_logits(rows)).double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", [MaxCosineDetector, RelativeCosineDetector])
def test_classes_without_rows_are_refused_or_left_out(outputs_like, kind):
    train = outputs_like(240)
    without = train.rows(train.labels != 1)
    with pytest.raises(ValueError, match=r"classes \[1\] have none"):
        kind().fit(without)
    assert kind(absent="skip").fit(without).directions.shape == (3, 8)
