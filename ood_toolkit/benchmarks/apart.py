"""Models of one run are told apart: by name in every table, and by weights, so that none is ensembled with itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ood_toolkit.models import LoadedClassifier


def require_apart(specs: Sequence[str], checkpoints: Sequence[Path]) -> None:
    """Raises ValueError for a model that is named twice with the same weights, before anything is loaded.

    Args:
        specs: every --model and --member, in order.
        checkpoints: one for each, or none.
    """
    pairs = list(zip(specs, checkpoints, strict=True)) if checkpoints else [(spec, None) for spec in specs]
    for (spec, checkpoint), count in Counter(pairs).items():
        if count > 1:
            weights = f" with the checkpoint {str(checkpoint)!r}" if checkpoint else ""
            raise ValueError(
                f"{spec} is given {count} times{weights}: it would be ensembled with itself; "
                "name it once, or give each its own --checkpoint"
            )


def named_apart(models: Sequence[LoadedClassifier], checkpoints: Sequence[Path]) -> list[LoadedClassifier]:
    """The models, each under a spec of its own: one that is there several times gets its checkpoint's name behind.

    Args:
        models: in the order of `checkpoints`; further ones behind have names of their own already.
        checkpoints: of the first models, or none.

    Raises:
        ValueError: two have the same weights and preprocessing.
    """
    counts = Counter(model.spec for model in models)
    stems = Counter((model.spec, file.stem) for model, file in zip(models, checkpoints, strict=False))
    named = list(models)
    for number, (model, file) in enumerate(zip(models, checkpoints, strict=False)):
        if counts[model.spec] > 1:
            name = file.stem if stems[model.spec, file.stem] == 1 else str(file.with_suffix(""))
            named[number] = replace(model, spec=f"{model.spec}@{name}")
    seen: dict[tuple[str, str], str] = {}
    for model in named if len(named) > 1 else ():
        key = (model.classifier.fingerprint(), model.preprocessing)
        if key in seen:
            raise ValueError(
                f"{seen[key]} and {model.spec} have the same weights and preprocessing: "
                "one would be ensembled with itself; leave one of them out"
            )
        seen[key] = model.spec
    return named
