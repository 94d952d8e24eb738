"""Calibration errors without bins, on `(confidence, correct)`: KS, smooth ECE and kernel ECE.

None of them depends on the order of the rows; confidences in [0, 1], all sums in float64.
"""

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Floats, UndefinedMetricError, as_top_label

_GRID = 2**13  # cells of [0, 1]; linear binning makes the error of the smoothed function O(1 / _GRID²)


def ks_error(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Kolmogorov-Smirnov calibration error: `max_t |Σ_{conf ≤ t} (conf − correct)| / N` over all confidences.

    In [0, 1], low is good (Gupta et al., ICLR 2021, arXiv:2006.12800, Eq. 12). MAPIE prints the statistic scaled by its
    standard deviation under calibration instead.
    """
    certain, right = as_top_label(confidence, correct)
    order = np.argsort(certain, kind="stable")
    last_of_tie = np.append(np.diff(certain[order]) > 0, True)
    return float(np.abs(np.cumsum((certain - right)[order])[last_of_tie]).max() / certain.size)


def smooth_ece(confidence: ArrayLike, correct: ArrayLike, *, resolution: float = 2.0**-10) -> float:
    """Smooth ECE: the absolute calibration residual after a reflected Gaussian kernel that sets its own width.

    `smECE_σ = ∫_0^1 |Σ_i K_σ(t, conf_i) (conf_i − correct_i)| / N dt` falls with σ, and the width is where the two
    meet, `smECE_σ = σ` (Błasiok and Nakkiran, ICLR 2024, arXiv:2309.12236). The kernel is the Gaussian folded into
    [0, 1], `K_σ(t, c) = Σ_k φ_σ(t − c + 2k) + φ_σ(t + c + 2k)`, so every row has mass 1, one at 0 or 1 too. Low is
    good, at most the ECE of one bin per distinct confidence. Unlike a binned error it moves by little when the
    confidences do.

    Differs from relplot where confidences are exactly 0 or 1: it extends its grid by reflection without repeating the
    end points, which halves the mass there.

    Args:
        confidence: shape (N,), in [0, 1].
        correct: shape (N,).
        resolution: σ is the smallest multiple of this that is at least smECE_σ, found by bisection. The default is
            that of relplot, whose reflected kernel (its default; torch-uncertainty's is another) this is.
    """
    if not 0 < resolution <= 1:
        raise ValueError(f"resolution must be in (0, 1], but is {resolution}")
    certain, right = as_top_label(confidence, correct)
    residual = _to_grid(certain, (certain - right) / certain.size)
    wide, narrow = int(np.ceil(1 / resolution)), 0
    while wide - narrow > 1:
        middle = (wide + narrow) // 2
        if _smoothed(residual, middle * resolution) > middle * resolution:
            narrow = middle
        else:
            wide = middle
    return _smoothed(residual, wide * resolution)


def kernel_ece(confidence: ArrayLike, correct: ArrayLike, *, norm: int = 1) -> float:
    """ECE from kernel density estimates: `(∫ |t − P(right | t)|^norm p(t) dt)^(1/norm)`. Low is good.

    `P(right | t)` is accuracy × density of the confidences of right answers over the density of all, both triweight
    estimates mirrored at 0 and 1 of one bandwidth, `std(conf of right answers) (2 N)^(−1/5)` (Zhang et al.,
    ICML 2020, Mix-n-Match, arXiv:2003.07329). Undersmooths a spike at 1, so it can miss the error of saturated models.

    Raises:
        UndefinedMetricError: where fewer than two answers are right, or all of those are equally confident: there is
            no bandwidth.
    """
    certain, right = as_top_label(confidence, correct)
    known = certain[right]
    width = float(np.std(known) * (2 * certain.size) ** -0.2) if known.size else 0.0
    if width <= 0:
        raise UndefinedMetricError(
            "kernel_ece takes its bandwidth from the spread of the confidences of right answers, and they have none"
        )
    grid = np.linspace(0, 1, _GRID + 1)
    every = _mirrored_density(certain, width)
    share = np.divide(_mirrored_density(known, width), every, where=every > 1e-6, out=np.zeros_like(every))
    among_right = np.minimum(right.mean() * share, 1.0)
    weighted = np.abs(grid - among_right) ** norm * every
    return float((np.trapezoid(weighted, grid) / np.trapezoid(every, grid)) ** (1 / norm))


def _to_grid(places: Floats, values: Floats) -> Floats:
    """Spread each value linearly over the two grid points of [0, 1] around its place."""
    position = np.minimum(places, 1.0) * _GRID
    left = np.minimum(position.astype(np.int64), _GRID - 1)
    fraction = position - left
    lower = np.bincount(left, weights=(1 - fraction) * values, minlength=_GRID + 1)
    upper = np.bincount(left + 1, weights=fraction * values, minlength=_GRID + 1)
    return np.asarray(lower + upper, dtype=np.float64)


def _convolve_reflected(values: Floats, kernel: Floats) -> Floats:
    """Convolve grid values with a symmetric kernel given on 0..reach, mass beyond 0 and 1 reflected back."""
    period = 2 * _GRID
    mirrored = np.concatenate([values, values[-2:0:-1]])  # reflection at both ends is a signal of period 2
    mirrored[[0, _GRID]] *= 2  # an end point is its own mirror image and must count twice, as every other does
    offsets = np.arange(kernel.size)
    wrapped = np.bincount(offsets % period, weights=kernel, minlength=period)
    wrapped += np.bincount(-offsets[1:] % period, weights=kernel[1:], minlength=period)
    return np.fft.irfft(np.fft.rfft(mirrored) * np.fft.rfft(wrapped), period)[: _GRID + 1]


def _smoothed(residual: Floats, width: float) -> float:
    reach = min(int(np.ceil(9 * width * _GRID)), 16 * _GRID)
    kernel = np.exp(-0.5 * (np.arange(reach + 1) / (width * _GRID)) ** 2) / (width * np.sqrt(2 * np.pi))
    return float(np.trapezoid(np.abs(_convolve_reflected(residual, kernel)), dx=1 / _GRID))


def _mirrored_density(places: Floats, width: float) -> Floats:
    """Triweight density on the grid, the kernel's standard deviation being `width` (its support three times that)."""
    mass = _to_grid(places, np.full(places.size, 1 / places.size))
    reach = int(3 * width * _GRID)
    kernel = 35 / 32 * (1 - (np.arange(reach + 1) / (3 * width * _GRID)) ** 2) ** 3 / (3 * width)
    return np.maximum(_convolve_reflected(mass, kernel), 0.0)
