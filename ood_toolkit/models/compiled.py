"""Running those parts of a model compiled in which nobody watches or edits a layer."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Compiled = dict[nn.Module, Callable[..., Any]]
"""Parts that have been compiled, by the module."""

_BACKEND = "inductor"


@contextmanager
def compiled_parts(model: nn.Module, watched: Collection[str], known: Compiled) -> Iterator[None]:
    """While this lasts, the largest modules that hold no watched one run through `torch.compile`.

    A hook inside a compiled module would be traced once and then be blind, so modules with hooks, the user's own too,
    stay as they are, and so does what holds them. The model itself is never replaced.

    Args:
        model: in eval mode.
        watched: names of the modules that have or will get a hook.
        known: what is compiled already; added to.

    Raises:
        ValueError: a part cannot be compiled.
    """
    parts = [part for part in _unwatched(model, "", watched) if "_compiled_call_impl" not in vars(part)]
    for part in parts:
        if part not in known:
            known[part] = torch.compile(part._call_impl, backend=_BACKEND)
        vars(part)["_compiled_call_impl"] = known[part]
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        raise ValueError(f"{type(model).__name__} cannot be compiled ({reason}); run it without --compile") from error
    finally:
        for part in parts:
            vars(part).pop("_compiled_call_impl", None)


def _unwatched(module: nn.Module, prefix: str, watched: Collection[str]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        full = prefix + name
        holds = any(other == full or other.startswith(f"{full}.") for other in watched)
        # a list of modules is never called itself
        if holds or isinstance(child, nn.ModuleList | nn.ModuleDict) or any(map(_has_hooks, child.modules())):
            yield from _unwatched(child, f"{full}.", watched)
        elif any(True for _ in child.parameters()):
            yield child


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
