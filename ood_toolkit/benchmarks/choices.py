"""What the user asked for."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user asked for, as the command line has it; see `ood-bench --help` for each."""

    suite: str = ""
    detectors: str = "all"
    tune_on: str = ""
    calibrators: str = "all"
    ensemble: str = "all"
    models: Sequence[str] = ()
    members: Sequence[str] = ()
    checkpoints: Sequence[Path] = ()
    snapshots: Path | None = None
    pretrained: bool = True
    transform: str = "own"
    head: str = ""
    classes: int | None = None
    prompts: str = ""
    class_names: Path | None = None
    outlier_prompts: Sequence[str] = ()
    negatives: str = ""
    negatives_share: float | None = None
    second_opinion: str = ""
    folders: Mapping[str, Path] = field(default_factory=dict)
    ood: Sequence[str] = ()
    data_root: Path | None = None
    protocol: str = "official"
    learn: str = "auto"
    fit_per_class: int = 50
    fit_fraction: float = 0.3
    calibrate_fraction: float = 0.2
    absent_classes: str = "error"
    device: str = "auto"
    amp: str = "auto"
    dtype: str = "float32"
    channels_last: str = "auto"
    compile: bool = False
    batch_size: int = 0
    workers: int = -1
    seed: int = 0
    resamples: int = 1000
    out: Path = Path("runs/run")
    cache: Path = Path("~/.cache/ood-toolkit")
    strict: bool = False


DEFAULTS = Choices()
"""What runs where nothing is said."""


def default_cache() -> Path:
    """Where outputs are stored: $OOD_CACHE, or the user's cache folder."""
    return Path(os.environ.get("OOD_CACHE") or DEFAULTS.cache).expanduser()
