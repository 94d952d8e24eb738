"""What all law suites share: the error, the comparison, the run."""

import ast
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ood_toolkit.fitted import Fitted
from ood_toolkit.outputs import Outputs

Case = TypeVar("Case")


class BrokenLaw(AssertionError):
    """A law does not hold; the message says which, by how much, and what to look at."""


def run_laws(
    subject: str, case: Case, laws: Mapping[str, Callable[[Case], None]], only: str | None, exempt: Mapping[str, str]
) -> None:
    """Runs the laws and raises one `BrokenLaw` that lists all that failed.

    Args:
        subject: what is being checked, for the message.
        case: what each law is called with.
        laws: by name.
        only: the name of the single law to run, or None for all.
        exempt: law → why this method cannot keep it. An exempt law that holds is an error too: the excuse is stale.
    """
    unknown = sorted(({only, *exempt} - {None}) - set(laws))
    if unknown:
        raise ValueError(f"no law is named {unknown}; known: {', '.join(laws)}")
    if any(not reason for reason in exempt.values()):
        raise ValueError("every exemption needs its reason")
    broken: dict[str, list[str]] = {}  # laws by message: one crash breaks many
    for name in [only] if only else list(laws):
        message = _broken(laws[name], case)
        if name in exempt:
            message = None if message else f"is declared exempt ({exempt[name]}), but holds: drop the exemption"
        if message:
            broken.setdefault(message, []).append(name)
    if broken:
        count = sum(map(len, broken.values()))
        lines = [f"  {', '.join(names)}: {message}" for message, names in broken.items()]
        raise BrokenLaw(f"{subject} breaks {count} law(s):\n" + "\n".join(lines))


def _broken(law: Callable[[Case], None], case: Case) -> str | None:
    try:
        law(case)
    except BrokenLaw as error:
        return str(error)
    except Exception as error:  # a crash is a broken law like any other, and the remaining laws still run
        return f"raised {type(error).__name__}: {error}"
    return None


def require(holds: bool, message: str) -> None:
    """Raises `BrokenLaw(message)` unless `holds`."""
    if not holds:
        raise BrokenLaw(message)


def require_close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Both have one shape, are finite, and differ by at most `tolerance` × (spread + size) anywhere."""
    require(got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} where {tuple(expected.shape)} is expected")
    got, expected = got.detach().double(), expected.detach().double()
    require(bool(got.isfinite().all()), f"{what}: {int((~got.isfinite()).sum())} of {got.numel()} values not finite")
    if not got.numel():
        return
    spread = expected.std() if expected.numel() > 1 else expected.abs().max()
    excess = (got - expected).abs() - tolerance * (spread + expected.abs())
    worst = int(excess.argmax())
    require(
        float(excess.max()) <= 1e-300,
        f"{what}: {got.flatten()[worst]:.9g} where {expected.flatten()[worst]:.9g} is expected (position {worst}, "
        f"tolerance {tolerance:g} of spread {float(spread):.3g} + size)",
    )


def require_literal_hyperparameters(fitted: Fitted) -> None:
    """Every hyper-parameter is a literal under its own name, so that `spec`, `repr` and `clone` round-trip."""
    require(hasattr(type(fitted), "name"), f"{type(fitted).__name__} has no `name`; tables and records need one")
    for name, value in fitted.hyperparameters.items():
        require(
            _is_literal(value),
            f"hyper-parameter {name}={value!r} is not a literal, so no command line and no record can name it",
        )
    copy = fitted.clone()
    require(type(copy) is type(fitted), f"clone() gives a {type(copy).__name__}")
    require(
        (repr(copy), copy.spec) == (repr(fitted), fitted.spec),
        f"clone() of {fitted!r} is {copy!r}: __init__ changes values",
    )
    head, bracket, rest = fitted.spec.partition("(")
    name, colon, variant = head.partition(":")  # netcal:BBQ(...)
    require(name == fitted.name, f"spec {fitted.spec!r} does not start with the name {fitted.name!r}")
    if bracket or colon:
        call: Any = ast.parse(f"f({rest or ')'}", mode="eval").body
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        kind: Any = type(fitted)
        again = kind.variant(variant, arguments) if colon else kind(**arguments)
        require(repr(again) == repr(fitted), f"spec {fitted.spec!r} builds {again!r}, not {fitted!r}")


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def require_declared(fitted: Fitted) -> None:
    """Nothing learned lies outside the declared tensors: it would miss `.to()` and `state_dict()`, and keep rows."""
    hidden = sorted(
        name
        for name, value in vars(fitted).items()
        if isinstance(value, Tensor | Outputs)
        or (isinstance(value, list | tuple) and any(isinstance(part, Tensor | Outputs) for part in value))
    )
    require(
        not hidden,
        f"fit keeps {', '.join(hidden)} outside the state_dict; declare what is learned in the class body, "
        f'`{"".join(hidden[:1])}: Float[Tensor, "N D"]`, and keep no training rows that the score does not need',
    )


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, to compare with later."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def require_unchanged(before: Mapping[str, Tensor], after: Mapping[str, Tensor], what: str) -> None:
    """All tensors are what they were, number by number; NaN counts as equal to NaN."""
    changed = [
        name
        for name in before
        if before[name].shape != after[name].shape
        or not torch.allclose(before[name], after[name].detach(), rtol=0, atol=0, equal_nan=True)
    ]
    require(not changed, f"{what} wrote into {', '.join(changed)}")
