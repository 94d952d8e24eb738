import sys
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ood_toolkit.datasets import ArrayImages
from ood_toolkit.datasets.corrupted import CORRUPTIONS, CorruptedImages


def images() -> ArrayImages:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 61, 40, 3), dtype=np.uint8)
    return ArrayImages(pixels, name="a", labels=[3, 5])


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package that adds noise of its global generator, and leaves the range of pixels."""
    asked: list[dict[str, Any]] = []

    def corrupt(pixels: np.ndarray, **options: Any) -> np.ndarray:
        asked.append({"pixels": pixels, **options})
        return pixels + np.random.normal(scale=200.0, size=pixels.shape)  # noqa: NPY002

    package = types.ModuleType("corrupt_tta")
    package.corrupt, package.__version__ = corrupt, "0"  # pyright: ignore
    monkeypatch.setitem(sys.modules, "corrupt_tta", package)
    return asked


def test_an_image_is_cropped_as_in_the_published_set_then_corrupted(stub: list[dict[str, Any]]):
    torchvision = pytest.importorskip("torchvision.transforms")
    corrupted = CorruptedImages(images(), "fog", 3)
    assert corrupted.open(1).size == (224, 224)
    (asked,) = stub
    assert (asked["severity"], asked["corruption_name"]) == (3, "fog")
    steps = torchvision.Compose([torchvision.Resize(256), torchvision.CenterCrop(224)])
    assert np.array_equal(asked["pixels"], np.array(steps(images().open(1))))
    assert corrupted.labels.tolist() == [3, 5]
    assert corrupted.name == "a/fog/3"


def test_the_same_seed_gives_the_same_pixels_in_any_order_and_disturbs_no_other_draw(stub: list[dict[str, Any]]):
    first = CorruptedImages(images(), "fog", 3)
    before = np.random.get_state()[1].copy()  # noqa: NPY002  # pyright: ignore
    once = [np.array(first.open(row)) for row in (0, 1)]
    again = [np.array(CorruptedImages(images(), "fog", 3).open(row)) for row in (1, 0)]
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002  # pyright: ignore
    assert np.array_equal(once[0], again[1])
    assert np.array_equal(once[1], again[0])
    for other in (CorruptedImages(images(), "fog", 4), CorruptedImages(images(), "fog", 3, seed=1)):
        assert not np.array_equal(once[0], np.array(other.open(0)))
        assert other.fingerprint != first.fingerprint


def test_unknown_corruptions_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="no corruption is named 'rain'; known: gaussian_noise,"):
        CorruptedImages(images(), "rain", 1)
    with pytest.raises(ValueError, match="severity must be one of"):
        CorruptedImages(images(), "fog", 6)
    monkeypatch.setitem(sys.modules, "corrupt_tta", None)
    with pytest.raises(ValueError, match="pip install corrupt-tta"):
        CorruptedImages(images(), "fog", 1)


STEADY = {*CORRUPTIONS["noise"], "speckle_noise", "gaussian_blur", "defocus_blur", "contrast", "brightness", "pixelate"}


def test_every_corruption_of_the_real_package_moves_the_image_the_steady_ones_further_with_severity():
    pytest.importorskip("corrupt_tta", reason="the optional package corrupt-tta is not installed")
    smooth = np.linspace(40, 200, 256, dtype=np.uint8)[None, :, None].repeat(256, axis=0).repeat(3, axis=2)
    smooth[::16, :, 1] = 90
    clean = ArrayImages(smooth[None], name="smooth")
    crop = np.array(Image.fromarray(smooth).crop((16, 16, 240, 240)), dtype=float)
    for corruption in (name for group in CORRUPTIONS.values() for name in group):
        moved = [
            np.abs(np.array(CorruptedImages(clean, corruption, severity).open(0)) - crop).mean() for severity in (1, 5)
        ]
        assert min(moved) > 0, (corruption, moved)
        if corruption in STEADY:  # the others draw an angle, a texture or a place
            assert moved[0] < moved[1], (corruption, moved)
