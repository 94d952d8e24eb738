"""What a notebook asks for, as Python values: checked, and turned into the choices of the command line."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ood_toolkit.benchmarks.choices import DEFAULTS, Choices
from ood_toolkit.fitted import Fitted

_FOLDERS = ("id", "labels", "fit", "calibrate")
_SPECS = ("detectors", "calibrators", "ensemble")
_PATHS = ("snapshots", "class_names", "data_root", "out", "cache")
_LEAST = {"batch_size": 0, "workers": -1, "seed": 0, "resamples": 0, "fit_per_class": 1, "classes": 1}
"""Whole numbers, and the least that each may be."""


def asked(wanted: Mapping[str, Any]) -> Choices:
    """The choices that these values mean; the rest is as the command line has it.

    Paths may be text, specs may be lists or detectors themselves, `ood` a mapping from name to folder.

    Raises:
        ValueError: an unknown name, or a value that is out of range.
        TypeError: a value of a kind that cannot be meant; both say what to write.
    """
    known = [field.name for field in fields(Choices)]
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"evaluate does not know {name!r};{hint} Known: {', '.join(known)}")
    return replace(DEFAULTS, **{name: _read(name, value) for name, value in wanted.items()})


def in_python(text: str) -> str:
    """A message of the command line with its options as `evaluate` takes them.

    >>> in_python("give more, or --absent-classes skip; lower --fit-fraction, or give --id DIR")
    "give more, or absent_classes='skip'; lower fit_fraction, or give folders={'id': DIR}"
    """
    text = re.sub(r"--(id|fit|calibrate|labels) (DIR|FILE)", r"folders={'\1': \2}", text)
    text = re.sub(r"--ood NAME=DIR", "ood={NAME: DIR}", text)
    text = re.sub(r"--(id|fit|calibrate|labels)\b(?!-)", r"folders['\1']", text)
    text = re.sub(r"--absent-classes skip", "absent_classes='skip'", text)
    text = re.sub(r"--suite ([\w+-]+)", r"suite='\1'", text)
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda found: found[1].replace("-", "_"), text)


def _read(name: str, value: Any) -> Any:
    default = getattr(DEFAULTS, name)
    if name in _SPECS:
        return _specs(name, value)
    if name in _PATHS:
        return None if value is None and default is None else _path(name, value)
    special: dict[str, Callable[[Any], Any]] = {
        "folders": _folders,
        "ood": _ood,
        "checkpoints": _checkpoints,
        "device": lambda value: str(value) if isinstance(value, torch.device) else _text("device", value),
        "dtype": lambda value: _dtype("dtype", value),
        "amp": lambda value: _dtype("amp", value),
        "negatives_share": lambda value: None if value is None else _number("negatives_share", value),
    }
    if name in special:
        return special[name](value)
    if name in _LEAST:
        return None if value is None and default is None else _count(name, value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise _wrong(name, value, "True or False")
        return value
    if isinstance(default, float):
        return _number(name, value)
    return _text(name, value) if isinstance(default, str) else _texts(name, value)


def _specs(name: str, value: Any) -> str:
    """Comma-separated specs, from text, a method, or a list of either."""
    if isinstance(value, str):
        return value
    if isinstance(value, Fitted):
        return value.spec
    if isinstance(value, Iterable):
        items = list(value)
        if items and all(isinstance(item, str | Fitted) for item in items):
            return ",".join(item if isinstance(item, str) else item.spec for item in items)
    none = ", or 'none' for none" if name != "detectors" else ""
    raise _wrong(name, value, f"'all', specs such as 'a,b(k=5)', or a list of them{none}")


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise _wrong(name, value, "a path")
    return Path(value).expanduser()


def _folders(value: Any) -> dict[str, Path]:
    if not isinstance(value, Mapping):
        raise _wrong("folders", value, f"a mapping such as {{'id': 'photos/known'}} (keys: {', '.join(_FOLDERS)})")
    strange = [key for key in value if key not in _FOLDERS]
    if strange:
        raise ValueError(f"folders does not know {strange[0]!r}; its keys are {', '.join(_FOLDERS)}")
    return {key: _path(f"folders[{key!r}]", path) for key, path in value.items() if path is not None}


def _ood(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{name}={_path(f'ood[{name!r}]', folder)}" for name, folder in value.items())
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong("ood", value, "a mapping such as {'strange': 'photos/strange'}")
    return _texts("ood", value)


def _checkpoints(value: Any) -> tuple[Path, ...]:
    items = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(items, Iterable):
        raise _wrong("checkpoints", value, "one path for each model")
    return tuple(_path("checkpoints", item) for item in items)


def _dtype(name: str, value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else _text(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise _wrong(name, value, "a list of texts")
    return tuple(_text(name, item) for item in items)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "a whole number")
    if value < _LEAST[name]:
        raise ValueError(f"{name} must be at least {_LEAST[name]}, got {value}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    return float(value)


def _wrong(name: str, value: Any, expected: str) -> TypeError:
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}…"
    return TypeError(f"{name} must be {expected}; got {shown}, a {type(value).__name__}")
