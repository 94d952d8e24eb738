"""Taps of further passes: dropout left on, and fixed views of the images."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.models import Classifier
from ood_toolkit.models.dropout import thinned
from ood_toolkit.models.views import image_views


class Net(nn.Module):
    """Two kinds of dropout, one of them called twice, and a batch norm with a past."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 5)
        self.channels, self.units = nn.Dropout2d(0.3), nn.Dropout(0.5, inplace=True)
        self.norm.running_mean = torch.randn(6)

    def forward(self, images: Tensor) -> Tensor:
        layer = self.units(self.channels(self.norm(self.conv(images))).relu())
        return self.fc(self.units(layer.mean(dim=(2, 3))))


def by_hand(net: Net, images: Tensor, samples: int, seed: int) -> Tensor:
    """Passes with every mask applied in the open."""
    generator = torch.Generator().manual_seed(seed)
    passes = []
    with torch.no_grad():
        for _ in range(samples):
            layer = nn.functional.conv2d(images, net.conv.weight, net.conv.bias)
            norm = net.norm
            assert norm.running_mean is not None
            layer = (layer - norm.running_mean[:, None, None]) / (1 + norm.eps) ** 0.5
            layer = layer * (torch.rand(6, 1, 1, generator=generator) >= 0.3) / 0.7
            layer = layer.clamp_min(0) * (torch.rand(layer.shape[1:], generator=generator) >= 0.5) / 0.5
            features = layer.mean(dim=(2, 3)) * (torch.rand(6, generator=generator) >= 0.5) / 0.5
            passes.append(features @ net.fc.weight.T + net.fc.bias)
    return torch.stack(passes, dim=1)


def test_dropout_logits_are_those_of_passes_with_masks_applied_by_hand():
    net, images = Net().double(), torch.rand(4, 3, 8, 8, dtype=torch.float64)
    spec = "dropout_logits(samples=3, seed=7)"
    given = Classifier(net, taps=(spec,))(images).taps[spec]
    torch.testing.assert_close(given, by_hand(net, images, 3, 7))
    assert (given[:, 0] - given[:, 1]).abs().max() > 1e-3


def test_a_row_scores_the_same_alone_or_in_a_batch():
    classifier = Classifier(Net().double(), taps=("dropout_logits", "augmented_logits"))
    images = torch.rand(5, 3, 8, 8, dtype=torch.float64)
    whole = classifier(images).taps
    for row in range(5):
        for name, tap in classifier(images[row : row + 1]).taps.items():
            torch.testing.assert_close(tap[0], whole[name][row])


def test_the_first_samples_of_many_are_those_of_few_and_seeds_differ():
    specs = ("dropout_logits(samples=2)", "dropout_logits(samples=5)", "dropout_logits(samples=2, seed=1)")
    few, many, other = Classifier(Net(), taps=specs)(torch.rand(4, 3, 8, 8)).taps.values()
    assert torch.equal(many[:, :2], few)
    assert not torch.isclose(many[:, :, None], other[:, None], atol=1e-6).all(dim=(0, 3)).any()


def test_dropout_leaves_the_model_and_the_global_randomness_as_they_were():
    net, images = Net().train(), torch.rand(4, 3, 8, 8)
    classifier = Classifier(net, taps=("dropout_logits",))
    plain, before, past = Classifier(net)(images), torch.get_rng_state(), copy.deepcopy(net.state_dict())
    outputs = classifier(images)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs.logits, plain.logits)
    assert torch.equal(Classifier(net)(images).logits, plain.logits)
    assert all(module.training for module in net.modules())
    torch.testing.assert_close(net.state_dict(), past, rtol=0, atol=0)


