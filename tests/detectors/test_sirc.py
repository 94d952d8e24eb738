import math

import numpy as np
import pytest
import torch

from ood_toolkit.detectors.sirc import SIRCDetector, default_dim, log_entropy, log_one_minus_doctor, log_one_minus_msp
from ood_toolkit.testing import check_detector, synthetic_outputs

PRIMARIES = ("msp", "entropy", "doctor")


def doubt(logits, primary):
    p = logits.double().softmax(0)
    return {"msp": 1 - p.max(), "entropy": -(p * p.log()).sum(), "doctor": 1 - p.square().sum()}[primary]


@pytest.mark.parametrize("primary", PRIMARIES)
@pytest.mark.parametrize("secondary", ["l1", "residual"])
def test_it_ranks_by_the_paper_s_confidence(primary, secondary):
    data = synthetic_outputs().to(torch.float64)
    dim = None if secondary == "l1" else 20
    detector = SIRCDetector(primary=primary, secondary=secondary, dim=dim).fit(data.train)
    if secondary == "l1":
        train, rows = (part.features.norm(p=1, dim=1) for part in (data.train, data.ood))
    else:
        origin = -np.linalg.pinv(data.train.head.weight.numpy()) @ data.train.head.bias.numpy()
        centred = data.train.features.numpy() - origin
        basis = np.linalg.svd(centred, full_matrices=True)[2].T[:, 20:]
        train, rows = (
            -torch.as_tensor(np.linalg.norm((part.features.numpy() - origin) @ basis, axis=1))
            for part in (data.train, data.ood)
        )
    a, b = float(train.mean() - 3 * train.std(correction=0)), 1 / float(train.std(correction=0))
    for row in range(20):
        confidence = -float(doubt(data.ood.logits[row], primary)) * (1 + math.exp(-b * (float(rows[row]) - a)))
        assert float(detector(data.ood.rows([row]))) == pytest.approx(math.log(-confidence), rel=1e-6)


def test_training_rows_all_alike_leave_the_scores_finite():
    data = synthetic_outputs()
    assert bool(SIRCDetector().fit(data.train.rows([0]))(data.id).isfinite().all())


def test_the_softmax_parts_do_not_saturate():
    # 60 logit units: 1 − p is 8.8e-27, which rounds away even in float64
    logits = torch.tensor([[60.0, 0.0], [61.0, 0.0]])
    torch.testing.assert_close(log_one_minus_msp(logits), torch.tensor([-60.0, -61.0]))
    torch.testing.assert_close(log_one_minus_doctor(logits), math.log(2) + torch.tensor([-60.0, -61.0]))
    torch.testing.assert_close(log_entropy(logits), torch.tensor([math.log(61) - 60, math.log(62) - 61]))


@pytest.mark.parametrize(("width", "dim"), [(2048, 1000), (1280, 512), (512, 256), (128, 64)])
def test_the_principal_space_has_the_authors_size(width, dim):
    assert default_dim(width) == dim


@pytest.mark.parametrize("primary", PRIMARIES)
def test_the_residual_keeps_the_laws(primary):
    check_detector(SIRCDetector(primary=primary, secondary="residual", dim=24))
