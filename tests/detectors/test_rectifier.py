import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from scipy.stats import entropy as scipy_entropy

from ood_toolkit.detectors.react import ReActDetector
from ood_toolkit.detectors.rectifier import HEAD_SCORES, Rectifier, checked_percentile
from ood_toolkit.detectors.scale import SCALEDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


class Untouched(Rectifier):
    """Leaves the features as they are."""

    name = "untouched"
    paper = "none"

    def __init__(self, score: str = "energy") -> None:
        super().__init__(score)

    def rectify(self, features):
        return features


@pytest.mark.parametrize("score", sorted(HEAD_SCORES))
def test_without_reshaping_it_is_the_head_score_of_the_logits(score):
    data = synthetic_outputs()
    rectified = Untouched(score=score).fit(data.train)(data.id)
    torch.testing.assert_close(rectified, HEAD_SCORES[score](data.id.logits), rtol=1e-4, atol=1e-5)


def test_head_scores_are_those_of_scipy():
    logits = 3 * torch.randn(50, 7, dtype=torch.float64)
    p = softmax(logits.numpy(), axis=1)
    expected = {
        "msp": 1 - p.max(axis=1),
        "maxlogit": -logits.numpy().max(axis=1),
        "entropy": scipy_entropy(p, axis=1),
        "energy": (log_softmax(logits.numpy(), axis=1) - logits.numpy()).mean(axis=1),
        "margin": 1 - (np.sort(p, axis=1)[:, -1] - np.sort(p, axis=1)[:, -2]),
        "gen": (p**0.1 * (1 - p) ** 0.1).sum(axis=1),
        "doctor_alpha": (1 - (p**2).sum(axis=1)) / (p**2).sum(axis=1),
    }
    assert set(expected) == set(HEAD_SCORES)
    for name, values in expected.items():
        torch.testing.assert_close(HEAD_SCORES[name](logits), torch.as_tensor(values), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("score", sorted(HEAD_SCORES))
def test_every_head_score_keeps_the_laws(score):
    check_detector(SCALEDetector(score=score))


def test_the_score_parameter_survives_spec_repr_and_clone():
    detector = ReActDetector(percentile=80, score="msp")
    assert detector.spec == "react(percentile=80, score='msp')"
    assert repr(detector.clone()) == "ReActDetector(percentile=80, score='msp')"
    assert detector.head_score_parameter in detector.hyperparameters


def test_an_unknown_head_score_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"energy.*'enrgy'"):
        ReActDetector(score="enrgy")


@pytest.mark.parametrize("value", [-1, 100, 250])
def test_a_percentile_is_below_100(value):
    with pytest.raises(ValueError, match=str(value)):
        checked_percentile(value)
