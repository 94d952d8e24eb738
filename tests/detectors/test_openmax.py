import numpy as np
import pytest
import scipy.stats
import torch

from ood_toolkit.detectors import OpenMaxDetector
from ood_toolkit.detectors.openmax import weibull_fit
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize("peer", ["openood", "openood-vlm"])
def test_it_equals_the_tools_that_use_libmr(golden, peer):
    detector = OpenMaxDetector(tail=20, alpha=3).fit(golden.outputs("fit"))
    golden.check(f"{peer}/OpenMax/tail=20/alpha=3", detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_the_weibull_is_scipy_s_maximum_likelihood():
    generator = np.random.default_rng(0)
    tails = [1 + generator.weibull(k, 20) for k in (0.7, 1.5, 6.0)]
    shapes, scales = weibull_fit(torch.tensor(np.array(tails)))
    for tail, shape, scale in zip(tails, shapes.tolist(), scales.tolist(), strict=True):
        expected_shape, _, expected_scale = scipy.stats.weibull_min.fit(tail, floc=0)
        assert (shape, scale) == (pytest.approx(expected_shape, rel=1e-3), pytest.approx(expected_scale, rel=1e-3))


def test_missing_numbers_do_not_count():
    tail = torch.tensor([1.0, 1.4, 2.0, 2.2], dtype=torch.float64)
    padded = torch.cat([tail, torch.full((3,), torch.nan, dtype=torch.float64)])
    assert torch.allclose(torch.stack(weibull_fit(tail[None])), torch.stack(weibull_fit(padded[None])))


def test_the_revision_of_the_logits_written_out():
    data = synthetic_outputs().to(torch.float64)
    z, labels = data.train.logits.numpy(), data.train.labels.numpy()
    right = z.argmax(axis=1) == labels
    means, models = [], []
    for c in range(6):
        rows = z[right & (labels == c)]
        means.append(rows.mean(axis=0))
        tail = np.sort(np.linalg.norm(rows - means[c], axis=1))[-12:]
        shape, _, scale = scipy.stats.weibull_min.fit(tail - tail.min() + 1, floc=0)
        models.append((tail.min(), shape, scale))
    got = OpenMaxDetector(tail=12, alpha=4).fit(data.train)(data.ood)
    for row, score in zip(data.ood.logits.numpy(), got.tolist(), strict=True):
        revised, unknown = row.copy(), 0.0
        for rank, c in enumerate(np.argsort(-row)[:4]):
            start, shape, scale = models[c]
            distance = np.linalg.norm(row - means[c])
            outlier = scipy.stats.weibull_min.cdf(distance - start + 1, shape, scale=scale)
            revised[c] = row[c] * (1 - (4 - rank) / 4 * outlier)
            unknown += row[c] - revised[c]
        expected = np.exp(unknown) / (np.exp(unknown) + np.exp(revised).sum())
        assert score == pytest.approx(expected, rel=2e-3)  # scipy's fit stops at about 1e-4


def test_the_tail_does_not_depend_on_how_the_rows_are_batched():
    train = synthetic_outputs().train
    whole = OpenMaxDetector().fit(train)

    class InSmallBatches(type(train)):
        def batches(self, rows=None):
            return super().batches(rows=17)

    pieces = InSmallBatches(
        logits=train.logits, features=train.features, labels=train.labels, head=train.head, taps=train.taps
    )
    parts = OpenMaxDetector().fit(pieces)
    assert torch.allclose(parts.shapes, whole.shapes)
    assert torch.allclose(parts.starts, whole.starts)


def test_a_class_without_a_right_row_is_refused_or_never_revised():
    data = synthetic_outputs()
    train = data.train.rows(data.train.labels != 2)
    with pytest.raises(ValueError, match=r"classes \[2\]"):
        OpenMaxDetector().fit(train)
    skipped = OpenMaxDetector(absent="skip").fit(train)
    assert torch.isfinite(skipped(data.id)).all()
    alone = data.id.rows(data.id.predictions == 2)
    only_top = OpenMaxDetector(alpha=1, absent="skip").fit(train)
    expected = 1 / (1 + alone.logits.exp().sum(dim=1))  # nothing moves to the unknown class, whose logit stays 0
    assert torch.allclose(only_top(alone), expected)
