import numpy as np
import pytest
import scipy.stats
import torch

from ood_toolkit.detectors import (
    ExpectedEntropyDetector,
    MCDropoutDetector,
    MutualInformationDetector,
    PredictiveEntropyDetector,
    TTADetector,
    VariationRatioDetector,
)
from ood_toolkit.detectors.uncertainty import STATISTICS, mutual_information
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
    outputs = synthetic_outputs(["member_logits"]).ood
    expected = STATISTICS[kind.name](outputs.taps["member_logits"])
    assert torch.equal(kind()(outputs), expected)
    assert torch.equal(MCDropoutDetector(statistic=kind.name)(outputs), expected)
    assert torch.equal(TTADetector(statistic=kind.name)(outputs), expected)


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
