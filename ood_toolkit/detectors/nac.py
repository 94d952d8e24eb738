"""NAC-UE: do the neurons take states in which the training data often put them?"""

import math
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs


def neuron_gradients(logits: Float[Tensor, "N C"], weight: Float[Tensor, "C D"]) -> Float[Tensor, "N D"]:
    """Gradient with respect to the features of the KL divergence from the uniform distribution to the softmax.

    `∂/∂f KL(u ‖ softmax(W f + b)) = Wᵀ (softmax − u)`: one matrix product instead of a backward pass.
    """
    return logits.softmax(dim=1).sub_(1 / logits.shape[1]) @ weight


class NACDetector(Detector):
    """Flags inputs that put the neurons of the penultimate layer into states rarely seen in training.

    Choose it when few training rows are at hand: 1,000 are enough in the paper. A neuron's state is
    `σ(α · f ⊙ ∂KL(u ‖ p)/∂f)`; [0, 1] is cut into intervals, and an interval is covered by
    `min(count / O*, 1)`, counting training rows. The score is minus the mean coverage of the row's states.

    Args:
        steepness: α of the sigmoid. The paper's ImageNet/ResNet-50 value for the penultimate layer is 3000.
        intervals: M − 1 intervals of equal length; the authors' M = 50 thresholds make 49.
        full: O*, the count at which an interval is fully covered. The authors' ImageNet value is 10, for 1,000 rows.
        rows: training rows to count, drawn at random from those given; None counts all (then raise `full` with them).
        seed: of that draw.

    Differs from the paper in using one layer, the one that `Outputs` hold; the paper sums over up to four. Differs
    from the authors' code in that a state that rounds to 1 counts in the last interval instead of in none, and that
    the rows are not balanced over classes.
    """

    name = "nac"
    paper = (
        "Liu et al., Neuron Activation Coverage: Rethinking Out-of-distribution Detection and Generalization, "
        "ICLR 2024, arXiv:2306.02879"
    )
    cite = "liu2024nac"
    equation = "−(1/D) Σ_d Φ_d(σ(α f_d ∂KL(u ‖ p)/∂f_d)) with Φ_d = min(training rows in the interval / O*, 1)"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(CD)"
    weight: Float[Tensor, "C D"]
    coverage: Float[Tensor, "D intervals"]

    allowed = {"steepness": "(0, inf)", "intervals": "[1, inf)", "full": "(0, inf)", "rows": "[1, inf)"}

    def __init__(
        self,
        steepness: float = 3000.0,
        intervals: int = 49,
        full: float = 10.0,
        rows: int | None = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.steepness = steepness
        self.intervals = intervals
        self.full = full
        self.rows = rows
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """Copies the head's weight and counts the training states of every neuron. Returns itself."""
        if not len(train):
            raise ValueError("fitting needs training rows, but there are none")
        self.weight = train.head.weight.clone()
        counts = torch.zeros(train.width * self.intervals, dtype=torch.int64, device=self.weight.device)
        for batch in subset(train, self.rows or len(train), self.seed):
            counts += torch.bincount(self._cells(batch).flatten(), minlength=len(counts))
        self.coverage = (counts / self.full).clamp_max(1.0).to(self.weight.dtype).view(train.width, self.intervals)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative mean coverages in [−1, 0]; higher = more out-of-distribution."""
        return -self.coverage.flatten()[self._cells(outputs)].mean(dim=1)

    def _cells(self, outputs: Outputs) -> Int[Tensor, "N D"]:
        """Position in the flattened coverage of each neuron's state.

        The interval of a sigmoid is found on its argument: no state saturates.
        """
        arguments = self.steepness * outputs.features * neuron_gradients(outputs.logits, self.weight)
        inner = [step / self.intervals for step in range(1, self.intervals)]
        edges = arguments.new_tensor([math.log(edge / (1 - edge)) for edge in inner])
        offsets = torch.arange(outputs.width, device=arguments.device) * self.intervals
        return torch.bucketize(arguments, edges, right=True).add_(offsets)
