import pytest
import torch
from torch import nn

from ood_toolkit.detectors.layers import split_layers
from ood_toolkit.models import Classifier


class Convolutional(nn.Module):
    """Three stages of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.fc = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.last(self.middle(self.stem(images))).mean(dim=(2, 3)))

    @torch.no_grad()
    def maps(self, images: torch.Tensor) -> list[torch.Tensor]:
        stem = self.stem(images)
        return [stem, self.middle(stem), self.last(self.middle(stem))]


class Tokens(nn.Module):
    """Two blocks over a class token and four patches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def tokens(self, images: torch.Tensor) -> list[torch.Tensor]:
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).flatten(2, 3).transpose(1, 2).flatten(2)
        first = self.first(torch.cat([torch.ones_like(patches[:, :1]), patches], dim=1))
        return [first, self.second(first)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.tokens(images)[1][:, 0])


def test_shallow_statistics_are_means_and_variances_of_the_first_stage():
    net, images = Convolutional(), torch.rand(4, 3, 16, 16)
    found = Classifier(net, taps=("shallow_statistics",))(images).taps["shallow_statistics"]
    stem = net.maps(images)[0]
    assert found.shape == (4, 2, 4)
    torch.testing.assert_close(found[:, 0], stem.mean(dim=(2, 3)))
    torch.testing.assert_close(found[:, 1], stem.var(dim=(2, 3), correction=1))


def test_a_single_position_has_no_variance():
    spec = "shallow_statistics(layers=('fc',))"
    outputs = Classifier(Convolutional(), taps=(spec,))(torch.rand(4, 3, 16, 16))
    torch.testing.assert_close(outputs.taps[spec][:, 0], outputs.logits)
    assert not outputs.taps[spec][:, 1].any()


def test_block_maxima_are_those_of_every_stage_but_the_first():
    net, images = Convolutional(), torch.rand(4, 3, 16, 16)
    found = split_layers(Classifier(net, taps=("block_maxima",))(images).taps["block_maxima"])
    for maximum, layer in zip(found, net.maps(images)[1:], strict=True):
        torch.testing.assert_close(maximum, layer.amax(dim=(2, 3)))


def test_of_tokens_the_class_token_is_kept_unless_their_maximum_is_asked_for():
    net, images = Tokens(), torch.rand(4, 3, 4, 4)
    layers = "layers=('first', 'second')"
    plain, largest = f"block_maxima({layers})", f"block_maxima({layers}, tokens='max')"
    taps = Classifier(net, taps=(plain, largest))(images).taps
    with torch.no_grad():
        tokens = net.tokens(images)
    for spec, expected in ((plain, [t[:, 0] for t in tokens]), (largest, [t.amax(dim=1) for t in tokens])):
        for found, wanted in zip(split_layers(taps[spec]), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="tokens must be 'first' or 'max'"):
        Classifier(net, taps=("block_maxima(tokens='mean')",))


class Overwriting(nn.Module):
    """One activation, called twice, that works in place, and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.gelu, self.unused = nn.ReLU(inplace=True), nn.GELU(), nn.ReLU()
        self.fc = nn.Linear(4, 5)

    def entering(self, images: torch.Tensor) -> list[torch.Tensor]:
        """What enters the last call of the ReLU, and the GELU."""
        second = self.second(self.first(images).clamp(min=0))
        return [second, second.clamp(min=0).mean(dim=(2, 3))]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.gelu(self.relu(self.second(self.relu(self.first(images)))).mean(dim=(2, 3))))


def test_activation_extremes_are_of_what_enters_the_last_call_of_each_activation():
    net, images = Overwriting(), torch.rand(4, 3, 8, 8)
    found = Classifier(net, taps=("activation_extremes",))(images).taps["activation_extremes"]
    with torch.no_grad():
        layers = [layer.flatten(1) for layer in net.entering(images)]
    expected = torch.stack([extreme for layer in layers for extreme in (layer.amin(dim=1), layer.amax(dim=1))], dim=1)
    torch.testing.assert_close(found, expected)
    assert (found[:, 0] < 0).all()
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_model_without_activation_modules_has_no_extremes():
    classifier = Classifier(Tokens(), taps=("activation_extremes",))
    assert classifier(torch.rand(2, 3, 4, 4)).taps == {}
    assert "no activation" in classifier.tap_gaps["activation_extremes"]
