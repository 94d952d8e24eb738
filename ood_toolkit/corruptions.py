"""ImageNet-C and ImageNet-P by name, AlexNet's errors on them, and the means that are relative to AlexNet.

Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
arXiv:1903.12261. Standard library only, so that tables of any run can be made anywhere.

The errors on ImageNet-C are those of the table "AlexNet ImageNet-C Error" in the authors' repository
(hendrycks/robustness, README.md); the clean error is 43.5% in the paper, 43.45% for the same weights in torchvision's
list of that time. Flip probabilities: the constants of clovaai/assembled-cnn, whose mFR is the one of the authors'
leaderboard; AlexNet's top-5 distances are published in no file that we know.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

CORRUPTIONS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}
"""Group → corruptions, as in the published set; the first four groups are the fifteen that its tables average."""
AVERAGED = tuple(name for group, names in CORRUPTIONS.items() if group != "extra" for name in names)
"""The fifteen corruptions of the mean corruption error."""
SEVERITIES = (1, 2, 3, 4, 5)
PERTURBATIONS = (
    "gaussian_noise",
    "shot_noise",
    "motion_blur",
    "zoom_blur",
    "snow",
    "brightness",
    "translate",
    "rotate",
    "tilt",
    "scale",
)
"""The ten perturbations of ImageNet-P that its means average."""

ALEXNET_CLEAN = 0.4345
"""Top-1 error of AlexNet on ImageNet validation."""
ALEXNET_ERRORS: Mapping[str, tuple[float, ...]] = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
    "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
    "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
    "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
    "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
    "speckle_noise": (0.66192, 0.74440, 0.90246, 0.94548, 0.97268),
    "gaussian_blur": (0.54732, 0.70444, 0.82574, 0.89864, 0.95940),
    "spatter": (0.47196, 0.62194, 0.75052, 0.84132, 0.90182),
    "saturate": (0.59342, 0.65514, 0.51174, 0.70834, 0.82260),
}
"""Corruption → top-1 error of AlexNet at severities 1 to 5, on ImageNet-C as published."""
ALEXNET_FLIPS: Mapping[str, float] = {
    "gaussian_noise": 0.23653,
    "shot_noise": 0.30062,
    "motion_blur": 0.09297,
    "zoom_blur": 0.05942,
    "snow": 0.11928,
    "brightness": 0.04889,
    "translate": 0.11007,
    "rotate": 0.13104,
    "tilt": 0.07050,
    "scale": 0.23531,
    "speckle_noise": 0.18649,
    "gaussian_blur": 0.02775,
    "spatter": 0.05053,
    "shear": 0.10658,
}
"""Perturbation → flip probability of AlexNet on ImageNet-P; the last four are its validation perturbations."""


def corruption_error(corruption: str, errors: Sequence[float]) -> float:
    """CE of section 4.1: `Σ_s E_{s,c} / Σ_s E^AlexNet_{s,c}`; 1 is AlexNet, lower is better.

    Args:
        corruption: one of `ALEXNET_ERRORS`.
        errors: top-1 errors at severities 1 to 5, in [0, 1].

    >>> round(corruption_error("brightness", ALEXNET_ERRORS["brightness"]), 6)
    1.0
    """
    _require_all(errors)
    return sum(errors) / sum(ALEXNET_ERRORS[corruption])


def relative_corruption_error(corruption: str, errors: Sequence[float], clean: float) -> float:
    """What corruption adds to the clean error, relative to AlexNet: section 4.1's Relative CE; lower is better.

    `Σ_s (E_{s,c} − E_clean) / Σ_s (E^AlexNet_{s,c} − E^AlexNet_clean)`.

    Args:
        corruption: see `corruption_error`.
        errors: see `corruption_error`.
        clean: top-1 error on the images without corruption, in [0, 1].
    """
    _require_all(errors)
    return sum(error - clean for error in errors) / sum(e - ALEXNET_CLEAN for e in ALEXNET_ERRORS[corruption])


def mean_over(names: Sequence[str], values: Mapping[str, float | None]) -> float | None:
    """The mean over all of these names, or None where one has no value: a mean over some is another measure."""
    known = [value for value in (values.get(name) for name in names) if value is not None]
    return fmean(known) if len(known) == len(names) else None


def compares_with_first(perturbation: str) -> bool:
    """Whether frames are compared with the first one, as in noise sequences, and not with the one before."""
    return "noise" in perturbation


def _require_all(errors: Sequence[float]) -> None:
    if len(errors) != len(SEVERITIES):
        raise ValueError(f"a corruption error is over severities {SEVERITIES}, got {len(errors)} errors")
