"""What hyper-parameters may be: their kind by annotation, their value by an interval or a choice."""

import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

Allowed = str | tuple[object, ...]
"""An interval, `"[1, inf)"`, or the values there are to choose from, `("error", "skip")`."""
_PLAIN = {int, float, str, bool, type(None)}


def checking(init: Callable[..., None]) -> Callable[..., None]:
    """The same `__init__`, which refuses arguments of another kind than annotated or outside `self.allowed`.

    NaN is never allowed. NumPy's numbers and tensors of one number become Python's.

    Raises:
        TypeError: a value of another kind, a word for a number, say.
        ValueError: a value that is not allowed.
    """

    @functools.wraps(init)
    def checked(self: Any, *positional: Any, **named: Any) -> None:
        try:
            bound = inspect.signature(init).bind(self, *positional, **named)
        except TypeError:
            return init(self, *positional, **named)  # Python's own message names the class
        hints = _hints(init)
        for name, value in list(bound.arguments.items())[1:]:
            if name in hints:
                bound.arguments[name] = require_kind(f"{type(self).__name__}: {name}", value, hints[name])
            require_allowed(f"{type(self).__name__}: {name}", bound.arguments[name], self.allowed.get(name))
        return init(*bound.args, **bound.kwargs)

    return checked


def require_kind(what: str, value: Any, hint: Any) -> Any:
    """The value as a plain one of Python, if the annotation allows its kind; raises TypeError or ValueError otherwise.

    Annotations of more than plain kinds are not looked at.
    """
    several = typing.get_origin(hint) in (typing.Union, types.UnionType)
    allowed = set(typing.get_args(hint)) if several else {hint}
    if typing.get_origin(hint) is Literal:
        return require_allowed(what, value, typing.get_args(hint))
    if not allowed <= _PLAIN:
        return _require_tuple(what, value, allowed)
    if type(value) not in _PLAIN and getattr(value, "shape", None) == ():  # of NumPy or torch
        value = value.item()
    if type(value) in allowed or (type(value) is int and float in allowed):
        return value
    raise TypeError(f"{what} must be {' or '.join(sorted(map(_word, allowed)))}, got {value!r}")


def _require_tuple(what: str, value: Any, allowed: set[Any]) -> Any:
    """The value, a list as a tuple, where the annotation asks for a tuple or plain kinds and for nothing else."""
    shapes = [typing.get_args(kind) for kind in allowed if typing.get_origin(kind) is tuple]
    plain = {kind for kind in allowed if typing.get_origin(kind) is not tuple}
    if not shapes or not plain <= _PLAIN or type(value) in plain:
        return value
    length = None if shapes[0][-1] is ... else len(shapes[0])
    if not isinstance(value, tuple | list) or length not in (None, len(value)):
        words = f"a tuple of {length}" if length else "a tuple"
        raise TypeError(f"{what} must be {' or '.join([words, *sorted(map(_word, plain))])}, got {value!r}")
    if shapes[0][0] in _PLAIN:
        return tuple(require_kind(f"every one of {what}", each, shapes[0][0]) for each in value)
    return tuple(value)


def require_allowed(what: str, value: Any, allowed: Allowed | None = None) -> Any:
    """The value, if it is one of those allowed and not NaN; raises ValueError otherwise. Of a tuple, every number."""
    if isinstance(allowed, tuple):
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise ValueError(f"{what} must be {_listed(allowed)}, got {value!r}")
        return value
    for number in value if isinstance(value, tuple | list) else (value,):
        if not isinstance(number, int | float):
            continue
        if math.isnan(number):
            raise ValueError(f"{what} must be a number, got {value!r}")
        if allowed is not None and not isinstance(number, bool) and not _inside(number, allowed):
            raise ValueError(f"{what} must {_in_words(allowed)}, got {value!r}")
    return value


def _inside(number: float, interval: str) -> bool:
    opening, low, high, closing = _parts(interval)
    above = number >= low if opening == "[" else number > low
    return above and (number <= high if closing == "]" else number < high)


def _in_words(interval: str) -> str:
    opening, low, high, closing = _parts(interval)
    if high == math.inf and math.isfinite(low):
        return f"be {'at least' if opening == '[' else 'above'} {low:g}" + (" and finite" if closing == ")" else "")
    return f"lie in {interval}"


@functools.cache
def _parts(interval: str) -> tuple[str, float, float, str]:
    found = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval)
    if not found:
        raise ValueError(f"{interval!r} is not an interval; write it like [0, 1) or (0, inf)")
    return found[1], float(found[2]), float(found[3]), found[4]


@functools.cache
def _hints(init: Callable[..., None]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(init)
    except (NameError, TypeError):  # names that only type checkers import
        return {}


def _word(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).replace("NoneType", "None")


def _listed(choices: tuple[object, ...]) -> str:
    words = [repr(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
