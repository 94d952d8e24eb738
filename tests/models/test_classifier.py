import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ood_toolkit.models import Classifier
from ood_toolkit.outputs import UNKNOWN

FAMILIES = {
    "timm resnet18": 64,
    "timm vit_tiny_patch16_224": 32,
    "timm convnext_atto": 64,
    "timm swin_tiny_patch4_window7_224": 64,
    "timm deit_tiny_patch16_224": 32,
    "timm mobilenetv3_small_050": 64,
    "timm efficientnet_b0": 64,
    "timm densenet121": 64,
    "timm resnetv2_50": 64,  # its head is a 1x1 convolution
    "torchvision alexnet": 64,
    "torchvision mobilenet_v2": 64,
}


def _build(name: str, size: int) -> nn.Module:
    source, _, name = name.partition(" ")
    if source == "torchvision":
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=7)
    import timm

    settings: dict[str, Any] = {"img_size": size} if name.startswith(("vit", "swin", "deit")) else {}
    return timm.create_model(name, pretrained=False, num_classes=7, **settings)


class Small(nn.Module):
    """A network with dropout and batch norm; `ending` makes the output of the logits, `calls` counts."""

    def __init__(self, ending: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.side = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)
        self.ending = ending

    def forward(self, images: torch.Tensor) -> Any:
        pooled = self.norm(self.conv(images)).relu().mean(dim=(2, 3))
        logits = self.fc(self.drop(self.side(pooled)))
        return logits if self.ending is None else self.ending(logits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), FAMILIES.items(), ids=FAMILIES.keys())
def test_the_head_of_the_features_is_the_logits_in_every_family(name, size):
    classifier = Classifier(_build(name, size), mean=(0.5,) * 3, std=(0.25,) * 3)
    images = torch.rand(2, 3, size, size)
    outputs = classifier(images)
    with torch.no_grad():
        expected = classifier.model.eval()((images - 0.5) / 0.25)
    torch.testing.assert_close(outputs.logits, expected)
    torch.testing.assert_close(outputs.head(outputs.features), outputs.logits, rtol=1e-4, atol=1e-4)
    assert outputs.labels.tolist() == [UNKNOWN, UNKNOWN]


def test_uint8_images_are_divided_by_255():
    classifier = Classifier(Small(), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(classifier(images).logits, classifier(images.float() / 255).logits)


def test_one_channel_and_one_value_for_all_channels_work():
    grey = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    images = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(Classifier(grey, mean=(0.5,), std=(2.0,))(images).logits, grey((images - 0.5) / 2))
    assert Classifier(Small(), mean=(0.5,), std=(2.0,))(torch.rand(2, 3, 8, 8)).classes == 5


@pytest.mark.parametrize(
    "ending",
    [
        lambda logits: (logits, "auxiliary"),
        lambda logits: {"logits": logits, "loss": None},
        lambda logits: SimpleNamespace(logits=logits),
    ],
    ids=["tuple", "mapping", "object"],
)
def test_logits_are_found_in_what_a_model_returns(ending):
    model = Small(ending)
    images = torch.rand(2, 3, 8, 8)
    wrapped = Classifier(model)(images)
    model.ending = None
    torch.testing.assert_close(wrapped.logits, Classifier(model)(images).logits)


def _distilled() -> nn.Module:
    import timm

    return timm.create_model("deit_tiny_distilled_patch16_224", pretrained=False, num_classes=7, img_size=32)


def _squeezenet() -> nn.Module:
    from torchvision import models

    return models.get_model("squeezenet1_1", weights=None, num_classes=7)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(images.flatten(2).transpose(1, 2)).mean(dim=1)


BROKEN = {
    "two heads": (_distilled, "mixes 'head' and 'head_dist'"),
    "no linear head": (_squeezenet, "'classifier.1'"),
    "softmax": (lambda: Small(lambda z: z.softmax(dim=1)), "a softmax follows the head 'fc'"),
    "log-softmax": (lambda: Small(lambda z: z.log_softmax(dim=1)), "a log-softmax follows the head 'fc'"),
    "scaled": (lambda: Small(lambda z: 3 * z), "something after the head 'fc' changes its output"),
    "patches": (Patches, r"'fc' works on features that are not \(N, D\)"),
    "convolution only": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "no Linear is called",
    ),
}


@pytest.mark.parametrize(("build", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_model_that_breaks_the_law_is_told_which_layer_and_what_to_do(build, reason):
    model = build()
    images = torch.rand(2, 3, 32, 32)
    with pytest.raises(ValueError, match=reason) as caught:
        Classifier(model)(images)
    assert "head='logits'" in str(caught.value)
    assert "\n" not in str(caught.value)
    outputs = Classifier(model, head="logits")(images)
    torch.testing.assert_close(outputs.head(outputs.features), outputs.logits)
    torch.testing.assert_close(outputs.logits, model.eval()(images).detach())


def test_a_named_head_is_checked_too():
    images = torch.rand(2, 3, 8, 8)
    assert Classifier(Small(), head="fc")(images).width == 8
    with pytest.raises(ValueError, match="the head 'side' gives"):
        Classifier(Small(), head="side")(images)
    with pytest.raises(ValueError, match=r"'conv' is not a Linear of Small; its Linears end with \['side', 'fc'\]"):
        Classifier(Small(), head="conv")


def test_the_head_is_known_before_the_first_batch():
    model = Small()
    torch.testing.assert_close(Classifier(model).head.weight, model.fc.weight.detach())
    with pytest.raises(ValueError, match="call check"):
        _ = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))).head


