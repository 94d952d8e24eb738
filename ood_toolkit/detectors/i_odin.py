"""i-ODIN: ODIN whose step moves nothing but the most influential number of the image."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Differentiable, LiveDetector, as_pixels
from ood_toolkit.detectors.odin import heated_one_minus_msp, prediction_gradient


def salient_sign(gradient: Float[Tensor, "N 3 H W"], numbers: int) -> Float[Tensor, "N 3 H W"]:
    """The sign of the gradient where it is largest in absolute value, at so many numbers of an image; 0 elsewhere."""
    flat = gradient.flatten(1)
    chosen = flat.abs().topk(min(numbers, flat.shape[1]), dim=1).indices
    return torch.zeros_like(flat).scatter_(1, chosen, flat.gather(1, chosen).sign()).view_as(gradient)


class IODINDetector(LiveDetector):
    """Flags images whose heated softmax stays flat after a step of their most influential number alone.

    `odin` with its step `ε sign(∇ₓ log softmax_ŷ(z / T))` kept at the one number, a channel of a pixel, whose gradient
    is largest in absolute value, and 0 elsewhere. With a step so small the ranks are nearly those of
    `odin(eps=0)`, a heated softmax: try T and larger steps on a validation set. Needs no training data.

    Args:
        temperature: T > 0, in logit units. OpenOOD's value is 1000, and 1, 10 and 100 are tried.
        eps: ε, the step in pixel units, 0 to 1. OpenOOD's value is 0.0014, and 0.0028 is tried.
        numbers: how many numbers of an image move, those of largest gradient, at least 1. The author's code moves 1,
            and names more as a possibility; all of them are `odin`.

    Differs from the author's code, which is OpenOOD's, in direction, and in that gradients are per unit of a pixel:
    there they are per unit of a normalised pixel, so that where standard deviations differ another channel may have
    the largest. There, a number without any gradient moves down. The step itself is the same. Scores are float64.
    """

    name = "i_odin"
    paper = "Regmi, Image-based Outlier Synthesis With Training Data, CVPR 2026, arXiv:2411.10794"
    cite = "regmi2026image"
    equation = (
        "1 − max_c softmax_c(z(x̃) / T) with x̃ = x + ε sign(g_k) e_k, k = argmax |g|, g = ∇ₓ log softmax_y(z(x) / T)"
    )
    cost = "2 forward passes, 1 backward pass"

    allowed = {"temperature": "(0, inf)", "eps": "[0, 1]", "numbers": "[1, inf)"}

    def __init__(self, temperature: float = 1000.0, eps: float = 0.0014, numbers: int = 1) -> None:
        super().__init__()
        self.temperature = temperature
        self.eps = eps
        self.numbers = numbers

    def score(self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        """(N,) float64 in [0, 1 − 1/C]; higher = more out-of-distribution."""
        if self.eps:
            gradient = prediction_gradient(classifier, images, self.temperature)
            images = as_pixels(images) - self.eps * salient_sign(gradient, self.numbers)
        return heated_one_minus_msp(classifier(images).logits, self.temperature)
