"""Fixed views of an image: what test-time augmentation shows the model."""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

Image = Float[Tensor, "N channels H W"]


def image_views(images: Image, flip: bool = True, shift: float = 0.04, crop: float = 0.9) -> Iterator[Image]:
    """The images as they are, then mirrored, shifted right, left, down and up, and cropped: views of the same size.

    Args:
        images: in pixel units.
        flip: whether left and right are exchanged in one view.
        shift: share of the side that an image moves, at least one pixel; its edge is repeated. 0 for no such view.
        crop: share of the side that the central crop keeps, at least one pixel less than all; it is enlarged
            bilinearly. 1 for no such view.
    """
    yield images
    if flip:
        yield images.flip(3)
    if shift:
        yield from _shifted(images, shift)
    if crop < 1:
        yield _cropped(images, crop)


def _shifted(images: Image, share: float) -> Iterator[Image]:
    height, width = images.shape[2:]
    down, right = (max(1, round(share * side)) for side in (height, width))
    padded = nn.functional.pad(images, (right, right, down, down), mode="replicate")
    for top, left in ((down, 0), (down, 2 * right), (0, right), (2 * down, right)):
        yield padded[:, :, top : top + height, left : left + width]


def _cropped(images: Image, share: float) -> Image:
    sides = images.shape[2:]
    height, width = (max(1, min(side - 1, round(share * side))) for side in sides)
    top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
    part = images[:, :, top : top + height, left : left + width]
    return nn.functional.interpolate(part, size=tuple(sides), mode="bilinear", align_corners=False)
