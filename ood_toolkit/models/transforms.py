"""From a PIL image to a tensor of pixels; the normalisation is split off, because `Classifier` owns it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

TransformName = Literal["own", "official", "squash"]
"""own: the model's. official: Resize(256), CenterCrop(224), as in the ImageNet-A/O paper. squash: see there."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageTransform:
    """A picklable function from a PIL image of any mode to a tensor (3, H, W): uint8, or float in [0, 1].

    Args:
        steps: from an RGB image to the tensor, without the normalisation.
        description: the steps in words, for records and captions.
        mean: what the classifier subtracts from every channel afterwards, in pixel units, 0 to 1.
        std: what the classifier divides every channel by.
        input_size: (channels, height, width) of the tensor; (3, 0, 0) where the steps do not say.
    """

    steps: Callable[[Any], Any]
    description: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: tuple[int, int, int] = (3, 0, 0)

    def __call__(self, image: Any) -> Tensor:
        """The tensor of a PIL image."""
        return self.steps(image.convert("RGB"))


def official_transform(own: ImageTransform | None = None) -> ImageTransform:
    """The transform of the ImageNet-A/O paper, the same for every model: Resize(256) bilinear, CenterCrop(224).

    Args:
        own: of a model that was not trained with ImageNet's mean and std and keeps its own, such as CLIP; the
            description says so.

    Raises:
        ValueError: that model takes images of another size.
    """
    official = _resize_and_crop(256, 224, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    if own is None:
        return official
    if own.input_size != official.input_size:
        _, height, width = own.input_size
        raise ValueError(
            f"the official transform makes images of 224x224, this model takes {height}x{width}; use --transform own"
        )
    kept = _resize_and_crop(256, 224, "bilinear", own.mean, own.std)
    return replace(kept, description=f"{kept.description} (the model's own mean and std, not ImageNet's)")


def squash_transform(own: ImageTransform) -> ImageTransform:
    """Resizes to the model's own height and width at once, whatever the image's aspect ratio; nothing is cropped.

    The ViM, GEN and MOS papers evaluate so: 224×224 for most models, 384×384 for their ViT, 480×480 for BiT, always
    bilinear. The normalisation stays the model's.

    Raises:
        ValueError: the model's own transform does not say its size.
    """
    from torchvision import transforms

    _, height, width = own.input_size
    if not height or not width:
        raise ValueError("the model's own transform does not say its size, so images cannot be squashed to it")
    mode = transforms.InterpolationMode("bilinear")
    steps = transforms.Compose([transforms.Resize((height, width), interpolation=mode), transforms.PILToTensor()])
    description = f"squash to {height}x{width} bilinear, {_normalisation(own.mean, own.std)}"
    return ImageTransform(steps, description, own.mean, own.std, own.input_size)


def chosen_transform(name: TransformName, own: ImageTransform) -> ImageTransform:
    """The transform of that name, for a model with the transform `own`."""
    return {"own": lambda: own, "official": official_transform, "squash": lambda: squash_transform(own)}[name]()


def timm_transform(model: Any) -> ImageTransform:
    """The evaluation transform that timm's `resolve_model_data_config` gives for a model."""
    from timm.data import create_transform, resolve_model_data_config  # pyright: ignore[reportPrivateImportUsage]

    config = resolve_model_data_config(model)
    steps = create_transform(**config, is_training=False, normalize=False)
    size = config["input_size"]
    return ImageTransform(
        steps=steps,  # pyright: ignore[reportArgumentType]
        description=(
            f"{size[1]}x{size[2]} {config['interpolation']}, {config['crop_mode']} crop {config['crop_pct']:g}, "
            + _normalisation(config["mean"], config["std"])
        ),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        input_size=tuple(size),
    )


def torchvision_transform(preset: Any) -> ImageTransform:
    """The pixels of a torchvision preset (`weights.transforms()`), its normalisation split off."""
    return _resize_and_crop(
        preset.resize_size[0], preset.crop_size[0], preset.interpolation.value, preset.mean, preset.std
    )


def open_clip_transform(config: Mapping[str, Any]) -> ImageTransform:
    """The pixels of open_clip's evaluation transform, its normalisation split off.

    Args:
        config: `model.visual.preprocess_cfg`.
    """
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from torchvision.transforms import Compose

    wanted = PreprocessCfg(**config)
    whole: Any = image_transform_v2(wanted, is_train=False)
    *steps, _normalise = whole.transforms
    channels, height, width = wanted.input_size
    description = f"resize {wanted.resize_mode} to {height}x{width} {wanted.interpolation}, " + _normalisation(
        wanted.mean, wanted.std
    )
    return ImageTransform(Compose(steps), description, tuple(wanted.mean), tuple(wanted.std), (channels, height, width))


def processor_transform(processor: Any) -> ImageTransform:
    """The pixels of a transformers image processor, its normalisation split off."""
    size = getattr(processor, "crop_size", None) or processor.size
    side = size.get("height") or size.get("shortest_edge") or 0
    mean, std = ((0.0,), (1.0,))
    if getattr(processor, "do_normalize", False):
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    description = f"{type(processor).__name__} {side}x{size.get('width', side)}, {_normalisation(mean, std)}"
    return ImageTransform(_Processor(processor), description, mean, std, (3, side, size.get("width", side)))


@dataclass(frozen=True)
class _Processor:
    """Calls a transformers image processor for pixels in [0, 1]."""

    processor: Any

    def __call__(self, image: Any) -> Tensor:
        return self.processor(images=image, return_tensors="pt", do_normalize=False)["pixel_values"][0]


def without_normalisation(transform: Callable[[Any], Any]) -> ImageTransform:
    """A user's transform, with a `Normalize` at the end of its `Compose` split off.

    A transform that hides its normalisation stays whole: its tensors then go to the model as they are.
    """
    if isinstance(transform, ImageTransform):
        return transform
    steps = list(getattr(transform, "transforms", ()))
    last = steps[-1] if steps else None
    if type(last).__name__ != "Normalize":
        return ImageTransform(transform, _in_words(transform), (0.0,), (1.0,))
    mean, std = (tuple(float(v) for v in getattr(last, name)) for name in ("mean", "std"))
    compose: Any = type(transform)
    rest = compose(steps[:-1])
    return ImageTransform(rest, f"{_in_words(rest)}, {_normalisation(mean, std)}", mean, std)


def _resize_and_crop(resize: int, crop: int, interpolation: str, mean: Any, std: Any) -> ImageTransform:
    from torchvision import transforms

    mode = transforms.InterpolationMode(interpolation)
    steps = transforms.Compose(
        [transforms.Resize(resize, interpolation=mode), transforms.CenterCrop(crop), transforms.PILToTensor()]
    )
    description = f"resize {resize} {interpolation}, centre crop {crop}, {_normalisation(mean, std)}"
    return ImageTransform(steps, description, tuple(mean), tuple(std), (3, crop, crop))


def _normalisation(mean: Any, std: Any) -> str:
    shown = (" ".join(f"{v:g}" for v in (values if len(set(values)) > 1 else values[:1])) for values in (mean, std))
    return "mean {}, std {}".format(*shown)


def _in_words(transform: Callable[[Any], Any]) -> str:
    steps = getattr(transform, "transforms", None)
    return ", ".join(map(str, steps)) if steps else getattr(transform, "__name__", type(transform).__name__)