LAYERS = {
    "units": nn.Dropout(0.3),
    "rows": nn.Dropout1d(0.3),
    "maps": nn.Dropout2d(0.3),
    "volumes": nn.Dropout3d(0.3),
    "alpha": nn.AlphaDropout(0.3),
    "alpha maps": nn.FeatureAlphaDropout(0.3),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_drops_and_scales_as_it_does_in_training(kind):
    shape = {"rows": (1, 8, 5), "volumes": (1, 8, 2, 2, 2)}.get(kind, (1, 8, 3, 3))
    model, images = nn.Sequential(LAYERS[kind]), torch.rand(shape, dtype=torch.float64) + 0.5
    trained = torch.cat([model.train()(images) for _ in range(200)])
    generator = torch.Generator().manual_seed(0)
    with thinned(model.eval(), generator):
        ours = torch.cat([model(images) for _ in range(200)])
    dropped, kept = trained.amin(dim=0), trained.amax(dim=0)
    lost = torch.isclose(ours, dropped)
    assert (lost | torch.isclose(ours, kept)).all()
    assert lost.double().mean().item() == pytest.approx(0.3, abs=0.05)
    if kind not in ("units", "alpha"):
        assert torch.equal(lost, lost[:, :, *(slice(0, 1),) * (len(shape) - 2)].expand_as(lost))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_what_is_always_dropped_is_zero_as_in_training(kind):
    model, images = nn.Sequential(kind(1.0)), torch.rand(2, 4)
    with thinned(model.eval(), torch.Generator()):
        assert torch.equal(model(images), model.train()(images))


def test_stochastic_depth_stays_off():
    from timm.layers.drop import DropPath

    images = torch.rand(4, 3, 4, 4)
    model = nn.Sequential(nn.Flatten(), DropPath(0.5), nn.Dropout(0.5), nn.Linear(48, 5))
    without = nn.Sequential(model[0], nn.Identity(), *model[2:])
    both = [Classifier(m, taps=("dropout_logits",))(images).taps["dropout_logits"] for m in (model, without)]
    assert torch.equal(*both)


class Functional(nn.Module):
    """Dropout that no module stands for, beside a layer that no pass calls."""

    def __init__(self, spare: float) -> None:
        super().__init__()
        self.spare, self.fc = nn.Dropout(spare), nn.Linear(48, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(nn.functional.dropout(images.flatten(1), 0.5, training=self.training))


class SequenceFirst(nn.Module):
    """Drops tokens laid out (T, N, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(3, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.drop(images.flatten(2).permute(2, 0, 1)).mean(dim=0))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(48, 5)), "no dropout layer with p > 0"),
        (Functional(0.0), "functional dropout is out of reach"),
        (Functional(0.5), "no pass of Functional calls its dropout layers, such as spare"),
        (SequenceFirst(), "does not have the images in its first axis"),
    ],
    ids=["p is 0", "functional", "never called", "tokens first"],
)
def test_a_model_without_dropout_that_can_be_switched_on_says_why(model, reason):
    images = torch.rand(3, 3, 4, 4)
    classifier = Classifier(model, taps=("dropout_logits",))
    classifier.check(images)
    assert reason in classifier.tap_gaps["dropout_logits"]
    assert classifier(images).taps == {}
    later = Classifier(model)
    later(images)
    later = later.with_taps(("dropout_logits",))
    assert later(images).taps == {}
    assert set(later.tap_gaps) == {"dropout_logits"}


def test_augmented_logits_are_those_of_views_made_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 4, 5))
    images = torch.randint(256, (4, 3, 8, 4), dtype=torch.uint8)
    spec = "augmented_logits(shift=0.25, crop=0.6)"
    given = Classifier(model, mean=(0.4,) * 3, std=(0.2,) * 3, taps=(spec,))(images).taps[spec]
    pixels = images.numpy() / 255
    rows, columns = np.arange(8), np.arange(4)
    views = [pixels, pixels[..., ::-1]]
    for down, right in ((0, 1), (0, -1), (2, 0), (-2, 0)):  # a quarter of the width is 1, of the height 2
        views.append(pixels[:, :, np.clip(rows - down, 0, 7)][..., np.clip(columns - right, 0, 3)])
    views.append(enlarged(pixels[:, :, 1:6, 1:3], 8, 4))  # 0.6 of 8 is 5 pixels, of 4 it is 2
    with torch.no_grad():
        expected = [model((torch.from_numpy(view.copy()).float() - 0.4) / 0.2) for view in views]
    torch.testing.assert_close(given, torch.stack(expected, dim=1), rtol=1e-4, atol=1e-5)


def enlarged(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear interpolation between pixel centres, one pixel after the other."""
    result = np.empty((*pixels.shape[:2], height, width))
    for i in range(height):
        for j in range(width):
            y = np.clip((i + 0.5) * pixels.shape[2] / height - 0.5, 0, pixels.shape[2] - 1)
            x = np.clip((j + 0.5) * pixels.shape[3] / width - 0.5, 0, pixels.shape[3] - 1)
            top, left = int(y), int(x)
            below, beside = min(top + 1, pixels.shape[2] - 1), min(left + 1, pixels.shape[3] - 1)
            upper = (1 - x % 1) * pixels[:, :, top, left] + x % 1 * pixels[:, :, top, beside]
            lower = (1 - x % 1) * pixels[:, :, below, left] + x % 1 * pixels[:, :, below, beside]
            result[:, :, i, j] = (1 - y % 1) * upper + y % 1 * lower
    return result


def test_small_images_move_by_a_pixel_and_no_view_repeats_another():
    views = list(image_views(torch.rand(1, 1, 8, 8)))
    assert len(views) == 7
    for number, view in enumerate(views):
        assert view.shape == (1, 1, 8, 8)
        assert not any(torch.equal(view, other) for other in views[:number])
    moved = views[2]
    assert torch.equal(moved[..., 1:], views[0][..., :-1])


def test_arguments_out_of_range_are_refused():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 5))
    for spec, reason in (
        ("dropout_logits(samples=0)", "at least one sample"),
        ("augmented_logits(crop=1.5)", "crop=1.5"),
        ("augmented_logits(shift=0.7)", "shift=0.7"),
        ("augmented_logits(flip=False, shift=0, crop=1)", "one view beside"),
        ("augmented_logits(zoom=2)", "it takes flip, shift, crop"),
    ):
        with pytest.raises(ValueError, match=reason):
            Classifier(model, taps=(spec,))
