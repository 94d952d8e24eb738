"""One seed, deterministic kernels, the same examples every time, no network; the golden values of other tools."""

import json
import os
import socket
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from ood_toolkit.outputs import UNKNOWN, Head, Outputs
from tests.command_line import Bench, Result

SHARED = Path(__file__).parents[1].parent / "shared"

# Examples are chosen by the test alone, and no clock fails them: a busy machine would, of properties that hold.
settings.register_profile(
    "the same every time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("the same every time")


@pytest.fixture(autouse=True, scope="session")
def few_threads_and_deterministic_kernels() -> None:
    # more threads than free cores spin; OMP_NUM_THREADS=1 is honoured
    torch.set_num_threads(min(2, torch.get_num_threads()))
    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def same_randomness_every_time() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  third-party code under test may draw from the global generator


@pytest.fixture(autouse=True)
def nothing_that_this_machine_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither folders of data, nor proxies, nor a wish for colours reach the code under test."""
    colours = ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "_TYPER_FORCE_DISABLE_TERMINAL")
    for name in list(os.environ):
        if name.startswith("OOD_") or name.lower().endswith("_proxy") or name in colours:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> Any:
        # local sockets stay open: distributed tests and worker processes talk over them
        if self.family == socket.AF_UNIX or str(address[0]) in ("127.0.0.1", "::1", "localhost"):
            return connect(self, address)
        raise RuntimeError(f"a test tried to reach {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@dataclass(frozen=True)
class Golden:
    """Numbers that other tools computed on fixed inputs: `golden.check(key, id_scores, ood_scores)`."""

    folder: Path

    @cached_property
    def entries(self) -> dict[str, Any]:
        return json.loads((self.folder / "manifest_open.json").read_text())["entries"]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return _tensors(self.folder / "inputs.npz")

    @cached_property
    def images(self) -> dict[str, Tensor]:
        return _tensors(self.folder / "inputs_images.npz")

    @cached_property
    def aux(self) -> dict[str, Tensor]:
        return _tensors(self.folder / "aux_open.npz")

    @cached_property
    def _scores(self) -> dict[str, Tensor]:
        return _tensors(self.folder / "scores_open.npz")

    def scores(self, key: str, *, higher_is_ood: bool = True) -> tuple[Tensor, Tensor]:
        """The peer's scores of (ID, OOD) rows, float64, its sign turned so that higher = OOD."""
        sign = 1 if (self.entries[key]["convention"] == "higher=OOD") == higher_is_ood else -1
        return sign * self._scores[f"{key}/id"], sign * self._scores[f"{key}/ood"]

    def outputs(self, split: str, dtype: torch.dtype = torch.float32) -> Outputs:
        """`split` is "fit", "id" or "ood"."""
        features = self.inputs[f"{split}_features"]
        labels = self.inputs[f"{split}_labels"] if split != "ood" else torch.full((len(features),), UNKNOWN)
        head = Head(self.inputs["W"], self.inputs["b"])
        return Outputs(logits=self.inputs[f"{split}_logits"], features=features, labels=labels, head=head).to(dtype)

    def clip_outputs(self) -> tuple[Outputs, Outputs]:
        """(ID, OOD) image embeddings under a zero-shot head of scale 100, with cosines to 500 negative labels."""
        head = Head(100 * self.inputs["clip_text"], torch.zeros(len(self.inputs["clip_text"])))
        images, labels = self.inputs["clip_image"], self.inputs["clip_image_labels"]
        taps = {"negative_cosines": images @ self.inputs["clip_neg_text"].T}
        both = Outputs(logits=head(images), features=images, labels=labels, head=head, taps=taps)
        known = self.inputs["clip_image_is_id"].bool()
        return both.rows(known), both.rows(~known)

    def check(
        self, key: str, id_scores: Tensor, ood_scores: Tensor, *, offset: float = 0.0, scale: float = 1.0
    ) -> None:
        """`scale × ours + offset` lies within the tolerance of the peer's scores; higher = OOD on both sides."""
        tolerance = self.entries[key]["tol_abs"]
        for part, ours, theirs in zip(("id", "ood"), (id_scores, ood_scores), self.scores(key), strict=True):
            gap = (scale * ours.double() + offset - theirs).abs().max()
            assert gap <= tolerance, f"{key}/{part}: off by {gap:.3g}, tolerance {tolerance:.3g}"


def _tensors(path: Path) -> dict[str, Tensor]:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files if arrays[name].dtype.kind in "fiub"}


@pytest.fixture(scope="session")
def golden() -> Golden:
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip("the golden values are not beside this checkout (../shared/golden)")
    return Golden(folder)


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Bench:
    """Runs `ood-bench` in tmp_path, its cache and run folder there too, and the test's own factories importable."""
    from ood_toolkit import cli

    monkeypatch.syspath_prepend(str(request.path.parent))
    monkeypatch.setenv("OOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OOD_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        words = list(map(str, arguments))
        if "--out" not in words and words[:1] and words[0].startswith("-"):
            words += ["--out", str(tmp_path / "run")]
        monkeypatch.setattr(sys, "argv", ["ood-bench", *words])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call
