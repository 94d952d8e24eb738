"""pytorch-ood's detectors, each set up as the same method as one of ours, on the same arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ood_toolkit.detectors.layers import split_layers
from ood_toolkit.detectors.vim import principal_dimension
from ood_toolkit.outputs import Outputs


@dataclass(frozen=True)
class Arrays:
    """What both sides get: the training rows and the rows to score."""

    train: Outputs
    test: Outputs

    @property
    def head(self) -> nn.Linear:
        """The last layer, as a module without gradients."""
        linear = nn.Linear(self.train.width, self.train.classes)
        linear.weight.data, linear.bias.data = self.train.head.weight, self.train.head.bias
        return linear.requires_grad_(False)


@dataclass(frozen=True)
class Peer:
    """pytorch-ood's way to the same score. `build` gets the arrays, `fit` and `score` a detector and rows.

    `batch` is how many rows one call scores: its users go loader batch by loader batch, and where a call makes an
    (N, C, D) array, more rows would not fit.
    """

    kind: str
    build: Callable[[Any, Arrays], Any]
    fit: Callable[[Any, Arrays], Any] | None = None
    score: Callable[[Any, Outputs], Tensor] = lambda peer, rows: peer.predict_features(rows.features)
    batch: int = 2000


def _fit_features(peer: Any, arrays: Arrays) -> None:
    peer.fit_features(arrays.train.features, arrays.train.labels)


def _fit_logits(peer: Any, arrays: Arrays) -> None:
    peer.fit_logits(arrays.train.logits, arrays.train.labels)


def _fit_maps(peer: Any, arrays: Arrays) -> None:
    peer.fit_feature_maps(arrays.train.features, arrays.train.labels)


def _logits(peer: Any, rows: Outputs) -> Tensor:
    return peer.predict_logits(rows.logits)


def _maps(peer: Any, rows: Outputs) -> Tensor:
    return peer.predict_feature_maps(rows.features.view(len(rows), -1, 1, 1))


def _whole(peer: Any, rows: Outputs) -> Tensor:
    return peer(rows.features)


def _flat_head(arrays: Arrays) -> nn.Module:
    return nn.Sequential(nn.Flatten(), arrays.head)


def _on_encoder(kind: str) -> Peer:
    return Peer(kind, lambda cls, arrays: cls(None), _fit_features)


def _on_head(kind: str) -> Peer:
    return Peer(kind, lambda cls, arrays: cls(nn.Identity(), arrays.head), _fit_features)


def _on_maps(kind: str, fitted: bool = False, **settings: Any) -> Peer:
    return Peer(
        kind,
        lambda cls, arrays: cls(nn.Identity(), _flat_head(arrays), **settings),
        _fit_maps if fitted else None,
        _maps,
    )


def _on_logits(kind: str, fitted: bool = False) -> Peer:
    return Peer(kind, lambda cls, arrays: cls(None), _fit_logits if fitted else None, _logits)


class _Lift(nn.Module):
    """Hands features on as something that gradients can be taken to."""

    def forward(self, features: Tensor) -> Tensor:
        return features.detach().requires_grad_()


def _build_nac(cls: Any, arrays: Arrays) -> Any:
    lift = _Lift()
    return cls(nn.Sequential(lift, arrays.head), [lift], m_bins=49, alpha=3000.0, o_star=10)


def _fit_nac(peer: Any, arrays: Arrays) -> None:
    rows = torch.randperm(len(arrays.train), generator=torch.Generator().manual_seed(0))[:1000].sort().values
    peer.fit([arrays.train.features[rows]])


def _layers(rows: Outputs) -> list[Tensor]:
    return [layer.contiguous() for layer in split_layers(rows.taps["stage_means"])]


def _vim_dimension(train: Outputs) -> int:
    return principal_dimension(None, train.width, len(train))


PEERS: dict[str, Peer] = {
    "msp": _on_logits("MaxSoftmax"),
    "maxlogit": _on_logits("MaxLogit"),
    "energy": _on_logits("EnergyBased"),
    "entropy": _on_logits("Entropy"),
    "gen": Peer("GEN", lambda cls, arrays: cls(None, M=100), None, _logits),
    "kl_matching": _on_logits("KLMatching", fitted=True),
    "openmax": _on_logits("OpenMax", fitted=True),
    "tempscale": _on_logits("TemperatureScaling", fitted=True),
    "weighted_energy": Peer(
        "WeightedEBO", lambda cls, arrays: cls(None, torch.ones(arrays.train.classes)), None, _logits
    ),
    "mahalanobis": _on_encoder("Mahalanobis"),
    "rmds": _on_encoder("RMD"),
    "gmm": _on_encoder("GMM"),
    "knn": _on_encoder("KNN"),
    "vim": Peer(
        "ViM",
        lambda cls, a: cls(None, _vim_dimension(a.train), a.train.head.weight, a.train.head.bias),
        _fit_features,
    ),
    "dice": Peer(
        "DICE", lambda cls, a: cls(None, w=a.train.head.weight, b=a.train.head.bias, p=0.9), _fit_features, batch=64
    ),
    "lts": Peer("LTS", lambda cls, arrays: cls(None, arrays.head)),
    "nnguide": _on_head("NNGuide"),
    "she": _on_head("SHE"),
    "fdbd": _on_head("fDBD"),
    "nci": _on_head("NCI"),
    "pnml": _on_head("PNML"),
    "react": _on_maps("ReAct", fitted=True),
    "vra": Peer(
        "VRA",
        lambda cls, arrays: cls(nn.Identity(), arrays.head),
        _fit_maps,
        lambda peer, rows: peer.predict_feature_maps(rows.features),
    ),
    "scale": _on_maps("SCALE"),
    "ash_p": _on_maps("ASH", variant="ash-p"),
    "ash_b": _on_maps("ASH", variant="ash-b"),
    "ash_s": _on_maps("ASH", variant="ash-s"),
    "gradnorm": Peer("GradNorm", lambda cls, arrays: cls(arrays.head.requires_grad_(True)), None, _whole, batch=100),
    "graduncertainty": Peer(
        "GradUncertainty", lambda cls, arrays: cls(arrays.head.requires_grad_(True)), None, _whole, batch=64
    ),
    "mcm": Peer("MCM", lambda cls, arrays: cls(None, arrays.train.head.weight)),
    "nac": Peer("NACUE", _build_nac, _fit_nac, _whole),
    "mahalanobis_layers": Peer(
        "MultiMahalanobis",
        lambda cls, arrays: cls([nn.Identity()] * len(_layers(arrays.train))),
        lambda peer, arrays: peer.fit_structured(_layers(arrays.train), arrays.train.labels),
        lambda peer, rows: peer.predict_structured(_layers(rows)),
    ),
}
"""Ours by name → theirs, with the settings that make them the same method."""
