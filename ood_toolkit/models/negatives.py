"""Negative labels for NegLabel: words that are far from all class names, mined from a large vocabulary."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.stats import row_chunks

_MARKER = re.compile(r"\((?:a|p|ip)\)$")
"""Where an adjective may stand."""
_REMEDY = "or give a word list of your own as a file"


@dataclass(frozen=True)
class Vocabulary:
    """Candidate words. A word counts once: as a noun where it is both.

    Args:
        nouns: words or short names; an underscore stands for a space.
        adjectives: words.
        source: where they come from, for captions.
    """

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        nouns = _distinct(self.nouns)
        known = set(nouns)
        adjectives = tuple(word for word in _distinct(self.adjectives) if word not in known)
        if not nouns and not adjectives:
            raise ValueError("a vocabulary for negative labels needs at least one word")
        object.__setattr__(self, "nouns", nouns)
        object.__setattr__(self, "adjectives", adjectives)


@dataclass(frozen=True)
class NegativeLabels:
    """How negative labels are chosen from a vocabulary: the rule NegMine of the NegLabel paper.

    Args:
        vocabulary: the candidates.
        share: of the nouns, and of the adjectives, that become negative labels, in (0, 1]; 1 keeps every word. The
            paper keeps 15%.
        percentile: η in (0, 1]: a word is as close to the classes as to the class at this quantile of its cosines.
            0.95 in the paper; 1 is the closest class, which one homonym decides.
        noun_prompt: text of a noun; `{}` stands for the word.
        adjective_prompt: text of an adjective.
        drop_class_names: leave out words that are class names.

    Differs from the paper in nothing with the defaults. Its rule may keep a class name as a negative label ("yellow
    lady's slipper" is in the authors' published list, and is ImageNet class 986); `drop_class_names` prevents that.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    percentile: float = 0.95
    noun_prompt: str = "The nice {}."
    adjective_prompt: str = "This is a {} photo"
    drop_class_names: bool = False

    def __post_init__(self) -> None:
        for name in ("share", "percentile"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        for prompt in (self.noun_prompt, self.adjective_prompt):
            if "{}" not in prompt:
                raise ValueError(f"a prompt needs {{}} where the word goes, got {prompt!r}")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the words and the rule."""
        facts = [self.vocabulary.nouns, self.vocabulary.adjectives, self.share, self.percentile]
        facts += [self.noun_prompt, self.adjective_prompt, self.drop_class_names]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def prompts(self, class_names: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """The texts of the candidates, nouns and adjectives apart.

        Args:
            class_names: left out where `drop_class_names` says so, in any spelling of upper and lower case.
        """
        dropped = {_spelt(name).casefold() for name in class_names} if self.drop_class_names else set()
        nouns = [self.noun_prompt.format(w) for w in self.vocabulary.nouns if w.casefold() not in dropped]
        adjectives = [
            self.adjective_prompt.format(w) for w in self.vocabulary.adjectives if w.casefold() not in dropped
        ]
        return nouns, adjectives


def farthest(
    candidates: Float[Tensor, "W D"], classes: Float[Tensor, "C D"], share: float, percentile: float
) -> Int[Tensor, " M"]:
    """Which ⌊share · W⌋ candidates have the smallest `quantile_c(cos(w, c), percentile)`, the smallest first.

    The paper's Algorithm 1 says it with negative cosines as distances and their percentile 1 − η.

    Args:
        candidates: unit rows.
        classes: unit rows.
        share: in (0, 1].
        percentile: in (0, 1].
    """
    chunks = row_chunks(len(candidates), len(classes))
    closeness = [
        torch.quantile(candidates[start : start + chunks.step] @ classes.T, percentile, dim=1) for start in chunks
    ]
    order = torch.cat(closeness).argsort(stable=True) if closeness else torch.empty(0, dtype=torch.int64)
    return order[: int(len(candidates) * share)]


def wordnet_vocabulary(exclude: Iterable[str] = (), *, first_names: bool = False) -> Vocabulary:
    """Nouns and adjectives of WordNet, through the package nltk and its corpus "wordnet".

    All names of all synsets are 119,188 nouns and 18,503 words that are adjectives only in WordNet 3.1, so that
    NegLabel's 15% are 20,653 negative labels. The first name of each synset alone makes 67,951 nouns and 12,300
    adjectives, and 12,037 negative labels, nearer to the paper's 10,000: of 68 nouns sampled from the authors'
    published list, every one is the first name of some synset (in lower case, as CLIP's tokeniser has all texts).

    Args:
        exclude: lexicographer files to leave out, such as "noun.person". The authors' code can leave out files; its
            published setting leaves out none.
        first_names: only the first name of each synset, the commonest.

    Raises:
        ValueError: the package or the corpus is missing; says how to get it. Nothing is downloaded here.
    """
    try:
        from nltk.corpus import wordnet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"WordNet needs a package; pip install nltk, {_REMEDY}") from None
    left_out = set(exclude)
    names = slice(1 if first_names else None)

    def words(part: str) -> tuple[str, ...]:
        synsets: Iterable[Any] = wordnet.all_synsets(part)
        return tuple(name for s in synsets if s.lexname() not in left_out for name in s.lemma_names()[names])

    try:
        return Vocabulary(words("n"), words("a"), "WordNet, first names" if first_names else "WordNet")
    except LookupError:
        raise ValueError(
            f"nltk has no WordNet corpus yet; run 'python -m nltk.downloader wordnet', {_REMEDY}"
        ) from None
    except OSError as error:
        raise ValueError(f"nltk's WordNet corpus lacks a file ({error}); get it again, {_REMEDY}") from None


def read_vocabulary(path: Path, *, first_names: bool = False) -> Vocabulary:
    """A vocabulary from disk.

    Args:
        path: a text file with one noun a line; a folder of such files named `noun.*` and `adj.*`, as the authors of
            NegLabel published WordNet; or WordNet's own database folder `dict`, with `data.noun` and `data.adj`.
        first_names: of a database, only the first name of each synset; see `wordnet_vocabulary`.

    Raises:
        ValueError: nothing is there, no such file is in the folder, or a database cannot be read.
    """
    if path.is_file():
        return Vocabulary(_lines(path), source=path.name)
    if not path.is_dir():
        raise ValueError(f"there is no word list at {path}")
    if (path / "data.noun").is_file():
        parts = [path / name for name in ("data.noun", "data.adj")]
        nouns, adjectives = (tuple(_synset_names(part, first_names)) if part.is_file() else () for part in parts)
        return Vocabulary(nouns, adjectives, f"{path.name} (WordNet{', first names' if first_names else ''})")
    nouns, adjectives = (
        tuple(word for file in sorted(path.glob(pattern)) for word in _lines(file)) for pattern in ("noun.*", "adj.*")
    )
    if not nouns and not adjectives:
        raise ValueError(
            f"{path} has no words in files named noun.* or adj.*, one word a line, nor WordNet's data.noun"
        )
    return Vocabulary(nouns, adjectives, path.name)


def _synset_names(file: Path, first_names: bool) -> Iterator[str]:
    """The words of a file of WordNet's database, synset by synset; lines with two spaces first are its licence.

    A line is `offset file type count(hexadecimal) word id word id …`; adjectives may end in a marker such as `(p)`.
    """
    for number, line in enumerate(_lines(file), 1):
        if line.startswith("  ") or not line:
            continue
        fields = line.split(" ")
        try:
            count = 1 if first_names else int(fields[3], 16)
            words = [fields[4 + 2 * place] for place in range(count)]
        except (IndexError, ValueError):
            raise ValueError(f"{file}, line {number}: this is no line of WordNet's database") from None
        yield from (_MARKER.sub("", word) for word in words)


def _lines(file: Path) -> tuple[str, ...]:
    return tuple(file.read_text(encoding="utf-8").splitlines())


def _distinct(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word in dict.fromkeys(map(_spelt, words)) if word)


def _spelt(word: str) -> str:
    return word.replace("_", " ").strip()