def _state(model: nn.Module) -> list[Any]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    training = [m.training for m in model.modules()]
    grads = [(p.requires_grad, p.grad) for p in model.parameters()]
    return [hooks, training, grads, {k: v.clone() for k, v in model.state_dict().items()}]


def _same(before: list[Any], after: list[Any]) -> bool:
    return before[:3] == after[:3] and all(torch.equal(before[3][k], after[3][k]) for k in before[3])


def test_the_model_is_left_as_it_was_even_after_an_exception():
    model = Small().train()
    model.norm.eval()
    model.conv.weight.requires_grad_(False)
    classifier = Classifier(model, taps=("stage_means", "rank_one_removed"))
    before = _state(model)
    images = torch.rand(3, 3, 8, 8)
    kept = images.clone()
    classifier(images)
    classifier.differentiate(images)
    assert _same(before, _state(model))
    assert torch.equal(images, kept)
    with pytest.raises(RuntimeError):
        classifier(torch.rand(3, 3, 1, 1))
    assert _same(before, _state(model))


def test_a_first_layer_in_place_does_not_reach_the_images():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 3))
    images = torch.randn(2, 3, 4, 4)
    kept = images.clone()
    Classifier(model)(images)
    assert torch.equal(images, kept)


def test_gradients_reach_the_images_and_the_head():
    classifier = Classifier(Small(), mean=(0.4,) * 3, std=(0.2,) * 3)
    images = torch.rand(2, 3, 8, 8).requires_grad_()
    outputs = classifier.differentiate(images)
    ours = torch.autograd.grad(outputs.logits.logsumexp(dim=1).sum(), [images, classifier.layer.weight])
    again = images.detach().clone().requires_grad_()
    logits = classifier.model.eval()((again - 0.4) / 0.2)
    theirs = torch.autograd.grad(logits.logsumexp(dim=1).sum(), [again, classifier.layer.weight])
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)
    assert images.grad is None
    assert not classifier(images).logits.requires_grad


def test_gradients_flow_when_all_weights_are_frozen_and_grad_is_off():
    classifier = Classifier(Small().requires_grad_(False))
    images = torch.rand(2, 3, 8, 8).requires_grad_()
    with torch.no_grad():
        outputs = classifier.differentiate(images)
    (gradient,) = torch.autograd.grad(outputs.logits[:, 0].sum(), images)
    assert gradient.abs().sum() > 0
    with pytest.raises(ValueError, match="floating-point"):
        classifier.differentiate(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_half_precision_makes_no_ties_among_logits():
    classifier = Classifier(Small(), amp=torch.bfloat16)
    images = torch.rand(300, 3, 8, 8)
    outputs = classifier(images)
    assert outputs.logits.dtype == torch.float32
    torch.testing.assert_close(outputs.head(outputs.features), outputs.logits)
    torch.testing.assert_close(outputs.logits, Classifier(classifier.model)(images).logits, rtol=0.1, atol=0.05)
    ties = outputs.logits[:, 0].numel() - outputs.logits[:, 0].unique().numel()
    coarse = outputs.logits[:, 0].bfloat16()
    assert ties < 10 < coarse.numel() - coarse.unique().numel()


def test_the_fingerprint_follows_weights_architecture_normalisation_and_taps():
    def fingerprint(change: Callable[[Small], Any] | None = None, **settings: Any) -> str:
        torch.manual_seed(0)
        model = Small()
        if change is not None:
            change(model)
        return Classifier(model, **settings).fingerprint()

    same = fingerprint()
    assert fingerprint() == same
    with torch.no_grad():
        others = [
            fingerprint(lambda m: m.fc.bias[0].add_(1e-6)),
            fingerprint(lambda m: m.double()),
            fingerprint(lambda m: setattr(m, "drop", nn.Identity())),
            fingerprint(std=(0.5,) * 3),
            fingerprint(taps=("stage_means",)),
            fingerprint(head="logits"),
        ]
    assert len({same, *others}) == 7


def test_using_it_does_not_change_the_fingerprint():
    model = Small()
    used = Classifier(model)
    used(torch.rand(2, 3, 8, 8))
    assert used.fingerprint() == Classifier(model).fingerprint()


def test_a_pickle_gives_the_same_outputs():
    classifier = Classifier(Small(), taps=("stage_means",))
    images = torch.rand(2, 3, 8, 8)
    expected = classifier(images)
    again = pickle.loads(pickle.dumps(classifier))(images)
    torch.testing.assert_close(again.logits, expected.logits)
    torch.testing.assert_close(again.taps["stage_means"], expected.taps["stage_means"])


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (torch.rand(3, 8, 8), "images must be"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), "images must be"),
        (torch.rand(1, 4, 8, 8), "3 channels, the images have 4"),
        (2 * torch.ones(1, 3, 8, 8), "leave the normalisation out"),
    ],
)
def test_images_that_cannot_be_meant_are_refused(images, reason):
    with pytest.raises(ValueError, match=reason):
        Classifier(Small(), mean=(0.5,) * 3, std=(0.5,) * 3)(images)


def test_a_normalisation_that_cannot_be_meant_is_refused():
    for mean, std in (((0.5,), (0.5, 0.5)), ((0.5,), (0.0,))):
        with pytest.raises(ValueError, match="std > 0"):
            Classifier(Small(), mean=mean, std=std)
