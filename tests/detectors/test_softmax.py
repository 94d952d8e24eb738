from fractions import Fraction

import pytest
import torch

from ood_toolkit.detectors.doctor import gini_odds
from ood_toolkit.detectors.entropy import softmax_entropy
from ood_toolkit.detectors.gen import generalised_entropy
from ood_toolkit.detectors.softmax import class_means, log_probabilities, odds_of_others
from ood_toolkit.testing import synthetic_outputs

HARD_ROWS = {
    "all equal": [2.0] * 7,
    "two tied at the top": [5.0, 5.0, 1.0, 0.0, -3.0, 2.0, 4.0],
    "almost tied, so that the exponential rounds to 1": [1e-9, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
    "sure": [40.0, 0.0, 1.0, -2.0, 3.0, 2.5, -9.0],
    "a class that cannot be": [3.0, 1.0, -torch.inf, 0.0, 2.0, -torch.inf, 1.0],
}


def test_it_is_the_log_softmax():
    logits = 5 * torch.randn(60, 9, dtype=torch.float64)
    assert torch.allclose(log_probabilities(logits), logits.log_softmax(dim=1), rtol=1e-12)


def test_the_log_of_a_probability_near_one_does_not_round_to_zero():
    margins = torch.linspace(17, 80, 50)
    logs = log_probabilities(torch.stack([margins, torch.zeros(50)], dim=1))[:, 0]
    assert torch.allclose(logs, -torch.special.expit(-margins), rtol=1e-5, atol=0)


def test_class_means_leave_out_negative_groups_and_mark_empty_classes():
    train = synthetic_outputs().train
    means, counts = class_means(train, lambda b: b.logits, lambda b: torch.where(b.labels == 3, -1, b.labels))
    assert counts.tolist() == [120, 120, 120, 0, 120, 120]
    assert means[3].isnan().all()
    assert torch.allclose(means[5], train.logits[train.labels == 5].double().mean(dim=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", HARD_ROWS)
def test_scores_of_a_hard_softmax_keep_their_digits(row, dtype):
    logits = torch.tensor([HARD_ROWS[row]], dtype=dtype)
    # exact sums of exponentials that are themselves right to 53 bits
    terms = [Fraction(float(term)) for term in (logits.double() - logits.double().amax()).exp()[0]]
    total = sum(terms)
    others, left = total - 1, sum(term * (total - term) for term in terms)
    squares = sum(term * term for term in terms)
    rounding = {"rtol": 1e-5 if dtype == torch.float32 else 1e-13, "atol": 0}
    torch.testing.assert_close(odds_of_others(logits).item(), float(others), **rounding)
    torch.testing.assert_close(gini_odds(logits).item(), float(left / squares), **rounding)
    shares = torch.tensor([float(term / total) for term in terms if term], dtype=torch.float64)
    rests = torch.tensor([float((total - term) / total) for term in terms if term], dtype=torch.float64)
    # log p of the largest from the rest, because p itself rounds to 1
    logs = torch.where(shares > 0.5, (-rests).log1p(), shares.log())
    torch.testing.assert_close(softmax_entropy(logits).item(), float(-(shares * logs).sum()), **rounding)
    expected = (shares * rests).pow(0.3).sort(descending=True).values[:3]
    torch.testing.assert_close(generalised_entropy(logits, 0.3, 3).item(), float(expected.sum()), **rounding)
