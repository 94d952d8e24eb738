"""The run folder: records, per-image scores, tables and the facts of the run, written as they come."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ood_toolkit.records import Record, write_records
from ood_toolkit.scorefile import ScoreFile
from ood_toolkit.store import replace_text

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "netcal", "open_clip_torch")
_SAVE_EVERY = 10.0
"""Seconds between two rewrites of the score file, which may be large."""


class RunFolder:
    """What a run leaves behind, in one folder.

    Args:
        path: made if missing.
        facts: what is known at the start; becomes part of run.json.

    Raises:
        ValueError: the folder cannot be made or written to.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        require_writable(path, "--out")
        for stale in ("records.jsonl", "scores.safetensors", "robustness.json", "table.md", "table.csv", "table.tex"):
            # an earlier run's numbers must not stand beside this run's facts
            (path / stale).unlink(missing_ok=True)
        self.records: list[Record] = []
        self.scores = ScoreFile()
        self.facts: dict[str, Any] = {**environment(), **facts, "stages": {}, "left_out": {}, "unreadable": {}}
        self._saved = 0.0
        self.save_facts()

    def add(self, records: list[Record]) -> None:
        """Appends records and writes all of them."""
        self.records += records
        write_records(self.path / "records.jsonl", self.records)
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save_scores()

    def save_scores(self) -> None:
        """Writes the score file."""
        self.scores.save(self.path / "scores.safetensors")
        self._saved = time.monotonic()

    def save_facts(self) -> None:
        """Writes run.json."""
        replace_text(self.path / "run.json", json.dumps(self.facts, indent=2, ensure_ascii=False, default=str) + "\n")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to run.json, also when it fails; then its name goes with the error."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"in the stage {name!r}")
            raise
        finally:
            stages = self.facts["stages"]
            stages[name] = round(stages.get(name, 0.0) + time.perf_counter() - started, 3)
            self.save_facts()

    def finish(self, tables: Mapping[str, str]) -> None:
        """Writes the tables by file name, the scores and the last facts."""
        self.save_scores()
        for name, text in tables.items():
            replace_text(self.path / name, text)
        self.facts["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.save_facts()


def require_writable(path: Path, option: str) -> None:
    """Makes the folder and writes a probe into it, before the long part starts.

    Raises:
        ValueError: says what the system said.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot write into the folder {str(path)!r}: {reason}; choose another with {option}"
        ) from None


def environment() -> dict[str, Any]:
    """Versions, hardware and time: what a reader needs to judge whether a number should repeat."""
    import torch

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "ood_toolkit": metadata.version("ood-toolkit"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cuda": cuda,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
