"""One batch that several methods put through the same model: it goes through once, with or without gradients."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.models.classifier import Classifier, Images
from ood_toolkit.models.head import LOGITS
from ood_toolkit.outputs import Outputs


class SharedPass:
    """Stands for a classifier before live detectors and taps, and gives its outputs on one batch.

    The first that asks for gradients of the batch makes one pass with them; its outputs then serve everyone, and
    each takes gradients of its own through it. Without such a wish the pass runs without gradients. Passes over
    other images (those a detector has changed) are not shared.

    Under autocast only gradients are shared, because `Classifier.differentiate` runs without it.

    Args:
        classifier: with the taps that are wanted of the batch.
        plain: the same without taps.
        images: the batch, in pixel units.
    """

    def __init__(self, classifier: Classifier, plain: Classifier, images: Images) -> None:
        self._classifier = classifier
        self._plain = plain
        self._images = images
        # without autocast the pass with gradients has the taps too; with it, they come from one under autocast
        self._source = classifier if classifier.amp is None else plain
        self._graph: tuple[Tensor, Outputs] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def outputs(self) -> Outputs:
        """Outputs of the batch with all taps, without gradients."""
        classifier = self._classifier
        if classifier.amp is None and (self._graph or classifier.differentiates):
            return classifier.completed(self._images, _detached(self._passed()[1]), self)
        return classifier(self._images)

    def __call__(self, images: Images) -> Outputs:
        """Outputs of any images without gradients and taps."""
        return self._plain(images)

    def differentiate(
        self, images: Float[Tensor, "N channels H W"], inside: AbstractContextManager[Any] | None = None
    ) -> Outputs:
        """Outputs that carry gradients to these images and to the head's own parameters.

        Args:
            images: in pixel units.
            inside: entered around the pass; such a pass is never shared.
        """
        if inside is not None or not self._is_batch(images):
            return self._plain.differentiate(images, inside)
        leaf, outputs = self._passed()
        head = () if self._source.head_name == LOGITS else self._source.layer.parameters()
        trained = [parameter for parameter in head if parameter.requires_grad]
        with torch.enable_grad():
            logits, features = _Through.apply((leaf, outputs), images, *trained)  # pyright: ignore
        return Outputs(logits=logits, features=features, labels=outputs.labels, head=outputs.head)

    def _passed(self) -> tuple[Tensor, Outputs]:
        """The batch as a leaf, and its outputs with their graph."""
        if self._graph is None:
            pixels = self._images.detach().to(self._plain.device)
            leaf = (pixels.clone() if pixels.is_floating_point() else pixels.float() / 255).requires_grad_()
            self._graph = leaf, self._source.differentiate(leaf)
        return self._graph

    def _is_batch(self, images: Tensor) -> bool:
        mine = self._images
        if images.shape != mine.shape:
            return False
        pixels = mine.to(images.device)
        return torch.equal(images, pixels if pixels.is_floating_point() else pixels.float() / 255)


class _Through(torch.autograd.Function):
    """Outputs of a pass that was made before, with a way back through its graph for everyone who asks."""

    @staticmethod
    def forward(ctx: Any, graph: tuple[Tensor, Outputs], images: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Copies: whoever gets them may write into them."""
        ctx.graph, ctx.parameters = graph, parameters
        ctx.set_materialize_grads(False)
        return graph[1].logits.detach().clone(), graph[1].features.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """The graph's own gradients; it is kept for the next who asks."""
        leaf, outputs = ctx.graph
        sources = [(o, g) for o, g in zip((outputs.logits, outputs.features), gradients, strict=True) if g is not None]
        wanted = [
            tensor for tensor, needed in zip((leaf, *ctx.parameters), ctx.needs_input_grad[1:], strict=True) if needed
        ]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in sources],
                wanted,
                [gradient for _, gradient in sources],
                retain_graph=True,
                allow_unused=True,
            )
        )
        return (None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:]))


def _detached(outputs: Outputs) -> Outputs:
    return Outputs(
        logits=outputs.logits.detach(),
        features=outputs.features.detach(),
        labels=outputs.labels,
        head=outputs.head,
        taps={spec: tap.detach() for spec, tap in outputs.taps.items()},
    )
