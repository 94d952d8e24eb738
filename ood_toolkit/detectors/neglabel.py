"""Zero-shot detection with names of what the classes are not: NegLabel, and outlier prompts of the user's own."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.clip import ZeroShotDetector
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import row_chunks


def mass_elsewhere(
    cosines: Float[Tensor, "N C"], other_cosines: Float[Tensor, "N G M"], temperature: float
) -> Float[Tensor, " N"]:
    """The softmax mass that falls on M other texts beside the C class texts, mean over G groups of them.

    The logistic of the difference of two log-sum-exps: exact also where it is almost 0.
    """
    known = (cosines / temperature).logsumexp(dim=1, keepdim=True)
    parts = []
    chunks = row_chunks(len(cosines), other_cosines.shape[1] * other_cosines.shape[2])
    for start in chunks:
        others = (other_cosines[start : start + chunks.step] / temperature).logsumexp(dim=2)
        parts.append((others - known[start : start + chunks.step]).sigmoid().mean(dim=1))
    return torch.cat(parts)


class NegLabelDetector(ZeroShotDetector):
    """Flags images that match one of many words far from all class names better than the classes.

    The strongest zero-shot detector where a large vocabulary is at hand. It reads the tap "negative_cosines", (N, M):
    cosines of the image to the texts of M negative labels, chosen when the class names are known.

    Args:
        temperature: τ > 0, divides cosines. 0.01 in the paper: t = 1 on logits of 100 cos.
        groups: n_g, into how many groups the negatives are split; the score is the mean over groups. The paper uses
            100 with 10,000 negatives; M mod n_g surplus negatives, the last ones, are dropped.
        seed: of the permutation that assigns negatives to groups, drawn on the CPU.
        permutation: that permutation itself, of the negatives left; None draws it.

    Differs from the paper in direction: the mass on the negatives is 1 − its score. The authors' code with one group
    sums raw logits; here one group is a softmax as well.
    """

    name = "neglabel"
    paper = (
        "Jiang et al., Negative Label Guided OOD Detection with Pretrained Vision-Language Models, ICLR 2024, "
        "arXiv:2403.20078"
    )
    cite = "jiang2024neglabel"
    equation = "(1/G) Σ_g N_g / (N_g + Σ_c exp(cos(f, t_c) / τ)) with N_g = Σ_{j ∈ g} exp(cos(f, n_j) / τ)"
    reads = frozenset({"features", "negative_cosines"})
    cost = "O(CD + M)"
    taps = ("negative_cosines",)

    def __init__(
        self,
        temperature: float = 0.01,
        groups: int = 100,
        seed: int = 0,
        permutation: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}")
        self.temperature = temperature
        self.groups = groups
        self.seed = seed
        self.permutation = permutation

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1], the softmax mass on negative labels; higher = more out-of-distribution."""
        negatives = self.tap(outputs)
        order = self._order(negatives.shape[1]).to(negatives.device)
        grouped = negatives[:, order].unflatten(1, (self.groups, -1))
        return mass_elsewhere(self.cosines(outputs), grouped, self.temperature)

    def _order(self, negatives: int) -> Int[Tensor, " M"]:
        kept = negatives - negatives % self.groups
        if kept == 0:
            raise ValueError(f"{self.groups} groups need at least as many negative labels, got {negatives}")
        if self.permutation is None:
            return torch.randperm(kept, generator=torch.Generator().manual_seed(self.seed))
        if sorted(self.permutation) != list(range(kept)):
            raise ValueError(
                f"permutation must hold each of 0 … {kept - 1} once, for {kept} negatives in {self.groups} groups"
            )
        return torch.tensor(self.permutation)


class OutlierPromptsDetector(ZeroShotDetector):
    """Flags images that match prompts you write for what should not come: "a blank page", "a photo of a street".

    Choose it where the outliers have names. It reads the tap "outlier_cosines", (N, M): cosines of the image to the
    texts of the M prompts. The score is the softmax mass on them beside the class texts.

    Args:
        temperature: τ > 0, divides cosines. The paper uses CLIP's own, 0.01.

    Differs from the paper in nothing.
    """

    name = "outlier_prompts"
    paper = "Fort et al., Exploring the Limits of Out-of-Distribution Detection, NeurIPS 2021, arXiv:2106.03004"
    cite = "fort2021limits"
    equation = "N / (N + Σ_c exp(cos(f, t_c) / τ)) with N = Σ_j exp(cos(f, o_j) / τ)"
    reads = frozenset({"features", "outlier_cosines"})
    cost = "O(CD + M)"
    taps = ("outlier_cosines",)

    def __init__(self, temperature: float = 0.01) -> None:
        super().__init__()
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1]; higher = more out-of-distribution."""
        return mass_elsewhere(self.cosines(outputs), self.tap(outputs).unsqueeze(1), self.temperature)
