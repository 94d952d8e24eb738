"""What several methods get from one pass is what each would have got from a pass of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.detectors import ODINDetector
from ood_toolkit.models import Classifier
from ood_toolkit.models.shared import SharedPass

TAPS = ("stage_means(layers=('body.0',))", "nudged_features", "augmented_logits")


class Network(nn.Module):
    """Counts its passes."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU())
        self.head = nn.Linear(5, 4) if head else nn.Identity()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        return self.head(self.body(images).mean(dim=(2, 3)))


def pair(taps: tuple[str, ...] = (), amp: torch.dtype | None = None, head: str = "head") -> tuple[Network, Any, Any]:
    model = Network(head == "head")
    classifier = Classifier(model, mean=(0.4,) * 3, std=(0.3,) * 3, head=head, taps=taps, amp=amp)
    classifier.check(torch.rand(2, 3, 12, 12))
    plain = classifier.with_taps(())
    plain.check(torch.rand(2, 3, 12, 12))
    model.passes = 0
    return model, classifier, plain


def batch(dtype: torch.dtype = torch.uint8) -> Tensor:
    whole = torch.randint(0, 256, (5, 3, 12, 12), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return whole if dtype == torch.uint8 else whole.to(dtype) / 255


@pytest.mark.parametrize("head", ["head", "logits"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_gradients_through_the_shared_pass_are_those_of_an_own_pass(head: str, dtype: torch.dtype):
    model, classifier, plain = pair(head=head)
    shared = SharedPass(classifier, plain, batch(dtype))
    for sign in (1.0, -2.0):  # twice: the graph serves more than one
        gradients = []
        for source in (shared, plain):
            images = batch(torch.float32).requires_grad_()
            outputs = source.differentiate(images)
            loss = sign * (outputs.logits.square().sum() + outputs.features.exp().sum() / 100)
            wanted = [images, *(model.head.parameters() if head == "head" else ())]
            gradients.append(torch.autograd.grad(loss, wanted))
        for ours, expected in zip(*gradients, strict=True):
            assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-7)
            assert ours.abs().sum() > 0
    assert model.passes == 1 + 2


def test_odin_and_the_outputs_take_two_passes_together():
    model, classifier, plain = pair()
    shared = SharedPass(classifier, plain, batch())
    scores = ODINDetector()(shared, batch())
    outputs = shared.outputs()
    assert model.passes == 2
    assert torch.equal(scores, ODINDetector()(plain, batch()))
    assert torch.equal(outputs.logits, plain(batch()).logits)
    assert not outputs.logits.requires_grad


def test_a_tap_with_gradients_shares_the_pass_with_live_detectors():
    model, classifier, plain = pair(TAPS)
    shared = SharedPass(classifier, plain, batch())
    ODINDetector()(shared, batch())
    got = shared.outputs()
    assert model.passes == 1 + 1 + 1 + 6  # the batch, ODIN's step, the nudge, six views
    expected = classifier(batch())
    for tap in TAPS:
        assert torch.allclose(got.taps[tap], expected.taps[tap], rtol=1e-5, atol=1e-6), tap
        assert not got.taps[tap].requires_grad
    assert torch.equal(got.logits, expected.logits)


def test_without_a_wish_for_gradients_the_pass_has_none():
    model, classifier, plain = pair(TAPS[:1])
    recorded: list[bool] = []
    model.body.register_forward_hook(lambda _m, _i, output: recorded.append(output.requires_grad))
    SharedPass(classifier, plain, batch()).outputs()
    assert recorded == [False]


def test_other_images_of_the_same_shape_are_not_taken_for_the_batch():
    _, classifier, plain = pair()
    shared = SharedPass(classifier, plain, batch())
    images = (batch(torch.float32) * 0.9).requires_grad_()
    assert torch.equal(shared.differentiate(images).logits, plain.differentiate(images).logits)


def test_under_autocast_outputs_stay_those_of_autocast():
    _, classifier, plain = pair(amp=torch.bfloat16)
    shared = SharedPass(classifier, plain, batch())
    scores = ODINDetector(eps=0.01)(shared, batch())
    assert torch.equal(scores, ODINDetector(eps=0.01)(plain, batch()))
    assert torch.equal(shared.outputs().features, plain(batch()).features)
    assert shared.outputs().logits.dtype == torch.float32
