"""Objects that learn from data: hyper-parameters in, buffers out."""

import ast
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtyping import AbstractArray
from torch import Tensor, nn

from ood_toolkit.hyperparameters import Allowed, checking


class NotFitted(ValueError, AttributeError):
    """Something learned was asked for before `fit`."""


class Fitted(nn.Module):
    """A module whose `__init__` stores hyper-parameters and nothing else, and whose `fit` assigns tensors.

    A tensor that `fit` assigns is declared in the class body by its annotation, `means: Float[Tensor, "C D"]`, and
    so becomes a buffer: `.to()`, `state_dict()`, `load_state_dict()` on an unfitted copy, pickling and export all
    follow. Reading it earlier raises `NotFitted`. Hyper-parameters are plain values (numbers, strings, booleans,
    None, tuples), one attribute per parameter of `__init__`, under the same name.
    """

    name: ClassVar[str]
    """The name on the command line and in records."""
    paper: ClassVar[str] = ""
    """Authors, title, venue, year, identifier."""
    cite: ClassVar[str] = ""
    """Key of the paper in `references.bib`."""
    equation: ClassVar[str] = ""
    """What is computed, on one line, in the letters of `docs/methods.md`."""
    allowed: ClassVar[Mapping[str, Allowed]] = {}
    """What hyper-parameters may be, where their annotation does not say it: `{"k": "[1, inf)", "mode": ("a", "b")}`."""
    _learned: ClassVar[frozenset[str]] = frozenset()
    _axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The axes of learned tensors as their annotations name them: `{"means": ("C", "D")}`."""

    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", checking(vars(cls)["__init__"]))  # noqa: B010  pyright refuses the assignment
        if "allowed" in vars(cls):
            inherited = {name: values for base in cls.__mro__[:0:-1] for name, values in _allowed(base).items()}
            cls.allowed = {**inherited, **vars(cls)["allowed"]}
        declared = {name: kind for name, kind in inspect.get_annotations(cls).items() if _is_tensor(kind)}
        cls._learned = cls._learned | frozenset(declared)
        axes = {name: tuple(getattr(kind, "dim_str", "").split()) for name, kind in declared.items()}
        cls._axes = {**cls._axes, **axes}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._learned and isinstance(value, Tensor):
            self._require_init()
            self.register_buffer(name, value.detach())
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # copying and unpickling look for those on an empty object
            self._require_init()
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in type(self)._learned:
                raise NotFitted(f"{self!r} has not learned {name!r} yet; call fit(train) first") from None
            raise

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in self._learned:
            if prefix + name in state_dict:
                self.register_buffer(name, state_dict[prefix + name].detach().clone())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _require_init(self) -> None:
        if "_buffers" not in vars(self):
            kind = type(self).__name__
            raise AttributeError(f"{kind}.__init__ has not called super().__init__(); make that its first line")

    def learned_size(self, axis: str) -> int | None:
        """How long the axis of this name is in what was learned, or None where no learned tensor has it.

        Args:
            axis: as the annotations of learned tensors name it: "C" for classes, "D" for features.
        """
        for name, axes in self._axes.items():
            tensor = self._buffers.get(name)
            if tensor is not None and axis in axes and len(axes) == tensor.ndim:
                return tensor.shape[axes.index(axis)]
        return None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What `__init__` was given, by parameter name."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
        for name in names:
            if not hasattr(self, name):
                kind = type(self).__name__
                raise TypeError(f"{kind}.__init__ does not store its parameter {name!r}; add self.{name} = {name}")
        return {name: getattr(self, name) for name in names}

    @property
    def spec(self) -> str:
        """The text that `registry.build` turns back into an unfitted copy: only what differs from the defaults.

        The name in records and tables; `repr` shows every hyper-parameter.
        """
        parameters = inspect.signature(type(self).__init__).parameters
        changed = {k: v for k, v in self.hyperparameters.items() if parameters[k].default != v}
        return self.name + (f"({_keywords(changed)})" if changed else "")

    def clone(self) -> Self:
        """An unfitted copy with the same hyper-parameters."""
        return type(self)(**self.hyperparameters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_keywords(self.hyperparameters)})"


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """A spec's name and keyword arguments: the way back from `Fitted.spec`. Literals only; nothing is executed.

    >>> parse("knn(k=50)")
    ('knn', {'k': 50})
    """
    if not isinstance(spec, str):
        raise TypeError(f"a spec is text such as 'knn(k=50)', got {spec!r}; a class or an object needs no building")
    name, bracket, rest = spec.strip().partition("(")
    if not bracket:
        return name.strip(), {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f"cannot read {spec!r}; write it like knn(k=50) with literal keyword arguments") from None


def _allowed(kind: type) -> Mapping[str, Allowed]:
    return getattr(kind, "allowed", {})


def _keywords(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _is_tensor(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Tensor | AbstractArray)
