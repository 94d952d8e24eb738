from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.benchmarks.masking import tap_under
from ood_toolkit.benchmarks.suite import ClassMask
from ood_toolkit.detectors.gaia import GAIAADetector, GAIAZDetector
from ood_toolkit.models import Classifier
from ood_toolkit.models.shared import SharedPass
from ood_toolkit.testing import check_detector


class Block(nn.Module):
    """A residual block that works in place wherever it can."""

    activation = staticmethod(nn.functional.relu_)

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.activation(out)


class ResNet(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act = (
            nn.Conv2d(3, 6, 3, 1, 1),
            nn.BatchNorm2d(6),
            activation or nn.ReLU(inplace=True),
        )
        self.layer1, self.layer2, self.layer3 = Block(6, 8, 2), Block(8, 10, 2), Block(10, 12, 2)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.act(self.bn1(self.conv1(x))))))
        return self.fc(x.mean(dim=(2, 3)))


def network(kind: type[nn.Module] = ResNet) -> Any:
    torch.manual_seed(3)
    net = kind().double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            for tensor in (module.weight.data, module.bias.data, module.running_mean):
                tensor.normal_(0.0, 0.6)
            module.running_var.fill_(0.1)  # so that images differ in what they switch on
    return net.eval()


def images(rows: int = 5) -> Tensor:
    return torch.rand(rows, 3, 24, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


IN_LAST_STAGES = ("layer2", "layer3")


def gradients(net, image, within, objective):
    """By hooks on tensors and one backward pass of one image: batch norms' name → gradient (K, H, W)."""
    found = {}

    def watch(name):
        def on_output(_module, _inputs, output):
            output.register_hook(lambda gradient: found.update({name: gradient[0].clone()}))

        return on_output

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in net.named_modules()
        if isinstance(module, nn.BatchNorm2d) and name.startswith(within)
    ]
    features = []
    handles.append(net.fc.register_forward_pre_hook(lambda _module, inputs: features.append(inputs[0])))
    logits = net(image.unsqueeze(0))
    objective(logits[0], features[0][0]).backward()
    for handle in handles:
        handle.remove()
    net.zero_grad()
    return found


def literal_z(net, image, within):
    squares = []
    for gradient in gradients(net, image, within, lambda logits, _features: logits.max()).values():
        for channel in gradient:
            share = sum(number != 0 for number in channel.flatten().tolist()) / channel.numel()
            squares.append(share**2)
    return sum(squares) / len(squares)


def literal_a(net, image, within):
    squares = []
    for gradient in gradients(net, image, within, lambda _logits, features: features.sum()).values():
        squares += [float(channel.mean()) ** 2 for channel in gradient]
    with torch.no_grad():
        feature = net.layer3(net.layer2(net.layer1(net.act(net.bn1(net.conv1(image.unsqueeze(0))))))).mean(dim=(2, 3))
    feature.requires_grad_()
    (pull,) = torch.autograd.grad(net.fc(feature).log_softmax(dim=1).sum(), feature)
    return sum(squares) / len(squares) / float(pull.abs().mean())


@pytest.mark.parametrize(("layers", "within"), [(None, IN_LAST_STAGES), (("",), ("",)), (("layer1",), ("layer1",))])
def test_gaia_z_is_the_authors_recipe_image_by_image(layers, within):
    net, detector = network(), GAIAZDetector(layers)
    expected = [literal_z(net, image, within) for image in images()]
    assert 0.01 < min(expected) < max(expected) < 0.99
    scores = detector(Classifier(net, taps=detector.taps)(images()))
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("layers", "within"), [(None, IN_LAST_STAGES), (("",), ("",))])
def test_gaia_a_is_the_authors_recipe_image_by_image(layers, within):
    net, detector = network(), GAIAADetector(layers)
    outputs = Classifier(net, taps=detector.taps)(images())
    expected = [literal_a(net, image, within) for image in images()]
    torch.testing.assert_close(
        detector.fit(outputs)(outputs), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0
    )


