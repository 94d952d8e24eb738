"""Ensemble temperature scaling: scaled, unscaled and uniform probabilities, mixed."""

from typing import Literal, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked
from ood_toolkit.calibrators.temperature import fit_temperature
from ood_toolkit.stats import row_chunks


class ETSCalibrator(Calibrator):
    """`w₁ softmax(z / T) + w₂ softmax(z) + w₃ / C` with non-negative weights that sum to 1, C the possible classes.

    Two numbers more than temperature scaling, from which it starts, and as accuracy-preserving. The uniform part
    helps where a share of the rows is wrong however confident. T is that of temperature scaling.

    Args:
        loss: what the weights minimise on the held-out rows, "nll" or "mse" (of probabilities against one-hot labels).

    Differs from the authors' code in finding T by likelihood for both losses; theirs finds it by MSE.
    """

    name = "ets"
    paper = "Zhang et al., Mix-n-Match, ICML 2020, arXiv:2003.07329"
    cite = "zhang2020mix"
    equation = "w₁ softmax(z / T) + w₂ softmax(z) + w₃ / C"
    family = "composition"
    preserves_argmax = True
    temperature: Float[Tensor, ""]
    weights: Float[Tensor, "3"]

    def __init__(self, loss: Literal["nll", "mse"] = "nll") -> None:
        super().__init__()
        if loss not in ("nll", "mse"):
            raise ValueError(f"loss must be 'nll' or 'mse', got {loss!r}")
        self.loss = loss

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Finds T, then the weights. Returns itself."""
        logits, labels = checked(logits, labels)
        # a T on its bound is as good as any other here: the weights answer for it
        temperature = fit_temperature(logits, labels).temperature
        true, products = _sufficient(logits, labels, temperature)
        weights = mixture_weights(true) if self.loss == "nll" else _least_squares(true.mean(dim=0), products)
        sharper = int(temperature > 1)  # of the two that know the prediction, which the uniform alone would forget
        weights[sharper] = weights[sharper].clamp_min(1e-6)
        self.temperature = logits.new_tensor(temperature, dtype=torch.float64)
        self.weights = (weights / weights.sum()).to(logits.device)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) mixed probabilities."""
        weights = self.weights.to(logits.dtype)
        centred = logits - logits.amax(dim=-1, keepdim=True)
        mixed = centred.softmax(dim=-1).mul_(weights[1]).add_(_uniform(logits).mul_(weights[2]))
        mixed.addcmul_((centred.div_(self.temperature.to(logits.dtype))).softmax(dim=-1), weights[0])
        # a small step of rounding ahead: beside a large uniform part the classes may round to one number
        top = logits.argmax(dim=-1, keepdim=True)
        return mixed.scatter_(-1, top, mixed.gather(-1, top) * (1 + 4 * torch.finfo(logits.dtype).eps))


def _uniform(logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """The same probability for every class that can be; a logit of -inf says that one cannot."""
    possible = (~logits.isneginf()).to(logits.dtype)
    return possible.div_(possible.sum(dim=-1, keepdim=True))


def mixture_weights(likelihoods: Float[Tensor, "N K"]) -> Float[Tensor, " K"]:
    """Non-negative weights w, summing to 1, that maximise `Σ_i log Σ_k w_k l_ik`: a convex problem."""
    from scipy.optimize import minimize

    scaled = (likelihoods / likelihoods.amax(dim=1, keepdim=True).clamp_min(1e-300)).double().cpu().numpy()

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        mixed = (scaled @ weights).clip(1e-300)
        return -float(np.log(mixed).mean()), -(scaled / mixed[:, None]).mean(axis=0)

    count = scaled.shape[1]
    found = minimize(
        loss,
        [1 / count] * count,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: w * 0 + 1},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    return torch.as_tensor(found.x).clamp_min(0)


def _sufficient(
    logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"], temperature: float
) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "3 3"]]:
    """The three parts' probabilities of the true class, and the mean inner products of the parts."""
    classes = logits.shape[1]
    chunks = row_chunks(len(logits), 8 * classes)
    true, products = [], torch.zeros(3, 3, dtype=torch.float64, device=logits.device)
    for start in chunks:
        block = slice(start, start + chunks.step)
        rows = logits[block].double()
        rows = rows - rows.amax(dim=1, keepdim=True)
        plain = rows.softmax(dim=1)
        parts = torch.stack([(rows / temperature).softmax(dim=1), plain, _uniform(rows)])
        true.append(parts.gather(2, labels[block].expand(3, -1).unsqueeze(2)).squeeze(2).T)
        flat = parts.flatten(1)
        products += flat @ flat.T
    return torch.cat(true), products / len(logits)


def _least_squares(true: Float[Tensor, "3"], products: Float[Tensor, "3 3"]) -> Float[Tensor, "3"]:
    """Weights on the simplex that minimise `wᵀ G w - 2 wᵀ t`, the mean squared error up to a constant."""
    from scipy.optimize import minimize

    gram, linear = products.cpu().numpy(), true.cpu().numpy()
    found = minimize(
        lambda w: (float(w @ gram @ w - 2 * w @ linear), 2 * (gram @ w - linear)),
        [1.0, 0.0, 0.0],
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: w * 0 + 1},
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return torch.as_tensor(found.x).clamp_min(0)
