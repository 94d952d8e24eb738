"""What detectors of inner layers share: layers side by side in one tap, and how a tap is asked for."""

import inspect
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.fitted import Fitted


def join_layers(layers: Sequence[Float[Tensor, "N *rest _"]]) -> Float[Tensor, "N *rest D"]:
    """Layers of different widths side by side along the last axis, a column of NaN between neighbours.

    So one tensor per row says by itself where each layer ends: through slices, concatenation, half precision, disk.

    >>> join_layers([torch.ones(1, 2), torch.zeros(1, 1)])
    tensor([[1., 1., nan, 0.]])
    """
    gap = layers[0].new_full((*layers[0].shape[:-1], 1), torch.nan)
    return torch.cat([part for layer in layers for part in (gap, layer)][1:], dim=-1)


def layer_slices(tap: Float[Tensor, "N *rest D"]) -> list[slice]:
    """Where each layer of `join_layers` lies in the last axis. Needs one row.

    >>> layer_slices(torch.tensor([[1.0, 1.0, torch.nan, 0.0]]))
    [slice(0, 2, None), slice(3, 4, None)]
    """
    if not len(tap):
        raise ValueError("a tap without rows does not say where its layers are")
    width = tap.shape[-1]
    gaps = tap[0].reshape(-1, width)[0].isnan().nonzero().flatten().tolist()
    return [slice(start, stop) for start, stop in zip([0, *(gap + 1 for gap in gaps)], [*gaps, width], strict=True)]


def split_layers(tap: Float[Tensor, "N *rest D"]) -> list[Float[Tensor, "N *rest _"]]:
    """The layers of `join_layers`, as views."""
    return [tap[..., part] for part in layer_slices(tap)]


def tap_spec(name: str, detector: Fitted, *parameters: str) -> str:
    """The tap `name` with those of the detector's hyper-parameters that differ from their defaults."""
    # of the bases too: a subclass need not take all that theirs does
    signatures = [
        inspect.signature(vars(kind)["__init__"]) for kind in type(detector).__mro__ if "__init__" in vars(kind)
    ]
    defaults = {name: p.default for signature in reversed(signatures) for name, p in signature.parameters.items()}
    changed = {p: getattr(detector, p) for p in parameters if getattr(detector, p) != defaults[p]}
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in changed.items())})" if changed else "")
