import pytest
import torch

from ood_toolkit.detectors.nac import NACDetector, neuron_gradients
from ood_toolkit.testing import check_detector, synthetic_outputs


def test_the_closed_form_is_the_backward_pass_of_the_divergence():
    data = synthetic_outputs().to(torch.float64)
    features = data.id.features.clone().requires_grad_()
    log_p = data.id.head(features).log_softmax(dim=1)
    uniform = torch.full_like(log_p, 1 / log_p.shape[1])
    torch.nn.functional.kl_div(log_p, uniform, reduction="sum").backward()
    torch.testing.assert_close(neuron_gradients(data.id.logits, data.id.head.weight), features.grad)


@pytest.mark.parametrize("intervals", [7, 49])
def test_coverage_is_counted_state_by_state(intervals):
    data = synthetic_outputs(fit_rows=60).to(torch.float64)
    detector = NACDetector(steepness=5.0, intervals=intervals, full=3.0, rows=None).fit(data.train)

    def states(outputs):
        return torch.sigmoid(5.0 * outputs.features * neuron_gradients(outputs.logits, outputs.head.weight))

    def interval(state):
        return min(int(state * intervals), intervals - 1)

    counts = torch.zeros(data.train.width, intervals)
    for row in states(data.train):
        for neuron, state in enumerate(row.tolist()):
            counts[neuron, interval(state)] += 1
    seen = states(data.ood)
    for row in range(5):
        covered = [min(1.0, float(counts[n, interval(s)]) / 3) for n, s in enumerate(seen[row].tolist())]
        assert float(detector(data.ood.rows([row]))) == pytest.approx(-sum(covered) / len(covered))


def test_a_state_that_rounds_to_1_counts_in_the_last_interval():
    data = synthetic_outputs()
    detector = NACDetector(steepness=1e9, rows=None).fit(data.train)
    assert detector.coverage[:, 1:-1].sum() == 0
    assert detector.coverage[:, -1].sum() > 0


def test_other_hyperparameters_keep_the_laws():
    check_detector(NACDetector(steepness=100.0, intervals=20, full=5.0, rows=300, seed=1))
