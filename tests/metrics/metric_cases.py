"""Fixed inputs whose metric values other tools have printed, and the files they stand in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

SHARED = Path(__file__).parents[2].parent / "shared"

Case = tuple[NDArray[np.float64], NDArray[np.int64]]


def shared(path: str) -> Path:
    """A file beside this checkout, or skip the test."""
    file = SHARED / path
    if not file.exists():
        pytest.skip(f"the reference file is not beside this checkout (../shared/{path})")
    return file


def reference_json(path: str) -> Any:
    return json.loads(shared(path).read_text())


def reference_arrays(path: str) -> dict[str, NDArray[Any]]:
    with np.load(shared(path)) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _logits() -> Case:
    rng = np.random.default_rng(20240501)
    rows, classes = 1000, 10
    logits = rng.standard_normal((rows, classes))
    centre = rng.integers(0, classes, rows)
    logits[np.arange(rows), centre] += 3.5 + 2.0 * rng.standard_normal(rows)
    uniform = rng.random(rows)
    labels = (uniform[:, None] > np.cumsum(softmax(logits), axis=1)).sum(axis=1).clip(0, classes - 1)
    return logits, labels


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def case_a() -> Case:
    """1000 × 10 without ties, slightly over-confident."""
    logits, labels = _logits()
    return softmax(1.1 * logits), labels


def case_b() -> Case:
    """Case A with confidences rounded to tenths: 9 distinct values, 247 of them exactly 1."""
    probabilities, labels = case_a()
    rows, classes = probabilities.shape
    confidence = np.maximum(np.round(probabilities.max(axis=1), 1), 0.2)
    rounded = np.repeat(((1 - confidence) / (classes - 1))[:, None], classes, axis=1)
    rounded[np.arange(rows), probabilities.argmax(axis=1)] = confidence
    return rounded, labels


def case_c() -> Case:
    """The logits of case A twice as bold: strongly over-confident."""
    logits, labels = _logits()
    return softmax(2.0 * logits), labels


def two_samples(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
    """Negated confidences of (right, wrong) predictions: higher = more likely wrong."""
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    return -confidence[correct], -confidence[~correct]
