"""Every suite on published sets by name, what runs by default, and what others published beside what was measured."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from ood_toolkit.benchmarks import openood_cifar
from ood_toolkit.benchmarks.imagenet import CLASSES, Learning
from ood_toolkit.benchmarks.mos import MOS, mos_suite
from ood_toolkit.benchmarks.natural_adversarial import (
    NATURAL_ADVERSARIAL_SUITES,
    Protocol,
    available,
    natural_adversarial_suite,
)
from ood_toolkit.benchmarks.openood import FAR, GROUPS, NEAR, openood_suite
from ood_toolkit.benchmarks.published import SetName, compare_accuracy, published_openood
from ood_toolkit.benchmarks.shifted import ShiftProtocol, shift_suite, shift_suites
from ood_toolkit.benchmarks.suite import Suite
from ood_toolkit.datasets.cifar import CIFAR10_CLASSES
from ood_toolkit.datasets.locate import ROOT_VARIABLE
from ood_toolkit.records import Record

OPENOOD = "openood-imagenet"
_WHOLE = {OPENOOD: openood_suite, MOS: mos_suite, openood_cifar.NAME: openood_cifar.openood_cifar_suite}
"""Suites whose classes are all that the models know."""


def imagenet_suites() -> tuple[str, ...]:
    """The names that `imagenet_suite` knows; some take a part behind a slash, see `shift_suite`."""
    return (*NATURAL_ADVERSARIAL_SUITES, OPENOOD, openood_cifar.NAME, MOS, *shift_suites())


def imagenet_suite(
    name: str,
    root: Path | None,
    *,
    protocol: Protocol | ShiftProtocol = "official",
    learning: Learning | None = None,
) -> Suite:
    """The suite of that name; underscores stand for hyphens.

    Args:
        name: one of `imagenet_suites()`.
        root: the data root, or None where the user gave none.
        protocol: the rules, for ImageNet-A and -O; "full-1000way" also lifts the mask of ImageNet-R, and "masked" lays
            one on ObjectNet and DomainNet.
        learning: what methods learn from.

    Raises:
        ValueError: unknown name, no data root, or data that is absent, with what to do about it.
    """
    plain = canonical_name(name)
    if root is None:
        raise ValueError(f"suite {plain!r} needs --data-root DIR (or ${ROOT_VARIABLE}) with its images")
    if not root.is_dir():
        raise ValueError(f"data root {str(root)!r} is no folder")
    if plain in NATURAL_ADVERSARIAL_SUITES:
        return natural_adversarial_suite(plain, root, protocol=protocol, learning=learning)  # pyright: ignore
    if protocol not in get_args(ShiftProtocol):
        raise ValueError(f"the protocol {protocol!r} is about ImageNet-A and ImageNet-O, not {plain!r}")
    if plain in _WHOLE:
        if protocol == "masked":
            classes = classes_of(plain)
            raise ValueError(f"the suite {plain!r} is about all {classes} classes, so it has no protocol 'masked'")
        return _WHOLE[plain](root, learning=learning)
    return shift_suite(plain, root, protocol=protocol, learning=learning)  # pyright: ignore


def canonical_name(name: str) -> str:
    """The suite's name as records have it, from whatever spelling.

    Raises:
        ValueError: there is no such suite.
    """
    known = imagenet_suites()
    head, slash, rest = name.partition("/")
    plain = head.replace("_", "-").replace("imagenet-a-clean", "imagenet-a+clean")
    if plain not in known:
        close = difflib.get_close_matches(plain, known, n=1) or [n for n in known if plain and n.startswith(plain)]
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no suite is named {name!r};{hint} Known: {', '.join(known)}")
    return plain + slash + rest


def default_suite(root: Path | None) -> tuple[str, str]:
    """The suite that runs where the user names none, and one line to say, or "".

    `natural-adversarial` where all it needs is found; else the embedded one, and the line says how to get the real one.
    """
    if root is not None and available(root):
        return "natural-adversarial", ""
    return "digits", (
        "this is the embedded demonstration; for ImageNet-A and ImageNet-O: "
        "ood-bench data get imagenet-a imagenet-o --data-root DIR, and ood-bench data check imagenet-1k --data-root DIR"
    )


def classes_of(suite: str) -> int:
    """How many classes the models of a suite must know."""
    return openood_cifar.CLASSES if suite == openood_cifar.NAME else CLASSES


def require_classes(suite: str, model: str, classes: int) -> None:
    """Raises ValueError for a model that cannot know the suite's classes in their usual order."""
    expected = classes_of(suite)
    if classes == expected:
        return
    if expected == CLASSES:
        raise ValueError(f"{model} has {classes} classes; the ImageNet suites need the {CLASSES} of ImageNet-1k")
    names = ", ".join(CIFAR10_CLASSES)
    raise ValueError(
        f"{model} has {classes} classes; {suite} needs {expected}, in this order: {names} (a network takes --classes "
        f"{expected} and --checkpoint FILE, a zero-shot model --class-names FILE)"
    )


def reference_lines(
    records: Iterable[Record], image_sizes: dict[str, int] | None = None
) -> tuple[list[str], list[str]]:
    """What timm and OpenOOD report beside what was measured, and warnings where accuracy is not timm's.

    Args:
        records: of a run, with those of `near_far` for OpenOOD's means.
        image_sizes: pixels by model spec, where known; timm reports some models at several sizes.
    """
    lines: list[str] = []
    warnings: list[str] = []
    for record in records:
        if record.value is None or record.calibrator:
            continue
        if _is_timms(record):
            size = (image_sizes or {}).get(record.model)
            dataset: SetName = "imagenet-a" if record.dataset == "imagenet-a" else "imagenet-a-clean"
            text = compare_accuracy(record.model, dataset, record.value, record.positives, image_size=size)
            lines += [text[0]] if text[0] else []
            warnings += [text[1]] if text[1] else []
        if record.suite == OPENOOD and record.metric == "auroc" and record.dataset in GROUPS:
            published = published_openood(record.model, record.method, record.dataset)  # pyright: ignore
            if published is not None:
                lines.append(
                    f"OpenOOD 1.5 reports {published:.2%} for {record.method} on {record.dataset}; "
                    f"measured {record.value:.2%}"
                )
    return lines, warnings


def _is_timms(record: Record) -> bool:
    """The number is one that timm reports too: plain accuracy under the mask, on the same images."""
    same = record.dataset == "imagenet-a" or (
        record.dataset == "imagenet-a-clean" and not record.protocol.endswith("-standin")
    )
    return same and record.metric == "accuracy" and record.method == "none" and record.mask.startswith("imagenet-a:")


def openood_sets() -> Sequence[str]:
    """The five sets of the near/far table."""
    return (*NEAR, *FAR)
