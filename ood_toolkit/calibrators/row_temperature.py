"""Temperatures that depend on the row: the base of the methods that learn such a map."""

from abc import abstractmethod
from typing import Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked
from ood_toolkit.calibrators.minimise import minimise
from ood_toolkit.calibrators.temperature import fit_temperature
from ood_toolkit.stats import row_chunks

Loss = Literal["nll", "mse"]


class RowTemperatureCalibrator(Calibrator):
    """`softmax(z / T(z))` where T(z) > 0 is a small learned function of the row.

    A subclass gives the features T reads (`features`), T as a differentiable function of them and of one flat
    parameter vector (`temperature_of`), and the parameters that make T constant (`start`). Fitting starts from the
    best constant temperature, so on the held-out rows it never ends up worse.
    """

    preserves_argmax = True
    parameters_: Float[Tensor, " P"]
    loss: Loss
    decay: float

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns the map. Returns itself."""
        logits, labels = checked(logits, labels)
        chunks = row_chunks(len(logits), 8 * logits.shape[1])
        features = torch.cat([self.features(logits[i : i + chunks.step].double()) for i in chunks])
        start = self.start(features, fit_temperature(logits, labels).temperature)

        def objective(point: Tensor) -> tuple[float, Tensor]:
            with torch.enable_grad():
                point = point.detach().requires_grad_(True)
                inverse = 1 / self.temperature_of(features, point)
                value, slopes = loss_by_inverse(logits, labels, inverse.detach(), self.loss)
                (gradient,) = torch.autograd.grad(inverse, point, slopes / len(logits))
            moved = point.detach() - start
            pull = self.decay / len(logits) * moved
            return value + float(pull @ moved), gradient + 2 * pull

        self.parameters_ = minimise(objective, start, most_steps=100, tolerance=1e-5)
        return self

    @abstractmethod
    def features(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N F"]:
        """What T reads, from float64 logits."""

    @abstractmethod
    def start(self, features: Float[Tensor, "N F"], temperature: float) -> Float[Tensor, " P"]:
        """Parameters under which every row's T is `temperature`."""

    @abstractmethod
    def temperature_of(self, features: Float[Tensor, "N F"], parameters: Float[Tensor, " P"]) -> Float[Tensor, " N"]:
        """T > 0 of every row."""

    def temperatures(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
        """T of every row, in float64."""
        if torch.compiler.is_compiling():
            features = self.features(logits.double())
        else:
            step = row_chunks(len(logits), 8 * logits.shape[1]).step
            features = torch.cat([self.features(block.double()) for block in logits.split(step)])
        return self.temperature_of(features, self.parameters_.double())

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) softmax of z / T(z)."""
        return self._scaled(logits).softmax(dim=-1)

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-softmax of z / T(z)."""
        return self._scaled(logits).log_softmax(dim=-1)

    def _scaled(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        centred = logits - logits.amax(dim=-1, keepdim=True)
        return centred / self.temperatures(logits).to(logits.dtype).unsqueeze(-1)


def loss_by_inverse(
    logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"], inverse: Float[Tensor, " N"], loss: Loss
) -> tuple[float, Float[Tensor, " N"]]:
    """The mean loss of `softmax(β_i z_i)` and each row's derivative by its β_i = 1/T_i.

    NLL: `E_p[z] - z_y`. Squared error `Σ_c (p_c - y_c)²`: `2 (Σ p² z - Σp² E_p[z] - p_y (z_y - E_p[z]))`.
    """
    slopes = torch.empty_like(inverse)
    total = 0.0
    step = max(1, (1 << 16) // logits.shape[1]) if logits.device.type == "cpu" else row_chunks(*logits.shape).step
    for start in range(0, len(logits), step):
        block = slice(start, start + step)
        rows = logits[block].double()
        rows = (rows - rows.amax(dim=1, keepdim=True)).clamp_(min=-1e150)
        log_p = (rows * inverse[block, None]).log_softmax(dim=1)
        true = rows.gather(1, labels[block, None]).squeeze(1)
        log_true = log_p.gather(1, labels[block, None]).squeeze(1)
        p = log_p.exp_()
        mean = torch.linalg.vecdot(p, rows)
        if loss == "nll":
            total -= float(log_true.sum())
            slopes[block] = mean - true
        else:
            squares = p.square()
            total += float((squares.sum(dim=1) - 2 * log_true.exp() + 1).sum())
            inner = torch.linalg.vecdot(squares, rows) - squares.sum(dim=1) * mean
            slopes[block] = 2 * (inner - log_true.exp() * (true - mean))
    return total / len(logits), slopes
