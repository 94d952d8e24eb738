import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from ood_toolkit import metrics
from ood_toolkit.benchmarks.measure import Bootstrap, anomaly, calibration, misclassification

FEW = Bootstrap(resamples=50)


def test_ood_is_the_positive_class_of_an_anomaly_row():
    generator = torch.Generator().manual_seed(0)
    low, high = torch.randn(80, generator=generator), torch.randn(40, generator=generator) + 1
    cells = anomaly(low, high, FEW)
    truth, scores = np.r_[np.zeros(80), np.ones(40)], torch.cat([low, high]).numpy()
    assert cells["auroc"].value == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert cells["aupr"].value == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    assert cells["aupr_id"].value == pytest.approx(average_precision_score(1 - truth, -scores), abs=1e-12)
    threshold = np.sort(high.numpy())[::-1][37]  # 38 of 40 are caught at or above it
    assert cells["fpr95"].value == pytest.approx((low.numpy() >= threshold).mean())
    for cell in cells.values():
        assert cell.low is not None
        assert cell.high is not None
        assert cell.low <= cell.high


def test_the_error_rate_is_resampled_and_the_sizes_of_data_sets_are_not():
    generator = torch.Generator().manual_seed(0)
    low, high = torch.randn(300, generator=generator), torch.randn(60, generator=generator) + 1
    found = {"fixed": anomaly(low, high, FEW)["aupr"], "random": misclassification(low, high, FEW)["aupr_error"]}
    for strata, cell in found.items():
        expected = metrics.interval("aupr", low, high, resamples=50, strata=strata)  # pyright: ignore
        assert (cell.value, cell.low, cell.high) == expected


def test_methods_that_share_their_resamples_get_what_they_get_alone():
    generator = torch.Generator().manual_seed(0)
    shared = Bootstrap(resamples=50)
    for _ in range(3):
        low, high = torch.randn(80, generator=generator), torch.randn(40, generator=generator) + 1
        assert anomaly(low, high, shared) == anomaly(low, high, Bootstrap(resamples=50))
        assert misclassification(low, high, shared) == misclassification(low, high, Bootstrap(resamples=50))


def test_a_row_without_errors_says_so_and_has_no_number():
    cells = misclassification(torch.randn(10), torch.empty(0), FEW)
    assert cells["auroc"].value is None
    assert cells["auroc"].reason
    assert cells["aurc"].value == 0.0


def test_no_resamples_means_no_interval():
    cells = anomaly(torch.zeros(5), torch.ones(5), Bootstrap(resamples=0))
    assert (cells["auroc"].value, cells["auroc"].low, cells["auroc"].high) == (1.0, None, None)
    logits = torch.randn(150, 3).log_softmax(1)
    assert calibration(logits, torch.arange(150) % 3, Bootstrap(resamples=0))["nll"].low is None


def test_calibration_numbers_are_those_of_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(300, 4, generator=generator).log_softmax(dim=1)
    labels = torch.randint(4, (300,), generator=generator)
    cells = calibration(log_p, labels, FEW)
    assert cells["nll"].value == pytest.approx(float(torch.nn.functional.nll_loss(log_p.double(), labels)), abs=1e-6)
    assert cells["accuracy"].value == pytest.approx(float((log_p.argmax(1) == labels).double().mean()))
    onehot = torch.nn.functional.one_hot(labels, 4)
    assert cells["brier"].value == pytest.approx(
        float((log_p.double().exp() - onehot).square().sum(1).mean()), abs=1e-6
    )


def test_the_published_rms_needs_a_hundred_rows():
    log_p = torch.randn(99, 3).log_softmax(1)
    cells = calibration(log_p, torch.arange(99) % 3, FEW)
    assert cells["rms_official"].value is None
    assert "needs 100 rows, there are 99" in cells["rms_official"].reason
    assert cells["rms"].value is not None
