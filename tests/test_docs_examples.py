"""What the documentation shows works: links lead somewhere, code runs, command lines parse."""

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ood_toolkit.benchmarks.methods import parse_detectors
from ood_toolkit.registry import build_calibrator, split_specs
from ood_toolkit.scorefile import Column, ScoreFile
from ood_toolkit.testing import SyntheticClassifier, synthetic_images

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Names that headings get: lower case, spaces become hyphens, punctuation goes."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=name_of)
def test_every_page_is_in_the_index(page: Path):
    assert page.name == "index.md" or f"({page.name})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def surroundings(folder: Path) -> dict[str, Any]:
    """What the examples take for granted: a model, its images, and the score file of a run in `runs/digits`."""
    run = folder / "runs" / "digits"
    run.mkdir(parents=True)
    scores = ScoreFile(ids={"digits-test": ["0", "1", "2"], "digits-o": ["3", "4", "5"]})
    scores.add(Column("score", "digits-cnn:0", "energy", "digits-test"), torch.tensor([0.1, 0.2, 0.3]))
    scores.add(Column("score", "digits-cnn:0", "energy", "digits-o"), torch.tensor([0.25, 0.5, 0.6]))
    scores.save(run / "scores.safetensors")
    images = synthetic_images("id")[0]
    return {"model": SyntheticClassifier().model, "images": images, "held_out_images": images}


CODE = [
    pytest.param(code, id=f"{name_of(page)}:{number}")
    for page in PAGES
    for number, (language, code) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
    if language == "python"
]


@pytest.mark.parametrize("code", CODE)
def test_python_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("example")  # so that the classes of an example can be pickled
    vars(module).update(surroundings(tmp_path))
    monkeypatch.setitem(sys.modules, "example", module)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), vars(module))


def command_lines() -> list[Any]:
    """Every `ood-bench …` in fences and in code spans, and spans that only give its options a value."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fenced = [body.replace("\\\n", " ") for language, body in FENCE.findall(text) if language == "sh"]
        spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
        lines = [line.partition("#")[0].strip() for body in fenced for line in body.splitlines()]
        lines += [f"ood-bench {span}" if re.match(r"--\w+ ", span) else span for span in spans]
        found |= {line: name_of(page) for line in lines if re.match(r"ood-bench\b", line)}
    return [pytest.param(line, id=f"{page}: {line}"[:80]) for line, page in found.items()]


def parsed(line: str) -> dict[str, Any]:
    """The options of a command line as typer reads them; nothing runs."""
    import typer.main

    from ood_toolkit.cli import app

    words = [word for word in shlex.split(line)[1:] if word not in ("…", "--help")]
    group = typer.main.get_command(app)
    context = group.make_context("ood-bench", list(words))
    rest = [*getattr(context, "_protected_args", ()), *context.args]  # the subcommand's name, and what follows it
    if rest:
        _, command, arguments = group.resolve_command(context, rest)  # pyright: ignore[reportAttributeAccessIssue]
        assert command is not None, f"no subcommand {rest[0]}"
        return dict(command.make_context(rest[0], arguments, parent=context).params)
    return dict(context.params)


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse_and_name_methods_that_exist(line: str):
    options = parsed(line)
    for spec in split_specs(options.get("detectors") or ""):
        assert "my_pkg" in spec or spec.startswith("-") or parse_detectors(spec)
    for spec in split_specs(options.get("calibrators") or ""):
        assert spec == "all" or build_calibrator(spec)


def test_a_wrong_option_or_subcommand_would_be_noticed():
    with pytest.raises(Exception, match="No such option"):
        parsed("ood-bench --detektors all")
    with pytest.raises(Exception, match="No such command"):
        parsed("ood-bench sight energy")
    assert parsed("ood-bench cite energy vim") == {"names": ["energy", "vim"]}


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:^|`)make (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= targets, page
