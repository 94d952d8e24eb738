"""Deterministic data on which every sound detector finds the OOD rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ood_toolkit.detectors.clip import local_concept_mismatch
from ood_toolkit.detectors.gram import gram_rows
from ood_toolkit.detectors.layers import join_layers
from ood_toolkit.outputs import UNKNOWN, Head, Outputs

_CLASSES, _OWN, _SPARE = 6, 4, 8
_WIDTH = _CLASSES * _OWN + _SPARE

TapMaker = Callable[[Float[Tensor, "N D"], Head, torch.Generator], Tensor]
"""Features, head and a seeded generator in; one (N, ...) tensor out."""


@dataclass(frozen=True)
class Splits:
    """What a fitted detector meets: training rows, rows like them, and rows from elsewhere."""

    train: Outputs
    id: Outputs
    ood: Outputs

    def to(self, *args: object) -> "Splits":
        """All three moved or cast, with the arguments of `torch.Tensor.to`."""
        return Splits(self.train.to(*args), self.id.to(*args), self.ood.to(*args))


def synthetic_outputs(
    taps: Sequence[str] = (),
    *,
    makers: Mapping[str, TapMaker] | None = None,
    fit_rows: int = 720,
    rows: int = 160,
    seed: int = 0,
) -> Splits:
    """Outputs of an imagined ReLU network with 6 classes and 32 features, on which OOD is easy to find.

    Each class owns four features that are on for its rows; eight spare features are off for all classes. One ID row
    in twelve is a blend of two classes, so that some predictions are wrong. OOD rows have the spare features on and
    all class features nearly off: far from every class in distance and in angle, of smaller norm, and with an
    almost flat softmax.

    Args:
        taps: names of the taps to fill; each needs a maker.
        makers: makers of further taps, by name, beside `SYNTHETIC_TAPS`.
        fit_rows: training rows.
        rows: rows of the ID and of the OOD set.
        seed: of everything.
    """
    known = {**SYNTHETIC_TAPS, **(makers or {})}
    missing = sorted(set(taps) - set(known))
    if missing:
        raise ValueError(
            f"no synthetic maker for the taps {missing}; give makers={{name: (features, head, generator) -> …}}"
        )
    generator = torch.Generator().manual_seed(seed)
    head = _head(generator)

    def outputs(features: Tensor, labels: Tensor) -> Outputs:
        filled = {name: known[name](features, head, torch.Generator().manual_seed(seed + 1)) for name in taps}
        return Outputs(logits=head(features), features=features, labels=labels, head=head, taps=filled)

    return Splits(
        train=outputs(*_id_rows(fit_rows, generator)),
        id=outputs(*_id_rows(rows, generator)),
        ood=outputs(_ood_rows(rows, generator), torch.full((rows,), UNKNOWN)),
    )


def _head(generator: torch.Generator) -> Head:
    weight = torch.full((_CLASSES, _WIDTH), -0.1)
    for c in range(_CLASSES):
        weight[c, c * _OWN : (c + 1) * _OWN] = 0.5
    weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return Head(weight, 0.1 * torch.randn(_CLASSES, generator=generator))


def _id_rows(rows: int, generator: torch.Generator) -> tuple[Float[Tensor, "N D"], Int[Tensor, " N"]]:
    labels = torch.arange(rows) % _CLASSES
    share = torch.ones(rows)
    share[::12] = 0.55 * torch.rand(len(share[::12]), generator=generator) + 0.25  # blends, some on the wrong side
    other = (labels + 1 + torch.randint(_CLASSES - 1, (rows,), generator=generator)) % _CLASSES
    on = torch.zeros(rows, _CLASSES)
    on[torch.arange(rows), labels] = share
    on[torch.arange(rows), other] = 1 - share
    level = 2.5 * on.repeat_interleave(_OWN, dim=1)
    level = level * (1 + 0.15 * torch.randn(level.shape, generator=generator))
    features = torch.cat([level, torch.zeros(rows, _SPARE)], dim=1)
    return (features + 0.15 * torch.randn(features.shape, generator=generator)).abs(), labels


def _ood_rows(rows: int, generator: torch.Generator) -> Float[Tensor, "N D"]:
    features = 0.2 * torch.randn(rows, _WIDTH, generator=generator)
    features[:, -_SPARE:] += 0.7
    return features.abs()


def _member_logits(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N M C"]:
    # members agree where there was training data and are arbitrary along the spare features
    noise = 0.02 * torch.randn(5, *head.weight.shape, generator=generator)
    noise[:, :, -_SPARE:] *= 60
    return torch.einsum("nd,mcd->nmc", features, head.weight + noise) + head.bias


def _cosines(features: Tensor, directions: Tensor) -> Tensor:
    return nn.functional.normalize(features, dim=1) @ nn.functional.normalize(directions, dim=1).T


def _negative_cosines(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N M"]:
    directions = 0.2 * torch.rand(200, features.shape[1], generator=generator)
    directions[:, -_SPARE:] += torch.rand(200, _SPARE, generator=generator)
    return _cosines(features, directions)


def _local_mcm(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, " N"]:
    patches = features.unsqueeze(1) + 0.3 * torch.randn(len(features), 4, features.shape[1], generator=generator)
    return local_concept_mismatch(_cosines(patches.flatten(0, 1), head.weight).unflatten(0, (-1, 4)))


def _stage_means(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N sum_D"]:
    return join_layers([features[:, ::2], features])


def _stage_gram(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N P sum_D"]:
    noise = 0.05 * torch.randn(len(features), features.shape[1], 4, generator=generator)
    maps = features.unsqueeze(2) + noise
    return join_layers([gram_rows(maps[:, ::2], 10), gram_rows(maps, 10)])


def _shallow_statistics(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N 2 S"]:
    # a style of its own for every image, the same kinds for all sets
    noise = torch.rand(len(features), 2, 6, generator=generator).to(features)
    return 1 + noise + 0.02 * features[:, :6].unsqueeze(1)


def _activation_extremes(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N 4"]:
    noise = 0.1 * torch.rand(len(features), 2, generator=generator).to(features)
    ends = torch.stack([features.amin(dim=1), features.amax(dim=1)], dim=1)
    return torch.cat([noise - ends.flip(1), ends + noise], dim=1)


def _two_stages(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N 2 D"]:
    return torch.stack([features, 0.9 * features], dim=1)


def _features(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N D"]:
    return features


def _nudged_features(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N D"]:
    # a faint change of the image moves features of images without a class more
    strange = features[:, -_SPARE:].mean(dim=1, keepdim=True)
    return features + 0.5 * strange * torch.randn(features.shape, generator=generator).to(features)


def _inner_gradients(features: Tensor, head: Head, generator: torch.Generator) -> Float[Tensor, "N L"]:
    # where there was training data, many units are off or have settled
    strange = features[:, -_SPARE:].mean(dim=1, keepdim=True)
    noise = 0.05 * torch.rand(len(features), 3, generator=generator).to(features)
    return (0.2 + 0.3 * strange.clamp(max=1) + noise) / 3**0.5


SYNTHETIC_TAPS: dict[str, TapMaker] = {
    **dict.fromkeys(("stage_means", "block_maxima"), _stage_means),
    "stage_gram": _stage_gram,
    "activation_extremes": _activation_extremes,
    "shallow_statistics": _shallow_statistics,
    "rank_one_removed": _two_stages,
    **dict.fromkeys(("ash_p_map", "ash_b_map", "ash_s_map", "scale_map", "react_map"), _features),
    "local_mcm": _local_mcm,
    **dict.fromkeys(("member_logits", "dropout_logits", "augmented_logits"), _member_logits),
    "negative_cosines": _negative_cosines,
    **dict.fromkeys(("gradient_density", "gradient_means"), _inner_gradients),
    "nudged_features": _nudged_features,
    "outlier_cosines": _negative_cosines,
}
"""How `synthetic_outputs` fills each tap. A detector that asks for a new tap adds its maker here, one line."""


class SyntheticClassifier(nn.Module):
    """A convolution and a linear layer with the face of `ood_toolkit.models.Classifier`, for live detectors.

    The convolution is random, the head is the least-squares fit of `synthetic_images`, so its predictions are right.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(3, 24, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 4, _IMAGE_CLASSES)
        )
        images, labels = synthetic_images("train", seed=seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            features = self.model[:-1](images).double()
            targets = 8 * nn.functional.one_hot(labels, _IMAGE_CLASSES).double() - 2
            gram = features.T @ features + torch.eye(features.shape[1], dtype=torch.float64)
            self._linear.weight.copy_(torch.linalg.solve(gram, features.T @ targets).T)
            self._linear.bias.zero_()
        self.eval()

    @property
    def _linear(self) -> nn.Linear:
        layer = self.model[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def head(self) -> Head:
        """The last layer."""
        return Head(self._linear.weight, self._linear.bias)

    def differentiate(self, images: Float[Tensor, "N 3 H W"]) -> Outputs:
        """Outputs whose logits carry gradients to the images and the parameters."""
        with torch.enable_grad():
            features = self.model[:-1](images)
            logits = self._linear(features)
        labels = torch.full((len(images),), UNKNOWN, device=images.device)
        return Outputs(logits=logits, features=features, labels=labels, head=self.head)

    def forward(self, images: Float[Tensor, "N 3 H W"]) -> Outputs:
        """Outputs without gradients."""
        with torch.no_grad():
            features = self.model[:-1](images)
            labels = torch.full((len(images),), UNKNOWN, device=images.device)
            return Outputs(logits=self._linear(features), features=features, labels=labels, head=self.head)


_IMAGE_CLASSES = 4


def synthetic_images(
    split: str, *, rows: int = 40, seed: int = 0
) -> tuple[Float[Tensor, "N 3 8 8"], Int[Tensor, " N"]]:
    """Images in [0, 1] and labels: a strong pattern per class for "train" and "id", faint noise for "ood".

    Args:
        split: "train", "id" or "ood".
        rows: how many.
        seed: of everything.
    """
    patterns = torch.rand(_IMAGE_CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).round()
    generator = torch.Generator().manual_seed(seed + 1 + ("train", "id", "ood").index(split))
    noise = torch.randn(rows, 3, 8, 8, generator=generator)
    if split == "ood":
        return (0.5 + 0.1 * noise).clamp(0, 1), torch.full((rows,), UNKNOWN)
    labels = torch.arange(rows) % _IMAGE_CLASSES
    return (0.1 + 0.8 * patterns[labels] + 0.1 * noise).clamp(0, 1), labels
