"""Parametrised temperature scaling: a small network reads the largest logits and names the temperature."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.row_temperature import Loss, RowTemperatureCalibrator

_SMALLEST, _LARGEST = 1e-3, 1e3


class PTSCalibrator(RowTemperatureCalibrator):
    """`softmax(z / T)` with `T = |network(the k largest logits, sorted)|`, two hidden layers of ReLU.

    More flexible than `entropy_temperature` and hungrier: some 100 numbers, and a loss with many local minima, of
    which `seed` picks one.

    Args:
        largest: k, how many of the largest logits the network sees (all, where there are fewer classes).
        hidden: units in each of the two hidden layers.
        loss: minimised on held-out rows, "mse" (the paper's: probabilities against one-hot labels) or "nll".
        decay: weight of the squared distance from the first weights, ≥ 0, added to the summed loss.
        seed: of the network's first weights.

    Differs from the authors' code in the optimiser: L-BFGS from the best constant temperature in place of 100,000
    steps of Adam, and inputs in units of their standard deviation.
    """

    name = "pts"
    paper = (
        "Tomani et al., Parameterized Temperature Scaling for Boosting the Expressive Power in Post-Hoc Uncertainty "
        "Calibration, ECCV 2022, arXiv:2102.12182"
    )
    cite = "tomani2022parameterized"
    equation = "softmax(z / T) with T = |network(k largest logits, sorted)|"
    centre: Float[Tensor, " F"]
    spread: Float[Tensor, " F"]

    allowed = {"largest": "[1, inf)", "hidden": "[1, inf)", "decay": "[0, inf)"}

    def __init__(
        self, largest: int = 10, hidden: int = 5, loss: Loss = "mse", decay: float = 10.0, seed: int = 0
    ) -> None:
        super().__init__()
        if largest < 1 or hidden < 1:
            raise ValueError(f"largest and hidden must be at least 1, got {largest} and {hidden}")
        if loss not in ("nll", "mse"):
            raise ValueError(f"loss must be 'nll' or 'mse', got {loss!r}")
        self.largest = largest
        self.hidden = hidden
        self.loss: Loss = loss
        self.decay = decay
        self.seed = seed

    def require_classes(self, classes: int) -> None:
        """Raises ValueError unless these many classes give as many largest logits as the network reads."""
        if min(self.largest, classes) != len(self.centre):
            raise ValueError(
                f"{self!r} was fitted on the {len(self.centre)} largest logits, but these have {classes} classes; fit "
                "it on logits of the same model and class mask"
            )

    def features(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N F"]:
        """The largest logits, in descending order; -inf as the row's smallest finite one."""
        top = rows.topk(min(self.largest, rows.shape[-1]), dim=-1).values
        smallest = torch.where(top.isneginf(), torch.inf, top).amin(dim=-1, keepdim=True)
        return top.maximum(smallest)

    def start(self, features: Float[Tensor, "N F"], temperature: float) -> Float[Tensor, " P"]:
        """Random hidden layers, last weights 0, last bias the temperature."""
        self.centre = features.mean(dim=0)
        self.spread = features.std(dim=0, unbiased=False).clamp_min(1e-12)
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        for inputs in (features.shape[1], self.hidden):
            weights = torch.randn(self.hidden, inputs, generator=generator, dtype=torch.float64) * (2 / inputs) ** 0.5
            parts += [weights.flatten(), torch.zeros(self.hidden, dtype=torch.float64)]
        parts += [torch.zeros(self.hidden, dtype=torch.float64), torch.tensor([temperature], dtype=torch.float64)]
        return torch.cat(parts).to(features.device)

    def temperature_of(self, features: Float[Tensor, "N F"], parameters: Float[Tensor, " P"]) -> Float[Tensor, " N"]:
        """|network|, between 0.001 and 1000."""
        width, hidden = features.shape[1], self.hidden
        sizes = [hidden * width, hidden, hidden * hidden, hidden, hidden, 1]
        first, first_bias, second, second_bias, last, last_bias = parameters.split(sizes)
        units = (features - self.centre.double()) / self.spread.double()
        units = (units @ first.view(hidden, width).T + first_bias).relu()
        units = (units @ second.view(hidden, hidden).T + second_bias).relu()
        return (units @ last + last_bias).abs().clamp(_SMALLEST, _LARGEST)
