"""The last linear layer of a classifier, as a value."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.reading import full_precision


@dataclass(frozen=True, eq=False)
class Head:
    """The last linear layer: `logits = features @ weight.T + bias`. Shared by all rows.

    Args:
        weight: (C, D), one row per class.
        bias: (C,); zeros where the layer has none.
    """

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]

    def __post_init__(self) -> None:
        require_tensor(self.weight, "weight", "; of a layer: Head(layer.weight, layer.bias)")
        require_tensor(self.bias, "bias", "; for a layer without one: torch.zeros(classes)")
        if self.weight.ndim != 2 or self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"a head needs a weight (C, D) and a bias (C,), but got {tuple(self.weight.shape)} "
                f"and {tuple(self.bias.shape)}"
            )
        if not (self.weight.is_floating_point() and self.bias.is_floating_point()):
            raise ValueError(f"a head must be floating-point, got {self.weight.dtype} and {self.bias.dtype}")
        dtype = torch.promote_types(full_precision(self.weight).dtype, full_precision(self.bias).dtype)
        for name in ("weight", "bias"):
            object.__setattr__(self, name, getattr(self, name).detach().to(dtype))

    def __call__(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """The logits of `features`."""
        return torch.nn.functional.linear(features, self.weight, self.bias)

    @staticmethod
    def identity(classes: int, like: Tensor) -> "Head":
        """The head of a model known only by its logits: features are the logits themselves."""
        return Head(
            torch.eye(classes, dtype=like.dtype, device=like.device),
            torch.zeros(classes, dtype=like.dtype, device=like.device),
        )

    def select(self, classes: Int[Tensor, " K"]) -> "Head":
        """The head cut down to the given classes, in the given order."""
        classes = classes.to(self.weight.device)
        return Head(self.weight[classes], self.bias[classes])

    def to(self, *args: object, **kwargs: object) -> "Head":
        """Moves or casts both parts, with the arguments of `torch.Tensor.to`."""
        return Head(self.weight.to(*args, **kwargs), self.bias.to(*args, **kwargs))  # pyright: ignore


def require_tensor(value: object, name: str, remedy: str = "; torch.as_tensor makes one") -> Tensor:
    """The value, if it is a tensor; raises TypeError otherwise."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}{remedy}")
    return value
