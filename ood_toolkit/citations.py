"""The BibTeX entries of methods, from the bibliography that ships with the package."""

import re
from collections.abc import Sequence
from pathlib import Path

from ood_toolkit.fitted import Fitted
from ood_toolkit.registry import (
    calibrator_classes,
    detector_classes,
    ensemble_classes,
    no_such,
    split_composition,
)


def bibtex(names: Sequence[str]) -> str:
    """BibTeX entries of the named detectors, calibrators and ensembles, each once, in the order of the names.

    Args:
        names: names or specs, as on the command line; "all" stands for every method. Of a composition such as
            `temperature+msp` every part is cited; `tuned+` is nobody's.

    Raises:
        ValueError: a name that no method has, or a method without an entry.
    """
    methods: dict[str, type[Fitted]] = {**detector_classes(), **calibrator_classes(), **ensemble_classes()}
    everything = [name for name, kind in methods.items() if kind.cite]
    wanted = everything if "all" in names else [part for name in names for part in _parts(name)]
    entries = bibliography()
    found: dict[str, str] = {}
    for name in wanted:
        key = name.partition("(")[0].partition(":")[0].strip().replace("-", "_")
        if key not in methods:
            raise ValueError(no_such("method", name.partition("(")[0], sorted(methods)))
        cite = methods[key].cite
        if cite not in entries:
            raise ValueError(f"{name!r} has no paper to cite")
        found[cite] = entries[cite]
    return "\n\n".join(found.values())


def _parts(spec: str) -> list[str]:
    parts = split_composition(spec)
    return parts[1:] if parts[0] == "tuned" and len(parts) > 1 else parts


def bibliography() -> dict[str, str]:
    """Every entry of `references.bib` by its key."""
    text = Path(__file__).with_name("references.bib").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^(?=@)", text)
    return {match.group(1): part.strip() for part in parts if (match := re.match(r"@\w+\{([^,\s]+),", part))}
