"""The inner layers of a model: which modules are its stages, and their outputs as (N, D, positions)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)
"""The kinds of module that count as an activation, beside what timm and transformers write as a GELU of their own."""

Map = Float[Tensor, "N D P"]
"""A feature map with its positions in one axis: D channels or token features at P positions."""


@dataclass(frozen=True)
class Stages:
    """The inner layers of a model by module name.

    Args:
        names: the stages, from the input on.
        pooled: the module whose map's mean over positions is what enters the head; "" where there is none.
        activations: the activation modules that a pass calls, in the order of their first calls.
    """

    names: tuple[str, ...]
    pooled: str
    activations: tuple[str, ...] = ()


def is_channels_last(output: Tensor, model: nn.Module) -> bool:
    """Whether a 4-D output is (N, H, W, D): as timm says of the model, or by the two equal sides."""
    if getattr(model, "output_fmt", None) == "NHWC":
        return True
    _, first, second, third = output.shape
    return first == second != third


def as_map(output: Tensor, model: nn.Module) -> Map:
    """A module's output as (N, D, positions) in at least float32.

    (N, D, H, W) and (N, H, W, D) are told apart by `is_channels_last`; (N, T, D) are tokens; (N, D) has one position.
    """
    if not isinstance(output, Tensor) or output.ndim not in (2, 3, 4):
        kind = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"a layer's output should be (N, D), (N, tokens, D) or (N, D, H, W), got {kind}")
    output = output if output.dtype == torch.float64 else output.float()
    if output.ndim == 2:
        return output.unsqueeze(2)
    if output.ndim == 3:
        return output.transpose(1, 2)
    return output.flatten(1, 2).transpose(1, 2) if is_channels_last(output, model) else output.flatten(2)


def like_output(edited: Map, output: Tensor, model: nn.Module) -> Tensor:
    """An edited map in the layout and dtype of the output it was made from: `as_map` backwards."""
    if output.ndim == 2:
        edited = edited.squeeze(2)
    elif output.ndim == 3 or is_channels_last(output, model):
        edited = edited.transpose(1, 2)
    return edited.reshape(output.shape).to(output.dtype)


@contextmanager
def hooked(model: nn.Module, hooks: Mapping[str, Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    """Calls a function on the output of each named module; what it returns, if anything, takes the output's place."""

    def on_output(function: Callable[[Tensor], Tensor | None]) -> Any:
        return lambda _module, _inputs, output: function(output)

    with ExitStack() as stack:
        for name, function in hooks.items():
            handle = model.get_submodule(name).register_forward_hook(on_output(function))
            stack.callback(handle.remove)
        yield


@contextmanager
def shown_inputs(model: nn.Module, hooks: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """Calls a function on the first input of each named module, before the module may overwrite it."""

    def on_input(function: Callable[[Tensor], None]) -> Any:
        return lambda _module, inputs: function(inputs[0])

    with ExitStack() as stack:
        for name, function in hooks.items():
            handle = model.get_submodule(name).register_forward_pre_hook(on_input(function))
            stack.callback(handle.remove)
        yield


def find_stages(model: nn.Module, run: Callable[[], Tensor]) -> Stages:
    """The stages of a model.

    They are the modules that timm's `feature_info` names. Where there is none: of the model's children (those of a
    Sequential child in its place), the last one at each spatial size. For a torchvision ResNet these are maxpool,
    layer1 to layer4.

    Args:
        model: in eval mode.
        run: runs the model once and returns what entered the head.
    """
    info = getattr(model, "feature_info", None)
    known = dict(model.named_modules())
    told = [part.get("module", "") for part in info] if isinstance(info, list) else []
    told = [name for name in told if name in known]
    children = dict(_trunk(model))
    sizes: dict[str, tuple[int, ...]] = {}
    means: dict[str, Tensor] = {}
    activations: dict[str, None] = {}

    def look(name: str) -> Callable[[Any], None]:
        def keep(output: Any) -> None:
            if isinstance(known[name], ACTIVATIONS) or "GELU" in type(known[name]).__name__:
                activations.setdefault(name)
            if not isinstance(output, Tensor) or output.ndim != 4:
                return
            seen = as_map(output, model)
            if seen.shape[2] > 1:
                means.pop(name, None)
                means[name] = seen.mean(dim=2)  # now, because a later layer may work in place
                sizes[name] = tuple(output.shape[1:3] if is_channels_last(output, model) else output.shape[2:])

        return keep

    with hooked(model, {name: look(name) for name in known if name}):
        features = run()
    last_at_size = {sizes[name]: name for name in children if name in sizes}
    # the outermost of nested modules is called last, and so found first
    pooled = (name for name in reversed(means) if _alike(means[name], features))
    return Stages(tuple(told or last_at_size.values()), next(pooled, ""), tuple(activations))


def _alike(mean: Tensor, features: Tensor) -> bool:
    return mean.shape == features.shape and torch.allclose(mean, features.to(mean.dtype), rtol=1e-3, atol=1e-5)


def _trunk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children in order, with the children of a Sequential in its place when there are few others."""
    children = list(module.named_children())
    for name, child in children:
        deeper = isinstance(child, nn.Sequential) and (len(children) <= 4 or isinstance(module, nn.Sequential))
        if deeper and len(list(child.children())) > 2:
            yield from _trunk(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
