"""Calibration data with known answers, used by the tests of this room."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SHARED = Path(__file__).parents[2].parent / "shared"


def reference_case(factor: float) -> tuple[Tensor, Tensor]:
    """1,000 rows of 10 classes whose labels are drawn from the softmax of the logits over `factor` (numpy PCG64).

    Factor 1.1 is case A and factor 2 case C of the comparison of calibration tools; their exact maximum-likelihood
    temperatures are 1.044593144 and 1.899260262.
    """
    rng = np.random.default_rng(20240501)
    rows, classes = 1000, 10
    logits = rng.standard_normal((rows, classes))
    peaks = rng.integers(0, classes, rows)
    logits[np.arange(rows), peaks] += 3.5 + 2.0 * rng.standard_normal(rows)
    uniform = rng.random(rows)
    mass = np.exp(logits - logits.max(1, keepdims=True))
    cumulated = np.cumsum(mass / mass.sum(1, keepdims=True), 1)
    labels = (uniform[:, None] > cumulated).sum(1).clip(0, classes - 1)
    return torch.as_tensor(factor * logits), torch.as_tensor(labels)


def drawn(rows: int, classes: int, *, temperature: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """float64 logits that are `temperature` times those from whose softmax the labels are drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    peaks = torch.randint(0, classes, (rows,), generator=generator)
    height = 2 + math.log(classes) / 2 + 2 * torch.randn(rows, generator=generator, dtype=torch.float64)
    logits[torch.arange(rows), peaks] += height
    labels = logits.softmax(dim=1).multinomial(1, generator=generator).squeeze(1)
    return temperature * logits, labels


def nll(log_probabilities: Tensor, labels: Tensor) -> float:
    return -float(log_probabilities.double().gather(1, labels[:, None]).mean())
