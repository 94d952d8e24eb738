import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as tv

from ood_toolkit.models import load_classifier
from ood_toolkit.models.transforms import IMAGENET_MEAN, IMAGENET_STD, ImageTransform, squash_transform


def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 140, 3), dtype=np.uint8))


@pytest.mark.parametrize(("size", "mean", "std"), [(224, IMAGENET_MEAN, IMAGENET_STD), (384, (0.5,) * 3, (0.5,) * 3)])
def test_squashed_pixels_are_those_of_the_vim_authors(size: int, mean: tuple[float, ...], std: tuple[float, ...]):
    recipe = tv.Compose([tv.Resize((size, size)), tv.ToTensor(), tv.Normalize(mean, std)])
    own = ImageTransform(lambda image: image, "own", mean, std, (3, size, size))
    squash = squash_transform(own)
    pixels = squash(photograph()).float() / 255
    ours = (pixels - torch.tensor(squash.mean)[:, None, None]) / torch.tensor(squash.std)[:, None, None]
    torch.testing.assert_close(ours, recipe(photograph()))
    assert squash.description.startswith(f"squash to {size}x{size} bilinear, mean")


def test_a_model_can_be_loaded_with_squashed_images():
    own = load_classifier("timm:resnet10t", pretrained=False)
    squashed = load_classifier("timm:resnet10t", pretrained=False, transform="squash")
    assert squashed.transform(photograph()).shape == own.transform(photograph()).shape
    assert (squashed.transform.mean, squashed.transform.std) == (own.transform.mean, own.transform.std)
    assert squashed.preprocessing.startswith("squash to 176x176 bilinear")
    wide = Image.new("RGB", (300, 100), "blue")
    wide.paste("red", (0, 0, 30, 100))
    edges = [loaded.transform(wide)[:, 80, 4].tolist() for loaded in (own, squashed)]
    assert edges == [[0, 0, 255], [255, 0, 0]]  # cropping loses the red edge, squashing does not


def test_images_cannot_be_squashed_to_an_unknown_size():
    with pytest.raises(ValueError, match="does not say its size"):
        squash_transform(ImageTransform(lambda image: image, "mine", (0.0,), (1.0,)))
