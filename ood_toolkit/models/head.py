"""Finding the linear head of a model, and saying why there is none."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ood_toolkit.outputs import Head, full_precision

LOGITS = "logits"
"""The head's name for a model without one: its logits are its features."""

_REMEDY = "pass head='logits' to use the logits themselves as features"


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a model returns: a tensor, something with `logits`, or the first tensor of a tuple."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
        if found is None and isinstance(output, tuple | list):
            found = next((part for part in output if isinstance(part, Tensor)), None)
    if not isinstance(found, Tensor):
        keys = f" with keys {list(output)}" if isinstance(output, Mapping) else ""
        raise ValueError(f"the model returned a {type(output).__name__}{keys} in which there are no logits")
    if found.ndim != 2:
        raise ValueError(f"a classifier's logits are (N, classes), but the model returned {tuple(found.shape)}")
    return found


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module can be a head: `nn.Linear`, or a 1x1 convolution, which is one on pooled features."""
    return isinstance(module, nn.Linear) or (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.groups == 1
        and module.padding == (0, 0)
    )


def as_head(layer: nn.Linear | nn.Conv2d) -> Head:
    """The head that a layer computes, detached."""
    weight = layer.weight.flatten(1)
    return Head(weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias)


def as_rows(features: Tensor) -> Tensor:
    """(N, D) of a head's input: the (N, D, 1, 1) of a pooled map is flattened, anything else stays."""
    return features.flatten(1) if features.ndim == 4 and features.shape[2:] == (1, 1) else features


def find_head(model: nn.Module, inputs: Tensor) -> str:
    """Name of the last linear layer that a pass calls and whose output is the model's output.

    Raises:
        ValueError: there is none; says which layers came near, why they are not it, and what to do.
    """
    calls: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: calls.append((name, as_rows(output)))

    hooks = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if is_linear(m)]
    try:
        logits = logits_of(model(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    for name, output in reversed(calls):
        if output is logits or (output.shape == logits.shape and torch.equal(output, logits)):
            return name
    raise ValueError(_why_none(type(model).__name__, calls, logits))


def describe_break(model: str, name: str, head: Head, seen: Mapping[str, Tensor], logits: Tensor) -> str:
    """Why `head(features)` is not `logits`, in one line; "" where it is.

    Args:
        model: the model's class name.
        name: the head's module name.
        head: the head.
        seen: its input under "features", if it was called.
        logits: what the model returned.
    """
    features = seen.get("features")
    if features is None:
        return f"{model}: the head {name!r} was not called in a forward pass; {_REMEDY}"
    if features.ndim != 2 or len(features) != len(logits):
        return (
            f"{model}: the head {name!r} takes features {tuple(features.shape)}, not (N, D), "
            f"for {len(logits)} images; {_REMEDY}"
        )
    expected = head(full_precision(features))
    if expected.shape != logits.shape:
        return f"{model}: the head {name!r} gives {tuple(expected.shape)}, the model {tuple(logits.shape)}; {_REMEDY}"
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 5e-2
    if not bool(logits.isfinite().all()):
        return ""  # NaN is not a question of the head; whoever builds `Outputs` names the images
    gap = (expected - logits.float()).abs().max().item() if logits.numel() else 0.0
    if gap <= tolerance * max(1.0, expected.abs().max().item() if logits.numel() else 1.0):
        return ""
    return f"{model}: {_what_follows(name, expected, logits.float())}; {_REMEDY}"


def _why_none(model: str, calls: list[tuple[str, Tensor]], logits: Tensor) -> str:
    if not calls:
        return f"{model}: no Linear is called in a forward pass, so there is no linear head; {_REMEDY}"
    alike = {name: output for name, output in calls if output.shape == logits.shape}
    if len(alike) > 1:
        return (
            f"{model}: the output is that of no single Linear but mixes {' and '.join(map(repr, alike))} "
            f"(a distilled model with two heads); {_REMEDY}"
        )
    if alike:
        ((name, output),) = alike.items()
        return f"{model}: {_what_follows(name, output, logits)}; {_REMEDY}"
    name, output = calls[-1]
    if output.ndim != 2 and output.shape[-1] == logits.shape[-1]:
        return (
            f"{model}: the head {name!r} works on features that are not (N, D): it gives {tuple(output.shape)}, "
            f"which is reduced to {tuple(logits.shape)} afterwards; {_REMEDY}"
        )
    return (
        f"{model}: the last Linear, {name!r}, gives {tuple(output.shape)} where the model gives "
        f"{tuple(logits.shape)}, so the head is no Linear; {_REMEDY}"
    )


def _what_follows(name: str, before: Tensor, after: Tensor) -> str:
    if torch.allclose(after, before.softmax(dim=1), atol=1e-5):
        return f"a softmax follows the head {name!r}, so the model returns probabilities; let it return logits"
    if torch.allclose(after, before.log_softmax(dim=1), atol=1e-4):
        return f"a log-softmax follows the head {name!r}"
    return f"something after the head {name!r} changes its output (largest gap {(after - before).abs().max():.3g})"
