"""What zero-shot models are told, from the user's choices: class names, prompts, outlier prompts, negative labels."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.suite import ClassMask
from ood_toolkit.models.clip import TEMPLATE_SETS, ClipPrompts
from ood_toolkit.models.negatives import NegativeLabels, Vocabulary, read_vocabulary, wordnet_vocabulary

_ZERO_SHOT = "open_clip:"
_FIRST = ":first"
"""Behind WordNet: only the first name of each synset."""


def is_zero_shot(spec: str) -> bool:
    """Whether the model of this spec takes its classes from their names."""
    return spec.startswith(_ZERO_SHOT)


def uses_zero_shot(choices: Choices) -> bool:
    """Whether any model of the run does."""
    return any(map(is_zero_shot, (*choices.models, *choices.members, choices.second_opinion)))


def require_zero_shot(choices: Choices) -> None:
    """Raises ValueError for words without a model that reads them, and for a second opinion that has none."""
    opinion = choices.second_opinion
    if opinion and not is_zero_shot(opinion):
        raise ValueError(f"--second-opinion is for zero-shot models, open_clip:ARCH/TAG; got {opinion!r}")
    if choices.negatives_share is not None and not choices.negatives:
        raise ValueError("--negatives-share needs --negatives wordnet, or a word list")
    placeholder = next((text for text in choices.outlier_prompts if "{}" in text), None)
    if placeholder is not None:
        raise ValueError(f"--outlier-prompt is taken as it is, so it has no {{}} for a class name; got {placeholder!r}")
    given = [
        option
        for option, value in (
            ("--prompts", choices.prompts),
            ("--class-names", choices.class_names),
            ("--outlier-prompt", choices.outlier_prompts),
            ("--negatives", choices.negatives),
        )
        if value
    ]
    if given and not uses_zero_shot(choices):
        raise ValueError(f"{given[0]} is for zero-shot models; add --model {_ZERO_SHOT}ARCH/TAG")


def clip_prompts(choices: Choices, masks: Iterable[ClassMask | None] = ()) -> ClipPrompts:
    """What the zero-shot models of a run are told.

    Args:
        choices: the user's.
        masks: the class masks of the suite; negative labels are chosen for each of them.

    Raises:
        ValueError: a file that is missing or says nothing, an unknown prompt set, WordNet that is not there.
    """
    return ClipPrompts(
        classes=named_classes(choices.class_names),
        templates=_templates(choices.prompts),
        outliers=tuple(choices.outlier_prompts),
        negatives=_negatives(choices),
        subsets=tuple(tuple(mask.classes.tolist()) for mask in masks if mask is not None),
        cache=choices.cache / "texts",
    )


def named_classes(file: Path | None) -> tuple[str, ...]:
    """The class names in a file, one a line, in the order of the classes; none without a file.

    An underscore stands for a space, as in the names of folders.
    """
    if file is None:
        return ()
    names = tuple(name.replace("_", " ") for name in _lines(file, "--class-names"))
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice:
        raise ValueError(f"--class-names {str(file)!r} names {twice!r} twice")
    if len(names) < 2:
        raise ValueError(f"--class-names {str(file)!r} needs two class names or more, one a line; got {len(names)}")
    return names


def said(prompts: ClipPrompts) -> dict[str, object]:
    """All of it, for run.json."""
    facts: dict[str, object] = {
        "in_words": prompts.descriptions,
        "templates": list(prompts.patterns),
        "class_names": list(prompts.class_names),
        "outlier_prompts": list(prompts.outliers),
    }
    if prompts.negatives:
        chosen, words = prompts.negatives, prompts.negatives.vocabulary
        facts["negatives"] = {
            "source": words.source,
            "nouns": len(words.nouns),
            "adjectives": len(words.adjectives),
            "share": chosen.share,
            "percentile": chosen.percentile,
            "prompts": [chosen.noun_prompt, chosen.adjective_prompt],
            "sha256": chosen.fingerprint,
        }
    return facts


def _templates(text: str) -> str | tuple[str, ...]:
    if not text:
        return "openai80"
    if text in TEMPLATE_SETS:
        return text
    file = Path(text)
    if not file.is_file():
        raise ValueError(
            f"--prompts must be {', '.join(TEMPLATE_SETS)}, or a file with one prompt a line; got {text!r}"
        )
    patterns = _lines(file, "--prompts")
    without = [pattern for pattern in patterns if "{}" not in pattern]
    if without or not patterns:
        shown = repr(without[0]) if without else "an empty file"
        raise ValueError(f"every line of --prompts {text!r} needs {{}} where the class name goes; got {shown}")
    return patterns


def _negatives(choices: Choices) -> NegativeLabels | None:
    if not choices.negatives:
        return None
    place = choices.negatives.removesuffix(_FIRST)
    first = place != choices.negatives
    vocabulary = _wordnet(first) if place == "wordnet" else read_vocabulary(Path(place), first_names=first)
    share = choices.negatives_share
    return NegativeLabels(vocabulary) if share is None else NegativeLabels(vocabulary, share)


@cache
def _wordnet(first_names: bool) -> Vocabulary:
    return wordnet_vocabulary(first_names=first_names)


def _lines(file: Path, option: str) -> tuple[str, ...]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        raise ValueError(f"{option} {str(file)!r} cannot be read: {reason}") from None
    lines: Sequence[str] = [line.strip() for line in text.splitlines()]
    return tuple(line for line in lines if line)
