"""The BibTeX entries of methods, from the bibliography that ships with the package."""

import re
from collections.abc import Sequence
from pathlib import Path

from ood_toolkit.fitted import Fitted
from ood_toolkit.registry import calibrator_classes, detector_classes, ensemble_classes


def bibtex(names: Sequence[str]) -> str:
    """BibTeX entries of the named detectors, calibrators and ensembles, each once, in the order of the names.

    Args:
        names: names or specs, as on the command line; "all" stands for every method.

    Raises:
        ValueError: a name that no method has, or a method without an entry.
    """
    methods: dict[str, type[Fitted]] = {**detector_classes(), **calibrator_classes(), **ensemble_classes()}
    wanted = [name for name, kind in methods.items() if kind.cite] if "all" in names else names
    entries = bibliography()
    found: dict[str, str] = {}
    for name in wanted:
        key = name.partition("(")[0].partition(":")[0].strip().replace("-", "_")
        if key not in methods:
            raise ValueError(f"no method is named {name!r}; `ood-bench --list` says what there is")
        cite = methods[key].cite
        if cite not in entries:
            raise ValueError(f"{name!r} has no paper to cite")
        found[cite] = entries[cite]
    return "\n\n".join(found.values())


def bibliography() -> dict[str, str]:
    """Every entry of `references.bib` by its key."""
    text = Path(__file__).with_name("references.bib").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^(?=@)", text)
    return {match.group(1): part.strip() for part in parts if (match := re.match(r"@\w+\{([^,\s]+),", part))}
