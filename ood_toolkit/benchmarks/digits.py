"""The embedded suite: handwritten digits that ship with scikit-learn, and a small network trained on the spot.

It repeats the recipe of the ImageNet-A/O paper in miniature. A weak reference classifier picks *digits-A*, images of
the known digits that it gets wrong although it was fitted on others like them (cross-fitted), and *digits-O*, images
of the unseen digits that it names with confidence. A demonstration: its numbers say nothing about other data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ood_toolkit.benchmarks.suite import Part, Suite, Task
from ood_toolkit.datasets import ArrayImages
from ood_toolkit.models import Classifier, LoadedClassifier
from ood_toolkit.models.transforms import ImageTransform

KNOWN_DIGITS = 8
"""Digits 0 to 7 are the classes; 8 and 9 are out-of-distribution."""
_SPLIT_SEED = 20201230
_CONFIDENT = 0.5
_EPOCHS = 20


@dataclass(frozen=True)
class _OneChannel:
    """RGB image → (1, H, W) uint8: the digits are grey, so any channel will do."""

    def __call__(self, image: Any) -> Tensor:
        return torch.from_numpy(np.array(image, dtype=np.uint8)[:, :, 0].copy())[None]


def digits_suite() -> Suite:
    """The suite; always the same images in the same parts."""
    pixels, labels = _digits()
    known = np.flatnonzero(labels < KNOWN_DIGITS)
    order = np.random.default_rng(_SPLIT_SEED).permutation(known)
    fit, calibration, test = np.split(order, [int(0.25 * len(order)), int(0.40 * len(order))])
    unseen = np.flatnonzero(labels >= KNOWN_DIGITS)
    hard, confident = _filter(pixels, labels, test, unseen)
    images = ArrayImages(pixels, name="digits", labels=np.where(labels < KNOWN_DIGITS, labels, -1).tolist())

    def part(name: str, rows: np.ndarray, about: str) -> Part:
        return Part(name, images, torch.from_numpy(rows.astype(np.int64)), about)

    clean = part("digits-test", test, "digits 0 to 7, held out")
    adversarial = part("digits-a", hard, "test images that a cross-fitted reference classifier gets wrong")
    anomalies = part("digits-o", confident, "digits 8 and 9 that the reference classifier names with confidence")
    return Suite(
        name="digits",
        caption=(
            "A demonstration on scikit-learn's handwritten digits (8×8 pixels) built by the recipe of ImageNet-A and "
            "ImageNet-O: digits-A are test images that a reference classifier gets wrong, digits-O are images of the "
            "unseen digits 8 and 9 that it names with confidence. The numbers say nothing about other data."
        ),
        tasks=(
            Task("misclassification", "digits-a+clean", clean),
            Task("misclassification", "digits-a", adversarial),
            Task("anomaly", "digits-o", clean, anomalies),
            Task("calibration", "digits-a+clean", clean),
            Task("calibration", "digits-a", adversarial),
        ),
        fit=part("digits-fit", fit, "digits 0 to 7, also what the networks are trained on"),
        calibration=part("digits-calibration", calibration, "digits 0 to 7, held out"),
    )


def digits_classifier(seed: int, taps: Sequence[str] = ()) -> LoadedClassifier:
    """A small convolutional network, trained now on the suite's fit images; the same seed gives the same weights."""
    suite = digits_suite()
    assert suite.fit is not None
    rows = suite.fit.indices.numpy()
    pixels, labels = _digits()
    images = torch.from_numpy(pixels[rows]).unsqueeze(1)
    model = _train(images.float() / 255, torch.from_numpy(labels[rows]), seed)
    classifier = Classifier(model, mean=(0.0,), std=(1.0,), taps=taps)
    classifier.check(images[:2])
    return LoadedClassifier(
        classifier=classifier,
        spec=f"digits-cnn:{seed}",
        transform=ImageTransform(_OneChannel(), "8x8 grey pixels", (0.0,), (1.0,), (1, 8, 8)),
        class_names=tuple(str(digit) for digit in range(KNOWN_DIGITS)),
    )


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) uint8 pixels and (1797,) int64 digits."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.round(bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.int64)  # pyright: ignore


def _filter(
    pixels: np.ndarray, labels: np.ndarray, test: np.ndarray, unseen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of digits-A and digits-O: a logistic regression on 4×4 averaged pixels is the reference."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    coarse = pixels.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16) / 255
    reference = LogisticRegression(max_iter=2000)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    predicted = cross_val_predict(reference, coarse[test], labels[test], cv=folds)
    confidence = reference.fit(coarse[test], labels[test]).predict_proba(coarse[unseen]).max(axis=1)
    return test[predicted != labels[test]], unseen[confidence >= _CONFIDENT]


def _train(images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, KNOWN_DIGITS),
        )
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
        for _ in range(_EPOCHS):
            for rows in torch.randperm(len(images)).split(32):
                loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return model.eval().requires_grad_(False)
