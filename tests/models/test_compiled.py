"""A compiled model gives what the plain one gives, to everyone who watches it."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.detectors import ODINDetector
from ood_toolkit.models import Classifier, compiled

TAPS = ("stage_means(layers=('layers.1', 'layers.3'))", "augmented_logits")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)]
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(3, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = layer(images)
        return self.head(images.mean(dim=(2, 3)))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each compiled graph has; nothing is translated to machine code."""
    graphs: list[int] = []

    def note(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_BACKEND", note)
    return graphs


def pair(taps: tuple[str, ...] = ()) -> tuple[Classifier, Classifier]:
    return Classifier(Network(), taps=taps, compiled=True), Classifier(Network(), taps=taps)


def test_compiled_parts_give_the_same_outputs_and_taps_for_every_batch(traced: list[int]):
    fast, slow = pair(TAPS)
    for seed in (0, 1):  # twice: a hook that is traced into a graph would show the first batch again
        images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        got, expected = fast(images), slow(images)
        assert torch.allclose(got.logits, expected.logits, rtol=1e-5, atol=1e-6)
        for tap in TAPS:
            assert torch.allclose(got.taps[tap], expected.taps[tap], rtol=1e-5, atol=1e-6, equal_nan=True), tap
    assert traced
    assert not any("_compiled_call_impl" in vars(module) for module in fast.model.modules())


def test_only_parts_without_a_watched_layer_are_compiled():
    model = Network()
    watched = ("layers.1", "head")
    with compiled.compiled_parts(model, watched, {}):
        found = [name for name, module in model.named_modules() if "_compiled_call_impl" in vars(module)]
    assert found == ["layers.0", "layers.1.0", "layers.2", "layers.3"]
    model.get_submodule("layers.2.0").register_forward_hook(lambda *_: None)
    with compiled.compiled_parts(model, watched, {}):
        found = [name for name, module in model.named_modules() if "_compiled_call_impl" in vars(module)]
    assert found == ["layers.0", "layers.1.0", "layers.3"]


def test_live_detectors_take_their_gradients_uncompiled(traced: list[int]):
    fast, slow = pair()
    images = torch.rand(3, 3, 8, 8)
    assert torch.allclose(ODINDetector()(fast, images), ODINDetector()(slow, images), rtol=1e-6)


def test_a_part_that_cannot_be_compiled_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def broken(_graph: object, _inputs: object) -> object:
        raise RuntimeError("no such machine")

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_BACKEND", broken)
    with pytest.raises(ValueError, match=r"Network cannot be compiled \(.*no such machine.*\); run it without --comp"):
        pair()[0](torch.rand(3, 3, 8, 8))


def test_the_body_gets_no_gradient_and_is_thawed_afterwards():
    classifier = Classifier(Network())
    frozen = classifier.model.layers[0][0].bias  # pyright: ignore
    frozen.requires_grad_(False)
    before = {name: p.requires_grad for name, p in classifier.model.named_parameters()}
    images = torch.rand(2, 3, 8, 8).requires_grad_()
    logits = classifier.differentiate(images).logits
    weight = classifier.layer.weight
    found = torch.autograd.grad(logits.sum(), [images, weight, classifier.model.layers[1][0].weight], allow_unused=True)  # pyright: ignore
    assert [gradient is not None for gradient in found] == [True, True, False]
    assert {name: p.requires_grad for name, p in classifier.model.named_parameters()} == before
    assert all(layer[1].inplace for layer in classifier.model.layers)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler here")
def test_the_real_compiler_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # the usual folder may hold code for another processor, which torch runs all the same, to logits of 1e32
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    fast, slow = pair(TAPS[:1])
    images = torch.rand(3, 3, 8, 8)
    assert torch.allclose(fast(images).logits, slow(images).logits, rtol=1e-4, atol=1e-5)
