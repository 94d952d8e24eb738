"""Monte-Carlo dropout: thinned networks, one after the other, each the same for every image."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from ood_toolkit.models.stages import hooked

DropoutLayer = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
_ALPHA = -1.7580993408473766
"""Where SELU saturates: what alpha dropout puts in place of a dropped number."""


def active_dropout(model: nn.Module) -> dict[str, DropoutLayer]:
    """The dropout layers with p > 0, by module name.

    Out of reach, because no module stands for it: `nn.functional.dropout`, as timm's ResNets call it, and dropout
    inside `nn.MultiheadAttention` or fused attention. Stochastic depth (timm's `DropPath`) is no dropout of features.
    """
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, DropoutLayer) and layer.p > 0}


def thinned(model: nn.Module, generator: torch.Generator) -> AbstractContextManager[None]:
    """While this lasts, passes in eval mode drop what one mask per call of a dropout layer drops, in every image.

    No mask has a batch axis, so that an image's output does not depend on the images beside it.

    Args:
        model: stays in eval mode: its batch norms and its own dropout do not learn that anything is dropped.
        generator: on the CPU, so that every device sees the same masks; the global one is left alone.
    """
    return hooked(model, {name: partial(_thin, layer, generator) for name, layer in active_dropout(model).items()})


def check_dropout(model: nn.Module, run: Callable[[Tensor], object], images: Tensor) -> None:
    """Raises ValueError, with the reason, for a model whose dropout `thinned` cannot switch on.

    Args:
        model: in eval mode.
        run: a pass over images.
        images: the first one is run, alone and twice over.
    """
    name, layers = type(model).__name__, active_dropout(model)
    if not layers:
        raise ValueError(f"{name} has no dropout layer with p > 0; functional dropout is out of reach")
    alone: list[torch.Size] = []
    twice: list[torch.Size] = []
    for rows, shapes in ((images[:1], alone), (images[:1].repeat(2, 1, 1, 1), twice)):
        seen = partial(_note_shape, shapes)
        with hooked(model, dict.fromkeys(layers, seen)):
            run(rows)
    if not alone:
        raise ValueError(f"no pass of {name} calls its dropout layers, such as {next(iter(layers))}")
    if [(2 * shape[0], *shape[1:]) for shape in alone] != [tuple(shape) for shape in twice]:
        raise ValueError(f"a dropout layer of {name} does not have the images in its first axis")


def _note_shape(shapes: list[torch.Size], output: Tensor) -> None:
    shapes.append(output.shape)


def _thin(layer: DropoutLayer, generator: torch.Generator, output: Tensor) -> Tensor:
    """The output as in training, with the mask shared by all rows."""
    whole = isinstance(layer, nn.Dropout | nn.AlphaDropout)
    shape = output.shape[1:] if whole else (output.shape[1], *(1 for _ in output.shape[2:]))
    kept = (torch.rand(shape, generator=generator, dtype=torch.float32) >= layer.p).to(output.device)
    if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
        if layer.p == 1:
            return torch.zeros_like(output)
        scale = 1 / math.sqrt((1 - layer.p) * (1 + layer.p * _ALPHA**2))
        return scale * torch.where(kept, output, _ALPHA) - scale * _ALPHA * layer.p
    return torch.where(kept, output / (1 - layer.p), 0.0)
