from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.gradnorm import GradNormDetector, GradUncertaintyDetector
from ood_toolkit.testing import check_detector


@pytest.mark.parametrize(
    ("key", "gradient_of", "classes"),
    [
        ("pytorch-ood/GradNorm", "weight", 1),
        ("pytorch-ood/GradNorm/params=weight+bias", "weight+bias", 1),
        ("openood/GradNorm", "weight", 20),
        ("openood-vlm/GradNorm", "weight", 20),
        ("detectors/GradNorm", "weight", 20),
    ],
)
def test_it_equals_the_other_tools_where_they_sum_c_times(golden, key, gradient_of, classes):
    detector = GradNormDetector(gradient_of=gradient_of)
    golden.check(key, detector(golden.outputs("id")), detector(golden.outputs("ood")), scale=classes)


def gradients(outputs, loss):
    weight, bias = (p.clone().requires_grad_() for p in (outputs.head.weight, outputs.head.bias))
    for features in outputs.features:
        yield torch.autograd.grad(loss(weight @ features + bias), (weight, bias))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_closed_form_is_the_l1_norm_of_the_backward_pass(golden, temperature):
    outputs = golden.outputs("ood", torch.float64).rows(range(30))
    outputs = replace(outputs, logits=outputs.head(outputs.features))  # float64 logits, not rounded to float32
    grads = list(gradients(outputs, lambda logits: -(logits / temperature).log_softmax(0).mean()))
    weight_only = torch.stack([-w.abs().sum() for w, _ in grads])
    both = torch.stack([-w.abs().sum() - b.abs().sum() for w, b in grads])
    torch.testing.assert_close(GradNormDetector(temperature=temperature)(outputs), weight_only)
    torch.testing.assert_close(GradNormDetector(temperature=temperature, gradient_of="weight+bias")(outputs), both)


def test_grad_uncertainty_is_the_squared_norm_of_the_backward_pass(golden):
    outputs = golden.outputs("ood", torch.float64).rows(range(30))
    outputs = replace(outputs, logits=outputs.head(outputs.features))  # float64 logits, not rounded to float32
    grads = list(gradients(outputs, lambda logits: -logits.softmax(0).log().sum()))  # BCE with targets 1
    weight_only = torch.stack([-w.square().sum() for w, _ in grads])
    both = torch.stack([-w.square().sum() - b.square().sum() for w, b in grads])
    torch.testing.assert_close(GradUncertaintyDetector(gradient_of="weight")(outputs), weight_only)
    torch.testing.assert_close(GradUncertaintyDetector()(outputs), both)


@pytest.mark.parametrize("detector", [GradNormDetector(gradient_of="weight+bias"), GradUncertaintyDetector("weight")])
def test_other_parameters_keep_the_laws(detector):
    check_detector(detector)
