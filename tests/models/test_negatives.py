import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from ood_toolkit.models.negatives import NegativeLabels, Vocabulary, farthest, read_vocabulary, wordnet_vocabulary


@pytest.mark.parametrize(("share", "percentile"), [(0.15, 0.95), (0.5, 1.0), (1.0, 0.3)])
def test_the_farthest_words_are_those_of_numpys_percentile(share, percentile):
    candidates, classes = torch.randn(203, 8).double(), torch.randn(37, 8).double()
    distances = [np.percentile(-(classes @ word).numpy(), 100 * (1 - percentile)) for word in candidates]
    expected = sorted(range(203), key=lambda index: -distances[index])[: int(203 * share)]
    assert farthest(candidates, classes, share, percentile).tolist() == expected


def test_a_homonym_of_one_class_does_not_decide_below_the_maximum():
    classes = torch.nn.functional.one_hot(torch.arange(40)).float()
    close_to_one, close_to_all = classes[0], torch.full((40,), 40**-0.5)
    words = torch.stack([close_to_one, close_to_all])
    assert farthest(words, classes, 0.5, 0.95).tolist() == [0]
    assert farthest(words, classes, 0.5, 1.0).tolist() == [1]


def test_a_word_counts_once_and_as_a_noun_first():
    vocabulary = Vocabulary(("sea_lion", "orange", "sea lion", " ", "orange"), ("red", "orange", "red"))
    assert vocabulary.nouns == ("sea lion", "orange")
    assert vocabulary.adjectives == ("red",)
    with pytest.raises(ValueError, match="at least one word"):
        Vocabulary(("", " "))


def test_prompts_follow_the_paper_and_can_leave_out_class_names():
    vocabulary = Vocabulary(("Sea_lion", "orange"), ("red",))
    assert NegativeLabels(vocabulary).prompts(("sea lion",)) == (
        ["The nice Sea lion.", "The nice orange."],
        ["This is a red photo"],
    )
    without = NegativeLabels(vocabulary, noun_prompt="{}", drop_class_names=True)
    assert without.prompts(("sea_lion",)) == (["orange"], ["This is a red photo"])


@pytest.mark.parametrize(
    "settings", [{"share": 0.0}, {"share": 15.0}, {"percentile": 95.0}, {"noun_prompt": "a photo"}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]|needs {}"):
        NegativeLabels(Vocabulary(("cat",)), **settings)


def test_word_lists_are_read_as_a_file_or_as_the_authors_folder(tmp_path):
    (tmp_path / "noun.food.txt").write_text("apple_pie\nsoup\n")
    (tmp_path / "noun.animal.txt").write_text("cat\r\nsoup\r\n")
    (tmp_path / "adj.all.txt").write_text("red\n")
    (tmp_path / "verb.body.txt").write_text("yawn\n")
    assert read_vocabulary(tmp_path) == Vocabulary(("cat", "soup", "apple pie"), ("red",))
    assert read_vocabulary(tmp_path / "noun.food.txt") == Vocabulary(("apple pie", "soup"))
    with pytest.raises(ValueError, match="there is no word list at"):
        read_vocabulary(tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no words in files named noun\.\* or adj\.\*"):
        read_vocabulary(tmp_path / "empty")


_NOUNS = """  1 This software and database is being provided to you, the LICENSEE, by Princeton
02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 023 @ 02083346 n 0000 | a member of the genus Canis
02121620 05 n 02 cat 0 true_cat 0 000 | feline mammal
11575425 20 n 10 {many} 000 | a synset of sixteen names
"""
_ADJECTIVES = """00381097 00 s 02 red 0 ruddy(p) 0 000 | of a colour
00432572 00 a 01 cat(ip) 0 000 | no adjective of its own
01234567 00 a 01 galore(ip) 0 000 | in great numbers
"""


def test_wordnets_own_database_is_read_synset_by_synset(tmp_path):
    many = " ".join(f"grass_{number} 0" for number in range(16))  # the count is hexadecimal: 10 is sixteen
    (tmp_path / "data.noun").write_text(_NOUNS.format(many=many))
    (tmp_path / "data.adj").write_text(_ADJECTIVES)
    nouns = ("dog", "domestic dog", "Canis familiaris", "cat", "true cat", *(f"grass {n}" for n in range(16)))
    assert read_vocabulary(tmp_path) == Vocabulary(nouns, ("red", "ruddy", "galore"))
    assert read_vocabulary(tmp_path, first_names=True) == Vocabulary(("dog", "cat", "grass 0"), ("red", "galore"))
    (tmp_path / "data.adj").write_text("red\n")
    with pytest.raises(ValueError, match=r"data\.adj, line 1: this is no line of WordNet's database"):
        read_vocabulary(tmp_path)


class _Synset:
    def __init__(self, lexname: str, *names: str) -> None:
        self._lexname, self._names = lexname, list(names)

    def lexname(self) -> str:
        return self._lexname

    def lemma_names(self) -> list[str]:
        return self._names


def _nltk(monkeypatch: pytest.MonkeyPatch, all_synsets: Any) -> None:
    corpus = types.ModuleType("nltk.corpus")
    corpus.wordnet = types.SimpleNamespace(all_synsets=all_synsets)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "nltk", types.ModuleType("nltk"))
    monkeypatch.setitem(sys.modules, "nltk.corpus", corpus)


def test_wordnets_nouns_and_adjectives_come_through_nltk(monkeypatch):
    words = {
        "n": [_Synset("noun.animal", "cat", "true_cat"), _Synset("noun.person", "teacher")],
        "a": [_Synset("adj.all", "red", "reddish")],
    }
    _nltk(monkeypatch, words.__getitem__)
    assert wordnet_vocabulary() == Vocabulary(("cat", "true cat", "teacher"), ("red", "reddish"))
    assert wordnet_vocabulary(exclude=("noun.person",)).nouns == ("cat", "true cat")
    assert wordnet_vocabulary(first_names=True) == Vocabulary(("cat", "teacher"), ("red",))


def test_missing_wordnet_says_what_to_run(monkeypatch):
    def missing(_part: str) -> Any:
        raise LookupError("\n****\n  Resource wordnet not found.\n****")

    _nltk(monkeypatch, missing)
    with pytest.raises(ValueError, match=r"python -m nltk\.downloader wordnet") as caught:
        wordnet_vocabulary()
    assert "\n" not in str(caught.value)

    def damaged(_part: str) -> Any:
        raise OSError("No such file or directory: 'lexnames'")

    _nltk(monkeypatch, damaged)
    with pytest.raises(ValueError, match=r"lacks a file .*'lexnames'"):
        wordnet_vocabulary()
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.corpus", None)
    with pytest.raises(ValueError, match="pip install nltk, or give a word list"):
        wordnet_vocabulary()
