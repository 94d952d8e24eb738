import torch

from ood_toolkit.detectors.softmax import class_means, log_probabilities
from ood_toolkit.testing import synthetic_outputs


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
