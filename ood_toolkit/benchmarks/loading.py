"""The models of a run, from the user's choices."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ood_toolkit.benchmarks.apart import named_apart, require_apart
from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.masking import tap_under, taps_under
from ood_toolkit.benchmarks.methods import MEMBER_TAP, Method
from ood_toolkit.benchmarks.suite import ClassMask
from ood_toolkit.benchmarks.zero_shot import clip_prompts, is_zero_shot
from ood_toolkit.models import LoadedClassifier, load_classifier
from ood_toolkit.models.clip import ClipPrompts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_models(
    choices: Choices, suite: str, device: str, taps: Sequence[str], masks: Sequence[ClassMask | None] = (None,)
) -> tuple[list[LoadedClassifier], list[LoadedClassifier]]:
    """The models that are scored, and those that only join the ensemble.

    Args:
        choices: the user's.
        suite: its name, for errors.
        device: where the models go.
        taps: what the detectors read.
        masks: the class masks under which they read it; None is no mask.

    Raises:
        ValueError: a model cannot be loaded, or none was named.
    """
    if not choices.models:
        raise ValueError(f"the suite {suite!r} needs --model, e.g. --model timm:resnet50 or demo:efficientnet_lite0")
    specs = (*choices.models, *choices.members)
    if choices.checkpoints and len(choices.checkpoints) != len(specs):
        raise ValueError(f"{len(specs)} models need as many --checkpoint, got {len(choices.checkpoints)}")
    require_apart(specs, choices.checkpoints)
    amp = _amp(choices.amp, device)
    prompts = clip_prompts(choices, masks) if any(map(is_zero_shot, specs)) else None
    models = [
        load_classifier(
            spec,
            pretrained=choices.pretrained,
            checkpoint=choices.checkpoints[number] if choices.checkpoints else None,
            device=device,
            transform=choices.transform,  # pyright: ignore[reportArgumentType]  # checked there
            head=choices.head or None,
            classes=choices.classes,
            taps=taps_under(taps, masks) if number < len(choices.models) else (),
            amp=amp,
            clip=prompts if is_zero_shot(spec) else None,
        )
        for number, spec in enumerate(specs)
    ]
    models = named_apart([*models, *_snapshots(choices, device, amp, prompts)], choices.checkpoints)
    for model in models:
        if _channels_last(choices.channels_last, model):
            model.classifier.model.to(memory_format=torch.channels_last)
        model.classifier.compiled = choices.compile
    return models[: len(choices.models)], models[len(choices.models) :]


def load_second_opinion(
    choices: Choices, suite: str, models: Sequence[LoadedClassifier], device: str
) -> LoadedClassifier | None:
    """The zero-shot model that gives a second opinion on the images of the others, where one was asked for.

    Raises:
        ValueError: it would not know the classes of the others, or is one of them.
    """
    spec = choices.second_opinion
    if not spec:
        return None
    prompts = clip_prompts(replace(choices, outlier_prompts=(), negatives="", negatives_share=None))
    others = [model for model in models if model.spec != spec]
    if not others:
        raise ValueError(f"--second-opinion {spec} is the model itself; write mcm among the --detectors instead")
    for model in others:
        classes = model.classifier.head.weight.shape[0]
        if classes != len(prompts.class_names):
            raise ValueError(
                f"--second-opinion must know the {classes} classes of {model.spec} by their names, but has "
                f"{len(prompts.class_names)} names; give --class-names FILE with one a line, in the model's order"
            )
        if suite == "folders" and not choices.class_names and model.class_names is None:
            raise ValueError(
                f"the {classes} classes of {model.spec} may not be ImageNet's, so --second-opinion needs them by name; "
                "give --class-names FILE with one a line, in the model's order"
            )
    return load_classifier(
        spec,
        pretrained=choices.pretrained,
        device=device,
        transform=choices.transform,  # pyright: ignore[reportArgumentType]  # checked there
        amp=_amp(choices.amp, device),
        clip=prompts,
    )


def require_taps(
    methods: Sequence[Method], models: Sequence[LoadedClassifier], masks: Sequence[ClassMask | None]
) -> None:
    """Raises ValueError where a detector that the user named reads what none of the models has, with what to do.

    What shows only in the first pass, and what an ensemble gives, is asked for later.
    """
    for method in methods:
        for tap in method.detector.taps if method.chosen else ():
            gaps = [model.classifier.tap_gaps.get(tap_under(tap, mask), "") for model in models for mask in masks]
            if tap != MEMBER_TAP and all(gaps):
                raise ValueError(f"{method.spec} needs the tap {tap} of {models[0].spec}: {gaps[0]}")


def _snapshots(
    choices: Choices, device: str, amp: torch.dtype | None, prompts: ClipPrompts | None
) -> list[LoadedClassifier]:
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
            clip=prompts if is_zero_shot(choices.models[0]) else None,
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


_LAID_OUT = ("timm", "torchvision", "demo")
"""Sources of convolutional models that are known to bear another memory layout."""


def _channels_last(text: str, model: LoadedClassifier) -> bool:
    """Whether the weights of convolutions are laid out channel by channel, which decides how maps are.

    "auto" takes what is faster: on CPUs, and on GPUs in half precision. It leaves a user's own module as it is.
    """
    if text not in ("auto", "on", "off"):
        raise ValueError(f"--channels-last must be auto, on or off; got {text!r}")
    faster = model.classifier.device.type == "cpu" or model.classifier.amp is not None
    return text == "on" or (text == "auto" and faster and model.spec.partition(":")[0] in _LAID_OUT)


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
