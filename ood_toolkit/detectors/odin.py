"""ODIN: heat the softmax, nudge the input towards its own prediction, and see how far the confidence rises."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Differentiable, LiveDetector, as_pixels


def heated_one_minus_msp(logits: Float[Tensor, "N C"], temperature: float) -> Float[Tensor, " N"]:
    """`1 − max_c softmax(z / T)_c` in float64, as the sum of the other terms.

    At T = 1000 all values lie within about 10⁻³ of `1 − 1/C`: float32 would leave a few thousand different ones.
    """
    exact = logits.double()
    heated = (exact - exact.amax(dim=1, keepdim=True)) / temperature
    others = heated.exp().scatter(1, logits.argmax(dim=1, keepdim=True), 0.0).sum(dim=1)
    return others / (1 + others)


def prediction_gradient(
    classifier: Differentiable, images: Float[Tensor, "N 3 H W"], temperature: float
) -> Float[Tensor, "N 3 H W"]:
    """`∇ₓ −log softmax_ŷ(z / T)`, per unit of a pixel: where to go to lower the confidence in the own prediction."""
    inputs = as_pixels(images).clone().requires_grad_()
    logits = classifier.differentiate(inputs).logits
    with torch.enable_grad():
        losses = torch.nn.functional.cross_entropy(logits / temperature, logits.argmax(dim=1), reduction="sum")
    return torch.autograd.grad(losses, inputs)[0]


def towards_prediction(
    classifier: Differentiable, images: Float[Tensor, "N 3 H W"], temperature: float, eps: float
) -> Float[Tensor, "N 3 H W"]:
    """`x − ε sign(∇ₓ −log softmax_ŷ(z / T))`: the input after one step that raises its own prediction."""
    return as_pixels(images) - eps * prediction_gradient(classifier, images, temperature).sign()


class ODINDetector(LiveDetector):
    """Flags images whose heated softmax stays flat after a small step towards their own prediction.

    The step raises the confidence of in-distribution images more. Costs two forward passes and one backward pass per
    image; needs no training data.

    Args:
        temperature: T > 0, in logit units. The paper's value is 1000.
        eps: ε, the step in pixel units, 0 to 1. The paper's is 0.0014 for CIFAR-10, 0.002 for CIFAR-100; 0 only heats.

    The authors divide the step by the standard deviations of the input normalisation, because their images are
    normalised already; in pixel units, as here, that is a step of ε in every channel. As in the authors' code pixels
    are not clipped to [0, 1] afterwards. Where the gradient is 0, nothing moves.

    Differs from the paper in direction only: it is 1 minus the confidence. Scores are float64 whatever the images
    are.
    """

    name = "odin"
    paper = (
        "Liang, Li and Srikant, Enhancing The Reliability of Out-of-distribution Image Detection in Neural Networks, "
        "ICLR 2018, arXiv:1706.02690, Eq. 1 and 2"
    )
    cite = "liang2018odin"
    equation = "1 − max_c softmax_c(z(x̃) / T) with x̃ = x + ε sign(∇ₓ log softmax_y(z(x) / T))"
    cost = "2 forward passes, 1 backward pass"

    allowed = {"temperature": "(0, inf)", "eps": "[0, 1]"}

    def __init__(self, temperature: float = 1000.0, eps: float = 0.0014) -> None:
        super().__init__()
        self.temperature = temperature
        self.eps = eps

    def score(self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        """(N,) float64 in [0, 1 − 1/C]; higher = more out-of-distribution."""
        if self.eps:
            images = towards_prediction(classifier, images, self.temperature, self.eps)
        return heated_one_minus_msp(classifier(images).logits, self.temperature)
