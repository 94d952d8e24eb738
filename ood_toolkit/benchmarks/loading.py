"""The models of a run, from the user's choices."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.models import LoadedClassifier, load_classifier

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_models(
    choices: Choices, suite: str, device: str, taps: Sequence[str]
) -> tuple[list[LoadedClassifier], list[LoadedClassifier]]:
    """The models that are scored, and those that only join the ensemble.

    Raises:
        ValueError: a model cannot be loaded, or none was named.
    """
    if not choices.models:
        raise ValueError(f"the suite {suite!r} needs --model, e.g. --model timm:resnet50 or demo:efficientnet_lite0")
    specs = (*choices.models, *choices.members)
    if choices.checkpoints and len(choices.checkpoints) != len(specs):
        raise ValueError(f"{len(specs)} models need as many --checkpoint, got {len(choices.checkpoints)}")
    amp = _amp(choices.amp, device)
    models = [
        load_classifier(
            spec,
            pretrained=choices.pretrained,
            checkpoint=choices.checkpoints[number] if choices.checkpoints else None,
            device=device,
            transform=choices.transform,  # pyright: ignore[reportArgumentType]  # checked there
            head=choices.head or None,
            classes=choices.classes,
            taps=taps if number < len(choices.models) else (),
            amp=amp,
        )
        for number, spec in enumerate(specs)
    ]
    members = models[len(choices.models) :] + _snapshots(choices, device, amp)
    return models[: len(choices.models)], members


def _snapshots(choices: Choices, device: str, amp: torch.dtype | None) -> list[LoadedClassifier]:
    """One member for every checkpoint in the snapshot folder, all of the first model's architecture."""
    folder = choices.snapshots
    if folder is None:
        return []
    suffixes = (".safetensors", ".pt", ".pth", ".bin")
    files = sorted(file for file in folder.glob("*") if file.suffix in suffixes) if folder.is_dir() else []
    if not files:
        raise ValueError(f"no checkpoint ({', '.join(suffixes)}) lies in the snapshot folder {str(folder)!r}")
    loaded = [
        load_classifier(
            choices.models[0],
            checkpoint=file,
            device=device,
            transform=choices.transform,  # pyright: ignore[reportArgumentType]  # checked there
            head=choices.head or None,
            classes=choices.classes,
            amp=amp,
        )
        for file in files
    ]
    return [replace(one, spec=f"{one.spec}@{file.stem}") for one, file in zip(loaded, files, strict=True)]


def usable_device(text: str) -> str:
    """The device that is meant.

    Raises:
        ValueError: it cannot be used here.
    """
    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {text!r} cannot be used: {str(error).splitlines()[0]}") from None
    return text


def _amp(text: str, device: str) -> torch.dtype | None:
    if text == "off" or (text == "auto" and not device.startswith("cuda")):
        return None
    return torch.bfloat16 if text == "auto" else known_dtype(text, "--amp")


def known_dtype(text: str, option: str) -> torch.dtype:
    """The dtype of this name.

    Raises:
        ValueError: there is none; `option` says where the name was given.
    """
    if text not in DTYPES:
        raise ValueError(f"{option} must be one of {', '.join(DTYPES)}; got {text!r}")
    return DTYPES[text]
