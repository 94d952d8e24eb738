"""Ensembles with calibrators inside: after the pool, or before it."""

from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, EnsemblePool, from_spec
from ood_toolkit.fitted import NotFitted


class PoolThenCalibrateEnsemble(EnsemblePool):
    """Pools the members, then calibrates the pool as if it were one model.

    What to do when members agree little: their mean probability is under-confident, and one temperature below 1
    repairs that. Costs one calibration however many members there are.

    Args:
        pool: spec of an ensemble, fitted first if it learns.
        calibrator: spec of the calibrator of the pool.
    """

    name = "pool_then_calibrate"
    paper = "Rahaman and Thiery, Uncertainty Quantification and Deep Ensembles, NeurIPS 2021, arXiv:2007.08792"
    cite = "rahaman2021uncertainty"
    equation = "calibrator(log pool(z_1, …, z_M))"

    def __init__(self, pool: str = "mean_probability", calibrator: str = "temperature") -> None:
        super().__init__()
        self.pool = pool
        self.calibrator = calibrator
        self.pooling = from_spec(pool, EnsemblePool)
        self.calibration = from_spec(calibrator, Calibrator)

    def fit(self, member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"]) -> Self:
        """Fits pool and calibrator on held-out logits. Returns itself."""
        self.pooling.fit(member_logits, labels)
        self.calibration.fit(self.pooling(member_logits), labels)
        return self

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) calibrated log-probabilities of the pool."""
        return self.calibration.log_probabilities(self.pooling(member_logits))


class CalibrateThenPoolEnsemble(EnsemblePool):
    """Calibrates each member on its own, then pools.

    Puts members with different temperatures on one scale before they are averaged. The mean probability of calibrated
    members is under-confident; see `pool_then_calibrate` and `pooled_temperature`.

    Args:
        pool: spec of an ensemble, fitted on the calibrated members if it learns.
        calibrator: spec of every member's calibrator.
    """

    name = "calibrate_then_pool"
    paper = "Rahaman and Thiery, Uncertainty Quantification and Deep Ensembles, NeurIPS 2021, arXiv:2007.08792"
    cite = "rahaman2021uncertainty"
    equation = "pool(log calibrator_1(z_1), …, log calibrator_M(z_M))"

    def __init__(self, pool: str = "mean_probability", calibrator: str = "temperature") -> None:
        super().__init__()
        self.pool = pool
        self.calibrator = calibrator
        self.pooling = from_spec(pool, EnsemblePool)
        self.members = torch.nn.ModuleList()
        from_spec(calibrator, Calibrator)  # a wrong spec fails here, not in fit

    def fit(self, member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"]) -> Self:
        """Fits one calibrator per member, then the pool. Returns itself."""
        self._grow(len(member_logits))
        for member, logits in zip(self.members, member_logits, strict=True):
            member.fit(logits, labels)  # pyright: ignore[reportCallIssue]
        self.pooling.fit(self._calibrated(member_logits), labels)
        return self

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-probabilities of the pool of calibrated members."""
        return self.pooling(self._calibrated(member_logits))

    def _calibrated(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "M N C"]:
        if not len(self.members):
            raise NotFitted(
                f"{self!r} has not learned its members' calibrators yet; call fit(member_logits, labels) first"
            )
        if len(member_logits) != len(self.members):
            raise ValueError(f"fitted on {len(self.members)} members, but got logits of {len(member_logits)}")
        pairs = zip(self.members, member_logits, strict=True)
        return torch.stack([member.log_probabilities(logits) for member, logits in pairs])  # pyright: ignore

    def _grow(self, count: int) -> None:
        self.members = torch.nn.ModuleList(from_spec(self.calibrator, Calibrator) for _ in range(count))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}members."
        found = {int(key[len(start) :].partition(".")[0]) for key in state_dict if key.startswith(start)}
        self._grow(1 + max(found, default=-1))
        super()._load_from_state_dict(state_dict, prefix, *args)
