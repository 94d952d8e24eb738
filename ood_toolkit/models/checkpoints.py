"""Weights from a file into a model, or one line that says why they do not fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_ema", "model_ema", "net")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def load_checkpoint(model: nn.Module, file: Path) -> None:
    """Loads every weight of `model` from a checkpoint of the same architecture.

    Args:
        model: receives the weights.
        file: a `.safetensors` file, or one that `torch.load(weights_only=True)` reads. The usual wrappers
            ("state_dict", "model", …) and prefixes ("module.", …) are taken off.

    Raises:
        ValueError: in one line: the file cannot be read, or which keys and shapes differ first.
    """
    weights = _without_prefixes(_unwrapped(read_checkpoint(file), file), model)
    own = model.state_dict()
    # checkpoints from before this counter existed lack it; it plays no part in evaluation
    missing = [key for key in own if key not in weights and not key.endswith("num_batches_tracked")]
    extra = [key for key in weights if key not in own]
    reshaped = [k for k in own if k in weights and weights[k].shape != own[k].shape]
    if missing or extra or reshaped:
        parts = [
            f"{len(found)} {what} ({found[0]!r})" for found, what in ((missing, "missing"), (extra, "unknown")) if found
        ]
        parts += [
            f"{len(reshaped)} of another shape ({k!r}: {tuple(weights[k].shape)} in the file, "
            f"{tuple(own[k].shape)} in the model)"
            for k in reshaped[:1]
        ]
        raise ValueError(
            f"{file} is no checkpoint of {type(model).__name__} as built here: of its {len(own)} keys "
            + ", ".join(parts)
        )
    model.load_state_dict(weights, strict=False)


def read_checkpoint(file: Path) -> Any:
    """What a checkpoint file holds. Nothing in it is executed."""
    if not file.is_file():
        raise ValueError(f"there is no checkpoint at {file}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # readers raise anything from EOFError to UnpicklingError, some over many lines
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{file} cannot be read as a checkpoint ({reason})") from error


def _unwrapped(content: Any, file: Path) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__} where a mapping of names to tensors is expected")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{file} holds no tensors; its keys start with {list(content)[:3]}")
    return tensors


def _without_prefixes(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    own = model.state_dict().keys()
    for _ in range(len(_PREFIXES)):
        prefix = next((p for p in _PREFIXES if all(key.startswith(p) for key in weights)), None)
        if prefix is None or any(key in own for key in weights):
            return weights
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights
