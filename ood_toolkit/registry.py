"""Names to classes and back: `build("knn(k=50)")`, `build("my_pkg:MyDetector")`."""

import difflib
import importlib
import inspect
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from ood_toolkit import calibrators, detectors
from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.fitted import Fitted
from ood_toolkit.fitted import parse as parse

AnyDetector = Detector | LiveDetector


def detector_classes() -> dict[str, type[AnyDetector]]:
    """Every registered detector by name, live ones included, in order of name."""
    return dict(sorted({**_members(detectors, Detector), **_members(detectors, LiveDetector)}.items()))


def calibrator_classes() -> dict[str, type[Calibrator]]:
    """Every registered calibrator by name; "none", the plain softmax, comes first."""
    found = _members(calibrators, Calibrator)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "none", item[0])))


def ensemble_classes() -> dict[str, type[EnsemblePool]]:
    """Every registered way to pool an ensemble, by name; the mean of probabilities, the usual one, comes first."""
    found = _members(calibrators, EnsemblePool)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "mean_probability", item[0])))


def build_detector(spec: str) -> AnyDetector:
    """An unfitted detector from its spec.

    >>> build_detector("energy(temperature=2)")
    EnergyDetector(temperature=2)
    """
    return _build(spec, "detector", detector_classes(), (Detector, LiveDetector))


def build_calibrator(spec: str) -> Calibrator:
    """An unfitted calibrator from its spec."""
    return _build(spec, "calibrator", calibrator_classes(), (Calibrator,))


def build_ensemble(spec: str) -> EnsemblePool:
    """An unfitted ensemble pool from its spec."""
    return _build(spec, "ensemble", ensemble_classes(), (EnsemblePool,))


def split_specs(text: str) -> list[str]:
    """Splits a comma-separated list of specs at the commas outside brackets and quotes.

    >>> split_specs("energy(temperature=2), knn(k=50),msp")
    ['energy(temperature=2)', 'knn(k=50)', 'msp']
    """
    return [part for part in (part.strip() for part in _split(text, ",")) if part]


def split_composition(spec: str) -> list[str]:
    """Splits `temperature+msp` at the plus signs outside brackets and quotes."""
    return [part.strip() for part in _split(spec, "+")]


def _split(text: str, separator: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _members(package: ModuleType, base: type[Fitted]) -> dict[str, type[Any]]:
    return {
        kind.name: kind
        for kind in vars(package).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and "name" in vars(kind)
    }


def _build(spec: str, what: str, known: dict[str, type[Any]], bases: tuple[type[Any], ...]) -> Any:
    name, arguments = parse(spec)
    adapter, colon, variant = name.partition(":")
    if colon and hasattr(known.get(adapter), "variant"):  # another package's method: netcal:BBQ(...)
        return known[adapter].variant(variant, arguments)
    kind = _imported(name, what, bases) if ":" in name else known.get(name.replace("-", "_"))
    if kind is None:
        raise ValueError(no_such(what, name, known))
    if known.get(kind.name, kind) is not kind:
        raise ValueError(f"{name!r} calls itself {kind.name!r}, which is a registered {what}; give it another `name`")
    unknown = sorted(set(arguments) - set(inspect.signature(kind.__init__).parameters))
    if unknown:
        raise ValueError(f"{spec}: there is no {unknown[0]!r}; {kind.__name__} takes {_parameters(kind)}")
    try:
        built = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec}: {str(error).removeprefix(f'{kind.__name__}: ')}") from error
    if "_buffers" not in vars(built):
        raise ValueError(
            f"{spec}: {kind.__name__}.__init__ has not called super().__init__(); make that its first line"
        )
    return built


def no_such(what: str, name: str, known: Collection[str]) -> str:
    """That nothing has this name, with the nearest one, and all there are."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    hint = f" did you mean {close[0]!r}?" if close else ""
    return f"no {what} is named {name!r};{hint} Known: {', '.join(known)}"


def _imported(name: str, what: str, bases: tuple[type[Any], ...]) -> type[Any]:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, bases)):
        raise ValueError(f"{name!r} is not a subclass of {' or '.join(base.__name__ for base in bases)}")
    if "name" not in vars(kind):
        raise ValueError(f"{name!r} has no `name` of its own; tables and records need one")
    return kind


def _parameters(kind: type[Any]) -> str:
    names = [p for p in inspect.signature(kind.__init__).parameters if p != "self"]
    return ", ".join(names) or "no arguments"
