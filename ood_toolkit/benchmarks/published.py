"""Numbers that others published, to hold measured ones against."""

import csv
import math
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ood_toolkit.registry import parse

SetName = Literal["imagenet-a", "imagenet-a-clean"]

OPENOOD_NAMES = MappingProxyType(
    {
        "openmax": "OpenMax",
        "msp": "MSP",
        "tempscale": "TempScale",
        "odin": "ODIN",
        "i_odin": "i-ODIN",
        "mahalanobis": "MDS",
        "rmds": "RMDS",
        "gram": "Gram",
        "energy": "EBO",
        "gradnorm": "GradNorm",
        "react": "ReAct",
        "maxlogit": "MLS",
        "kl_matching": "KLM",
        "vim": "VIM",
        "knn": "KNN",
        "dice": "DICE",
        "rankfeat": "RankFeat",
        "ash_b": "ASH",
        "she": "SHE",
        "gen": "GEN",
        "nnguide": "NNGuide",
        "scale": "SCALE",
        "nac": "NAC",
        "fdbd": "fDBD",
        "weiper": "WeiPer+KLD",
        "adascale_a": "AdaSCALE-A",
        "adascale_l": "AdaSCALE-L",
        "nci": "NCI",
        "mahalanobis_pp": "MDS++",
        "rmds_pp": "RMDS++",
    }
)
"""Our detector's name → OpenOOD's."""

OPENOOD_MODELS = MappingProxyType(
    {
        "torchvision:resnet50": "ResNet-50",
        "timm:resnet50.tv_in1k": "ResNet-50",
        "torchvision:vit_b_16": "ViT-B/16",
        "torchvision:swin_t": "Swin-T",
    }
)
"""Model spec → the leaderboard's column, for the same weights as far as known."""


def published_accuracy(model: str, dataset: SetName, *, image_size: int | None = None, top: int = 1) -> float | None:
    """What timm reports for a model on ImageNet-A, or on the validation images of its 200 classes; 0 to 1.

    Args:
        model: timm's name, or its spec "timm:NAME"; without a tag, the one that timm loads by default.
        dataset: "imagenet-a" or "imagenet-a-clean".
        image_size: pixels; the smallest that timm reports by default.
        top: 1 or 5.

    Returns:
        The accuracy under the 200-class mask and the model's own transform, or None where timm reports none (as for
        resnet50.tv_in1k on ImageNet-A, with which the set was filtered).

    >>> published_accuracy("tf_efficientnet_lite0.in1k", "imagenet-a")
    0.03053
    """
    rows = _timm().get(_tagged(model), {})
    if not rows:
        return None
    row = rows.get(image_size if image_size is not None else min(rows))
    column = {"imagenet-a": "a_top", "imagenet-a-clean": "clean_top"}[dataset] + str(top)
    return round(float(row[column]) / 100, 5) if row is not None and row[column] else None


def compare_accuracy(
    model: str, dataset: SetName, measured: float, images: int, *, image_size: int | None = None
) -> tuple[str, str]:
    """A line that holds the measured top-1 accuracy beside timm's, and a warning where they do not agree.

    Both are "" where timm reports nothing. The two were measured on the same images, so they should agree far better
    than two samples would; the warning comes where they differ by more than 1.96 binomial standard errors of one.

    Args:
        model: timm's name.
        dataset: "imagenet-a" or "imagenet-a-clean".
        measured: top-1 accuracy, 0 to 1.
        images: how many it was measured on.
        image_size: pixels.
    """
    expected = published_accuracy(model, dataset, image_size=image_size)
    if expected is None:
        return "", ""
    line = f"timm reports {expected:.2%} for {_tagged(model)} on {dataset}; measured {measured:.2%}"
    error = 1.96 * math.sqrt(expected * (1 - expected) / images)
    if abs(measured - expected) <= error:
        return line, ""
    return line, (
        f"{line}: they differ by {abs(measured - expected):.2%}, the sampling error is {error:.2%}; check weights, "
        "transform, labels and class mask"
    )


def published_openood(model: str, method: str, group: Literal["near-ood", "far-ood"]) -> float | None:
    """Mean AUROC on OpenOOD 1.5's ImageNet leaderboard, 0 to 1, or None where there is none.

    The leaderboard tunes hyper-parameters on OpenImage-O where its authors give a sweep, and fits on all of ImageNet
    train: a default detector here need not reach it.

    Args:
        model: spec as in `OPENOOD_MODELS`, or the leaderboard's own name (e.g. "ResNet-50").
        method: our detector's name or spec, or the leaderboard's name.
        group: which mean.

    >>> published_openood("torchvision:resnet50", "msp", "near-ood")
    0.7602
    """
    name = parse(method)[0] if method.isidentifier() or "(" in method else method
    row = _openood().get((OPENOOD_NAMES.get(name, name), OPENOOD_MODELS.get(model, model)))
    if row is None:
        return None
    return round(float(row["near_auroc" if group == "near-ood" else "far_auroc"]) / 100, 5)


def _tagged(model: str) -> str:
    """The full name at timm. Only a spec "timm:NAME" without a tag is looked up in timm itself."""
    name = model.removeprefix("timm:")
    if name == model or "." in name:
        return name
    import timm

    known = timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
    return f"{name}.{known.tag}" if known is not None and known.tag else name


def _read(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / "reference" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def _timm() -> dict[str, dict[int, dict[str, str]]]:
    models: dict[str, dict[int, dict[str, str]]] = {}
    for row in _read("timm_imagenet_a.csv"):
        models.setdefault(row["model"], {})[int(row["size"])] = row
    return models


@cache
def _openood() -> dict[tuple[str, str], dict[str, str]]:
    return {(row["method"], row["model"]): row for row in _read("openood_imagenet.csv")}
