"""Smooth minimisation: scipy's L-BFGS on torch tensors, in scaled variables."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def minimise(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    start: Float[Tensor, " P"],
    *,
    scale: Float[Tensor, " P"] | None = None,
    most_steps: int = 500,
    tolerance: float = 1e-6,
    settled: float = 1e-12,
) -> Float[Tensor, " P"]:
    """The point where the line-searched quasi-Newton descent from `start` ends.

    Args:
        objective: value and gradient at a float64 point.
        start: float64 first point.
        scale: typical size of a useful step in each variable, say one over the root of its curvature. The search
            runs in units of it, which is what makes badly scaled problems quick.
        most_steps: upper bound for iterations.
        tolerance: the search ends when no component of the gradient, in scaled variables, exceeds this.
        settled: or when a step lowers the value by less than this share of it.
    """
    from scipy.optimize import minimize

    unit = torch.ones_like(start) if scale is None else scale

    def scaled(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(start + unit * torch.as_tensor(point, device=start.device))
        return value, (gradient * unit).double().cpu().numpy()

    found = minimize(
        scaled,
        np.zeros(len(start)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": most_steps, "maxcor": 20, "gtol": tolerance, "ftol": settled},
    )
    if not np.isfinite(found.fun):
        raise ValueError(f"the likelihood is not finite at any point tried: {found.message}")
    return start + unit * torch.as_tensor(found.x, device=start.device)
