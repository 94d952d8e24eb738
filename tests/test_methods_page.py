import re
from pathlib import Path

import pytest

from ood_toolkit import methods_page
from ood_toolkit.citations import bibliography
from ood_toolkit.registry import calibrator_classes, detector_classes, ensemble_classes

ROOT = Path(__file__).parents[1]
METHODS = [*detector_classes().values(), *calibrator_classes().values(), *ensemble_classes().values()]


def test_the_committed_page_is_the_generated_one():
    committed = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert committed == methods_page.page(), "run: python -m ood_toolkit.methods_page docs/methods.md"


def test_every_method_has_one_heading_and_one_link_to_it():
    page = methods_page.page()
    for kind in METHODS:
        assert page.count(f"\n#### {kind.name}\n") == 1, kind.name
        assert page.count(f"[{kind.name}](#{kind.name})") == 1, kind.name


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.name)
def test_a_method_says_its_equation_idea_arguments_and_paper(kind):
    assert kind.equation
    assert "\n" not in kind.equation
    assert "`" not in kind.equation
    idea, arguments, _ = methods_page.docstring(kind)
    assert len(re.split(r"[.:] ", " ".join(idea))) >= 2 or kind.name == "none", "an idea and when to use it"
    expected = {name for name, _ in methods_page.defaults(kind)}
    described = set(arguments)
    assert described <= expected, "an argument is described that does not exist"
    assert described == expected or not described
    if kind.name != "none":
        assert kind.cite in bibliography()


def test_every_entry_of_the_bibliography_belongs_to_a_method():
    cited = {kind.cite for kind in METHODS}
    named = " ".join(kind.paper for kind in METHODS)
    for key, entry in bibliography().items():
        number = re.search(r"eprint = \{(.*?)\}", entry)
        assert key in cited or (number is not None and number.group(1) in named), key


def test_an_arxiv_number_is_the_same_in_paper_and_bibliography():
    for kind in METHODS:
        if kind.name == "none":
            continue
        number = re.search(r"eprint = \{(.*?)\}", bibliography()[kind.cite])
        if number:
            assert number.group(1) in kind.paper, kind.name


def test_other_names_lead_to_methods():
    known = {kind.name for kind in METHODS}
    for _, here in methods_page.OTHER_NAMES:
        if "`" not in here:
            assert set(re.split(r"[,;] ", here)) <= known, here


def test_tables_have_as_many_cells_as_their_header():
    block: list[int] = []
    for line in [*methods_page.page().splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(set(block)) <= 1, line
            block = []


def test_arguments_keep_their_continuation_lines():
    block = "Args:\n    first: one\n        and two.\n    second: three."
    assert methods_page.described(block) == {"first": "one and two.", "second": "three."}
