from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.exgrad import ExGradDetector, expected_distance
from ood_toolkit.testing import check_detector


def literal_expectation(weight, bias, features, *, temperature, norm, with_bias):
    """One backward pass for every class, its norm weighted with the class's probability."""
    weight, bias = (p.clone().requires_grad_() for p in (weight, bias))
    total = 0.0
    for c in range(len(bias)):
        log_probabilities = ((weight @ features + bias) / temperature).log_softmax(0)
        by_weight, by_bias = torch.autograd.grad(-log_probabilities[c], (weight, bias))
        numbers = [*by_weight.flatten().tolist(), *(by_bias.tolist() if with_bias else [])]
        length = sum(abs(x) for x in numbers) if norm == 1 else sum(x * x for x in numbers) ** 0.5
        total += float(log_probabilities[c].detach().exp()) * length
    return total


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("gradient_of", ["weight", "weight+bias"])
def test_the_closed_form_is_the_mean_norm_of_a_backward_pass_per_class(golden, temperature, norm, gradient_of):
    outputs = golden.outputs("ood", torch.float64).rows(range(12))
    outputs = replace(outputs, logits=outputs.head(outputs.features))  # float64 logits, not rounded to float32
    expected = [
        literal_expectation(
            outputs.head.weight,
            outputs.head.bias,
            features,
            temperature=temperature,
            norm=norm,
            with_bias=gradient_of == "weight+bias",
        )
        for features in outputs.features
    ]
    detector = ExGradDetector(temperature, norm, gradient_of)
    torch.testing.assert_close(detector(outputs), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("order", [1, 2])
def test_a_softmax_near_1_keeps_its_relative_precision(order):
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 2] += 40
    logits[0] = torch.tensor([5.0, 5.0, 1.0, 0.0, -3.0, 5.0, 2.0, -90.0])  # three share the first place
    double = logits.double().log_softmax(dim=1)
    expected = torch.zeros(50, dtype=torch.float64)
    for row, logs in enumerate(double):
        for c, log in enumerate(logs):
            others = torch.cat([logs[:c], logs[c + 1 :]]).exp()  # 1 − p_c is their sum
            length = 2 * others.sum() if order == 1 else (others.sum().square() + others.square().sum()).sqrt()
            expected[row] += log.exp() * length
    assert float(expected[1:].max()) < 1e-10
    torch.testing.assert_close(expected_distance(logits, order).double(), expected, rtol=2e-5, atol=0)


def test_an_unknown_norm_or_part_is_refused():
    with pytest.raises(ValueError, match="norm must be 1 or 2, got 3"):
        ExGradDetector(norm=3)
    with pytest.raises(ValueError, match=r"gradient_of must be 'weight' or 'weight\+bias', got 'bias'"):
        ExGradDetector(gradient_of="bias")


@pytest.mark.parametrize("detector", [ExGradDetector(), ExGradDetector(norm=2, gradient_of="weight+bias")])
def test_it_keeps_the_laws(detector):
    check_detector(detector)
