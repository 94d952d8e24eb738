import pytest
import torch
from torch import nn

from ood_toolkit.detectors.layers import split_layers
from ood_toolkit.models import Classifier
from ood_toolkit.models.stages import as_map, like_output


class Net(nn.Module):
    """Three stages; features are the mean of the last map, unless `norm` stands between."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.fc = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.last(self.middle(self.stem(images))).mean(dim=(2, 3))))


def test_stage_means_are_the_means_of_the_stages():
    net, images = Net(), torch.rand(4, 3, 16, 16)
    found = split_layers(Classifier(net, taps=("stage_means",))(images).taps["stage_means"])
    with torch.no_grad():
        maps = [net.stem(images), net.middle(net.stem(images)), net.last(net.middle(net.stem(images)))]
    for mean, layer in zip(found, maps, strict=True):
        torch.testing.assert_close(mean, layer.mean(dim=(2, 3)))


def test_layers_can_be_named():
    net, images = Net(), torch.rand(4, 3, 16, 16)
    spec = "stage_means(layers=('middle.0',))"
    with torch.no_grad():
        expected = net.middle[0](net.stem(images)).mean(dim=(2, 3))
    torch.testing.assert_close(Classifier(net, taps=(spec,))(images).taps[spec], expected)
    with pytest.raises(ValueError, match=r"Net has no layers \['middel'\]"):
        Classifier(net, taps=("stage_means(layers=('middel',))",))(images)
    with pytest.raises(ValueError, match="it takes layers"):
        Classifier(net, taps=("stage_means(layer='middle')",))


@pytest.mark.parametrize("norm", [False, True], ids=["head reads the mean", "model runs again"])
def test_an_edited_map_goes_through_the_rest_of_the_model(norm):
    net, images = Net(norm), torch.rand(4, 3, 16, 16)
    spec = "react_map(threshold=0.05)"
    outputs = Classifier(net, taps=(spec,))(images)
    with torch.no_grad():
        shaped = net.last(net.middle(net.stem(images))).clamp(max=0.05)
        expected = net.norm(shaped.mean(dim=(2, 3)))
    torch.testing.assert_close(outputs.taps[spec], expected)
    assert (outputs.taps[spec] - outputs.features).abs().max() > 1e-3


def test_taps_follow_each_image_alone():
    names = ("stage_means", "stage_gram", "rank_one_removed", "ash_s_map", "scale_map")
    classifier = Classifier(Net(norm=True).double(), taps=names)
    images = torch.rand(5, 3, 16, 16, dtype=torch.float64)
    whole = classifier(images).taps
    for row in range(5):
        for name, tap in classifier(images[row : row + 1]).taps.items():
            torch.testing.assert_close(tap[0], whole[name][row], equal_nan=True)


def test_taps_that_no_model_gives_are_left_out_with_the_reason():
    classifier = Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(48, 5)), taps=("member_logits", "stage_means", "rank_one_removed")
    )
    assert classifier(torch.rand(2, 3, 4, 4)).taps == {}
    assert "no stages are found" in classifier.tap_gaps["stage_means"]
    assert "fewer" in classifier.tap_gaps["rank_one_removed"]
    assert "no single classifier" in classifier.tap_gaps["member_logits"]


@pytest.mark.parametrize(
    ("name", "size", "stages", "pooled"),
    [
        ("resnet10t", 64, ("act1", "layer1", "layer2", "layer3", "layer4"), "layer4"),
        ("tf_efficientnet_lite0", 64, ("blocks.0", "blocks.1", "blocks.2", "blocks.4", "blocks.6"), "bn2"),
    ],
)
def test_timm_names_the_stages(name, size, stages, pooled):
    import timm

    from ood_toolkit.models.stages import find_stages

    model = timm.create_model(name, pretrained=False, num_classes=5).eval()
    seen: list[torch.Tensor] = []
    model.get_submodule("fc" if name == "resnet10t" else "classifier").register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )

    def run() -> torch.Tensor:
        with torch.no_grad():
            model(torch.rand(2, 3, size, size))
        return seen[-1]

    found = find_stages(model, run)
    assert (found.names, found.pooled) == (stages, pooled)


@pytest.mark.parametrize("shape", [(2, 5), (2, 7, 5), (2, 5, 4, 3), (2, 4, 4, 5)])
def test_maps_come_back_in_their_own_layout(shape):
    output = torch.rand(shape)
    model = nn.Identity()
    layer = as_map(output, model)
    assert layer.shape[:2] == (2, 5)
    assert torch.equal(like_output(layer, output, model), output)


def test_nudged_features_are_those_of_the_nudged_images():
    from ood_toolkit.detectors.adascale import nudged_features

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    images = (torch.rand(5, 3, 8, 8) * 255).to(torch.uint8)
    spec = "nudged_features(pixels=0.2, epsilon=0.3)"
    given = Classifier(model, taps=(spec,))(images)
    expected = nudged_features(Classifier(model), images.float() / 255, 0.2, 0.3)
    assert torch.allclose(given.taps[spec], expected, atol=1e-6)
    assert not torch.allclose(given.taps[spec], given.features, atol=1e-4)