def test_the_predicted_class_of_gaia_z_is_sought_under_the_mask():
    net, classes = network(), [0, 3]
    cut = network()
    cut.fc.weight.data, cut.fc.bias.data = cut.fc.weight[classes].clone(), cut.fc.bias[classes].clone()
    masked, plain = tap_under("gradient_density", ClassMask("two", torch.tensor(classes))), "gradient_density"
    expected = Classifier(cut, taps=(plain,))(images(8)).taps[plain]
    torch.testing.assert_close(Classifier(net, taps=(masked,))(images(8)).taps[masked], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tap", ["gradient_density", "gradient_means"])
def test_gradients_of_a_half_precision_network_are_reduced_in_float32(tap):
    half = Classifier(network().bfloat16(), taps=(tap,))(images().float()).taps[tap]
    whole = Classifier(network().float(), taps=(tap,))(images().float()).taps[tap]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole, rtol=0.2, atol=0)  # the network itself has 8 bits
    assert not torch.equal(half, half.bfloat16().float())


class FusedNet(nn.Module):
    """A batch norm that brings its own activation, as timm's do."""

    class Norm(nn.BatchNorm2d):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

        def forward(self, input: Tensor) -> Tensor:
            return self.act(self.drop(super().forward(input)))

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), FusedNet.Norm(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).mean(dim=(2, 3)))


def test_a_fused_activation_comes_after_the_gradient():
    net = network(FusedNet)
    density = Classifier(net, taps=("gradient_density",))(images()).taps["gradient_density"]
    with torch.no_grad():
        normalised = nn.functional.batch_norm(
            net.conv(images()), net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias
        )
    on = (normalised > 0).double().mean(dim=(2, 3))  # the head reads the mean, so nothing else makes a gradient 0
    torch.testing.assert_close(density.square().sum(dim=1), on.square().mean(dim=1))


def test_a_network_without_flat_activations_gives_gaia_a_alone(monkeypatch):
    monkeypatch.setattr(Block, "activation", staticmethod(nn.functional.silu))
    classifier = Classifier(network(), taps=("gradient_density", "gradient_means"))
    assert set(classifier(images()).taps) == {"gradient_means"}
    assert "its activations seem to have no flat part" in classifier.tap_gaps["gradient_density"]


def test_a_network_without_norms_or_without_such_layers_says_so():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    classifier = Classifier(net, taps=("gradient_means",))
    assert not classifier(images().float()).taps
    assert classifier.tap_gaps["gradient_means"] == "Sequential has no batch, group or instance norm"
    for layers, message in (("layer9", r"no layers \['layer9'\]"), ("act", "no batch, group or instance norm in act")):
        tap = f"gradient_means(layers=('{layers}',))"
        classifier = Classifier(network(), taps=(tap,))
        assert not classifier(images()).taps
        with pytest.raises(ValueError, match=message):
            raise ValueError(classifier.tap_gaps[tap])


def test_the_shared_pass_gives_the_same_and_leaves_the_model_alone():
    net, taps = network(), ("gradient_density", "gradient_means")
    net.fc.bias.requires_grad_(False)
    alone = Classifier(net, taps=taps)
    expected = alone(images())
    before = {name: p.clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        shared = SharedPass(alone, alone.with_taps(()), images())
        shared.differentiate(images())  # somebody else's pass with gradients, which has no hooks
        outputs = shared.outputs()
    for tap in taps:
        torch.testing.assert_close(outputs.taps[tap], expected.taps[tap], rtol=1e-12, atol=0)
        assert not outputs.taps[tap].requires_grad
    for name, parameter in net.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad == (name != "fc.bias")
    assert not any(module._forward_hooks for module in net.modules())
    assert net.act.inplace


def test_only_the_layers_behind_the_first_that_is_watched_are_gone_back_through():
    net, calls = network(), []
    # a full backward pass would call the hook of every tensor before layer2, too
    net.layer1.register_forward_hook(lambda _m, _i, output: calls.append(output.requires_grad))
    Classifier(net, taps=("gradient_means",))(images())
    assert not calls[-1]


def test_the_tap_names_what_differs_from_the_defaults():
    assert GAIAZDetector().taps == ("gradient_density",)
    assert GAIAADetector(("layer3",)).taps == ("gradient_means(layers=('layer3',))",)


def test_gaia_a_keeps_the_head_it_was_fitted_with():
    outputs = Classifier(network(), taps=("gradient_means",))(images())
    detector = GAIAADetector().fit(outputs)
    other = replace(outputs.head, weight=2 * outputs.head.weight)
    torch.testing.assert_close(detector(replace(outputs, head=other)), detector(outputs))


@pytest.mark.parametrize("detector", [GAIAZDetector(), GAIAADetector()])
def test_it_keeps_the_laws(detector):
    check_detector(detector)
