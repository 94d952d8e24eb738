import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from ood_toolkit.benchmarks.methods import scores_log_probabilities
from ood_toolkit.detectors import (
    ExpectedEntropyDetector,
    MCDropoutDetector,
    MutualInformationDetector,
    PredictiveEntropyDetector,
    TTADetector,
    VariationRatioDetector,
)
from ood_toolkit.detectors.uncertainty import STATISTICS, mutual_information
from ood_toolkit.models import Classifier
from ood_toolkit.testing import synthetic_outputs

MEMBERS = 3 * torch.randn(30, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def literal(statistic: str, members: np.ndarray) -> float:
    """One row's (M, C) logits, by the textbook."""
    p = np.exp(members) / np.exp(members).sum(axis=1, keepdims=True)
    entropies = [scipy.stats.entropy(q) for q in p]
    votes = np.bincount(p.argmax(axis=1), minlength=p.shape[1])
    return {
        "predictive_entropy": scipy.stats.entropy(p.mean(axis=0)),
        "expected_entropy": np.mean(entropies),
        "mutual_information": scipy.stats.entropy(p.mean(axis=0)) - np.mean(entropies),
        "variation_ratio": 1 - votes.max() / len(p),
        "msp": 1 - p.mean(axis=0).max(),
        "variance": p.var(axis=0, ddof=1).mean(),
    }[statistic]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_statistic_written_out(statistic):
    got = STATISTICS[statistic](MEMBERS)
    expected = [literal(statistic, row) for row in MEMBERS.numpy()]
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "kind", [ExpectedEntropyDetector, MutualInformationDetector, PredictiveEntropyDetector, VariationRatioDetector]
)
def test_a_detector_is_its_statistic_and_dropout_and_tta_can_take_it_too(kind):
    outputs = synthetic_outputs(["member_logits", "dropout_logits", "augmented_logits"]).ood
    expected = STATISTICS[kind.name](outputs.taps["member_logits"])
    assert torch.equal(kind()(outputs), expected)
    assert torch.equal(MCDropoutDetector(statistic=kind.name)(outputs), expected)
    assert torch.equal(TTADetector(statistic=kind.name)(outputs), expected)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_one_network_with_dropout_is_scored_by_passes_with_masks_applied_by_hand(statistic):
    body, head = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.Tanh()), nn.Linear(12, 5)
    model = nn.Sequential(body, nn.Dropout(0.4), head).double()
    images = torch.rand(6, 3, 4, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        masks = [(torch.rand(12, generator=generator) >= 0.4) / 0.6 for _ in range(4)]
        passes = torch.stack([head(body(images) * mask) for mask in masks], dim=1)
    expected = [literal(statistic, row) for row in passes.numpy()]
    detector = MCDropoutDetector(samples=4, seed=3, statistic=statistic)
    assert detector(Classifier(model, taps=detector.taps)(images)).tolist() == pytest.approx(expected, rel=1e-6)
    assert detector.wrap(model).score(images).tolist() == pytest.approx(expected, rel=1e-6)


def test_one_network_is_scored_by_its_logits_of_the_image_and_its_mirror_image():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).double()
    images = torch.rand(6, 3, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        passes = torch.stack([model(images), model(torch.from_numpy(images.numpy()[..., ::-1].copy()))], dim=1)
    expected = [literal("mutual_information", row) for row in passes.numpy()]
    detector = TTADetector(shift=0, crop=1, statistic="mutual_information")
    assert detector(Classifier(model, taps=detector.taps)(images)).tolist() == pytest.approx(expected, rel=1e-6)


def test_the_defaults_of_detectors_are_those_of_their_taps():
    assert MCDropoutDetector().taps == ("dropout_logits",)
    assert MCDropoutDetector(samples=3).taps == ("dropout_logits(samples=3)",)
    assert TTADetector().taps == ("augmented_logits",)
    assert TTADetector(flip=False, crop=0.8).taps == ("augmented_logits(flip=False, crop=0.8)",)
    images = torch.rand(2, 3, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 4))
    specs = ("dropout_logits(samples=10, seed=0)", "augmented_logits(flip=True, shift=0.04, crop=0.9)")
    taps = Classifier(model, taps=("dropout_logits", "augmented_logits", *specs))(images).taps
    assert torch.equal(taps["dropout_logits"], taps[specs[0]])
    assert torch.equal(taps["augmented_logits"], taps[specs[1]])


def test_dropout_and_copies_are_of_one_network_and_no_ensembles():
    members = frozenset({"member_logits"})
    assert scores_log_probabilities(PredictiveEntropyDetector(), members)
    assert not scores_log_probabilities(MCDropoutDetector(), members)
    assert not scores_log_probabilities(TTADetector(), members)


def test_members_that_agree_share_no_information():
    same = MEMBERS[:, :1].expand(-1, 5, -1)
    assert mutual_information(same).abs().max() < 1e-12


def test_the_information_of_sure_members_does_not_cancel_in_float32():
    # members that are all sure of one class, by different margins: their entropies differ by less than float32 can show
    margins = torch.linspace(15, 25, 40).unsqueeze(1) + torch.tensor([0.0, 0.7, 2.0])
    members = torch.stack([margins, torch.zeros(40, 3)], dim=2)
    exact = mutual_information(members.double())
    assert torch.allclose(mutual_information(members).double(), exact, rtol=1e-3, atol=0)


def test_impossible_classes_and_one_member_are_no_accident():
    members = MEMBERS.clone()
    members[:, :, 0] = -torch.inf
    for name, statistic in STATISTICS.items():
        assert torch.allclose(statistic(members), statistic(members[:, :, 1:]) * (6 / 7 if name == "variance" else 1))
        if name != "variance":
            assert statistic(MEMBERS[:, :1]).isfinite().all()


def test_outputs_without_members_are_told_so():
    with pytest.raises(ValueError, match="member_logits"):
        MutualInformationDetector()(synthetic_outputs().id)


def test_an_unknown_statistic_is_refused():
    with pytest.raises(ValueError, match="'std'"):
        MCDropoutDetector(statistic="std")


def test_one_pass_with_dropout_is_refused():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        MCDropoutDetector(samples=1)
