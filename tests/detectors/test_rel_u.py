import numpy as np
import pytest
import torch

from ood_toolkit.detectors import DoctorAlphaDetector, RelUDetector
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize(("trade_off", "temperature"), [(0.5, 1.0), (0.8, 2.0)])
def test_the_matrix_and_the_quadratic_form_written_out(trade_off, temperature):
    data = synthetic_outputs().to(torch.float64)
    p = (data.train.logits / temperature).softmax(dim=1).numpy()
    wrong = (data.train.logits.argmax(dim=1) != data.train.labels).numpy()
    matrix = np.zeros((6, 6))
    for i in range(6):
        for j in range(6):
            if i != j:
                bad = np.mean([row[i] * row[j] for row in p[wrong]])
                good = np.mean([row[i] * row[j] for row in p[~wrong]])
                matrix[i, j] = max(0.0, trade_off * bad - (1 - trade_off) * good)
    matrix /= np.sqrt((matrix**2).sum())
    got = RelUDetector(trade_off, temperature).fit(data.train)(data.id)
    for row, score in zip((data.id.logits / temperature).softmax(dim=1).numpy(), got.tolist(), strict=True):
        assert score == pytest.approx(sum(row[i] * matrix[i, j] * row[j] for i in range(6) for j in range(6)))


def test_without_a_wrong_row_it_ranks_as_the_gini_coefficient():
    data = synthetic_outputs()
    right = data.train.with_labels(data.train.predictions)
    scores = RelUDetector().fit(right)(data.id)
    assert torch.equal(scores.double().argsort(), DoctorAlphaDetector()(data.id).double().argsort())


def test_unknown_labels_do_not_count_as_wrong():
    data = synthetic_outputs()
    labels = data.train.labels.clone()
    labels[::2] = -1
    half = RelUDetector().fit(data.train.with_labels(labels))
    assert torch.equal(half.distances, RelUDetector().fit(data.train.rows(labels >= 0)).distances)


def test_it_needs_a_label():
    with pytest.raises(ValueError, match="labelled"):
        RelUDetector().fit(synthetic_outputs().ood)
