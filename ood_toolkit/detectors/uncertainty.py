"""Scores of several predictions for one input: an ensemble, Monte-Carlo dropout, or test-time augmentation."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.entropy import entropy
from ood_toolkit.detectors.layers import tap_spec
from ood_toolkit.detectors.softmax import log_probabilities
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import row_chunks

_MEMBERS, _DROPOUT, _VIEWS = "member_logits", "dropout_logits", "augmented_logits"


def log_mean(member_logs: Float[Tensor, "N M C"]) -> Float[Tensor, "N C"]:
    """The log of the mean of the members' probabilities, exact at both ends."""
    small = member_logs.logsumexp(dim=1) - math.log(member_logs.shape[1])
    large = member_logs.expm1().mean(dim=1).clamp_min(-0.75).log1p()
    return torch.where(small > -0.5, large, small)


def predictive_entropy(member_logits: Float[Tensor, "N M C"]) -> Float[Tensor, " N"]:
    """`H(p̄)`, p̄ the mean of the members' probabilities: all uncertainty, whatever its source."""
    return entropy(log_mean(log_probabilities(member_logits)))


def expected_entropy(member_logits: Float[Tensor, "N M C"]) -> Float[Tensor, " N"]:
    """`(1/M) Σ_m H(p_m)`: the uncertainty that the members agree on."""
    return entropy(log_probabilities(member_logits)).mean(dim=1)


def mutual_information(member_logits: Float[Tensor, "N M C"]) -> Float[Tensor, " N"]:
    """`H(p̄) − (1/M) Σ_m H(p_m)`, as `(1/M) Σ_m KL(p_m ‖ p̄)` in terms that are all at least 0: nothing cancels."""
    logs = log_probabilities(member_logits)
    mean = log_mean(logs).unsqueeze(1)
    lowest = torch.finfo(logs.dtype).min / 4
    gap = logs.clamp_min(lowest) - mean.clamp_min(lowest)
    # p − p̄ without rounding, near 0 and near 1
    difference = torch.where(mean > -0.5, logs.expm1() - mean.expm1(), logs.exp() - mean.exp())
    terms = logs.exp() * gap - difference
    return terms.sum(dim=2).mean(dim=1)


def variation_ratio(member_logits: Float[Tensor, "N M C"]) -> Float[Tensor, " N"]:
    """`1 − (votes for the class with most votes) / M`."""
    votes = torch.zeros_like(member_logits[:, 0])
    chosen = member_logits.argmax(dim=2)
    votes.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=votes.dtype))
    return 1 - votes.amax(dim=1) / member_logits.shape[1]


def one_minus_mean_msp(member_logits: Float[Tensor, "N M C"]) -> Float[Tensor, " N"]:
    """`1 − max_c p̄_c`."""
    return -log_mean(log_probabilities(member_logits)).amax(dim=1).expm1()


def predictive_variance(member_logits: Float[Tensor, "N M C"]) -> Float[Tensor, " N"]:
    """The variance of each class's probability over the members (divided by M − 1), mean over classes."""
    return log_probabilities(member_logits).expm1().var(dim=1).mean(dim=1)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mutual_information": mutual_information,
    "variation_ratio": variation_ratio,
    "expected_entropy": expected_entropy,
    "predictive_entropy": predictive_entropy,
    "msp": one_minus_mean_msp,
    "variance": predictive_variance,
}
"""What `mc_dropout` and `tta` can measure, by name."""


class _OfMembers(Detector):
    """A statistic of a tap, (N, M, C): by default `outputs.taps["member_logits"]`, which an ensemble fills."""

    family = "uncertainty"
    reads = frozenset({_MEMBERS})
    cost = "O(MC)"
    taps = (_MEMBERS,)

    def _statistic(self) -> Callable[[Tensor], Tensor]:
        return STATISTICS[type(self).name]

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) at least 0; higher = more uncertain."""
        tap = self.taps[0]
        if tap not in outputs.taps:
            raise ValueError(
                f"{self.name} reads the tap {tap!r}, the (N, M, C) logits of M members, but the outputs hold the taps "
                f"{sorted(outputs.taps)}"
            )
        member_logits, statistic = outputs.taps[tap], self._statistic()
        chunks = row_chunks(len(member_logits), member_logits.shape[1] * member_logits.shape[2])
        return torch.cat([statistic(member_logits[i : i + chunks.step]) for i in chunks])


class MutualInformationDetector(_OfMembers):
    """Flags inputs on which the members disagree, however sure each is (BALD).

    Separates what more data would settle (members differ) from what it would not (all are undecided).

    Differs from the paper in nothing.
    """

    name = "mutual_information"
    paper = (
        "Houlsby et al., Bayesian Active Learning for Classification and Preference Learning, arXiv:1112.5745, Eq. 2"
    )
    cite = "houlsby2011bald"
    equation = "H((1/M) Σ_m p_m) − (1/M) Σ_m H(p_m)"


class VariationRatioDetector(_OfMembers):
    """Flags inputs on which many members vote against the majority. Coarse: M values at most, so many ties.

    Choose it where members' probabilities cannot be compared.

    Differs from the paper in nothing.
    """

    name = "variation_ratio"
    paper = "Freeman, Elementary Applied Statistics, 1965; Gal, Uncertainty in Deep Learning, 2016"
    cite = "gal2016uncertainty"
    equation = "1 − max_c #{m : y_m = c} / M"


class ExpectedEntropyDetector(_OfMembers):
    """Flags inputs on which the members are undecided on average (aleatoric uncertainty).

    Choose it to find ambiguous inputs, such as wrong predictions; members that disagree do not raise it.

    Differs from the paper in nothing.
    """

    name = "expected_entropy"
    paper = "Depeweg et al., Decomposition of Uncertainty in Bayesian Deep Learning, ICML 2018, arXiv:1710.07283"
    cite = "depeweg2018decomposition"
    equation = "(1/M) Σ_m H(p_m)"


class PredictiveEntropyDetector(_OfMembers):
    """Flags inputs whose mean prediction is spread over many classes: the usual score of a deep ensemble.

    The default where members are at hand: it is `expected_entropy` plus `mutual_information`.

    Differs from the paper in nothing.
    """

    name = "predictive_entropy"
    paper = (
        "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation Using Deep Ensembles, "
        "NeurIPS 2017, arXiv:1612.01474"
    )
    cite = "lakshminarayanan2017ensembles"
    equation = "H((1/M) Σ_m p_m)"


class _Chosen(_OfMembers):
    """One of `STATISTICS`, by its hyper-parameter."""

    def __init__(self, statistic: str) -> None:
        super().__init__()
        if statistic not in STATISTICS:
            raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
        self.statistic = statistic

    def _statistic(self) -> Callable[[Tensor], Tensor]:
        return STATISTICS[self.statistic]


class MCDropoutDetector(_Chosen):
    """Flags inputs on which one network's predictions under dropout are undecided or differ.

    The members are passes with the network's dropout layers switched on, everything else in eval mode. Choose it where
    the network was trained with dropout and there is no second one to form an ensemble with. It costs as many further
    passes as there are samples, but none beyond the first run: they are kept like features. A model without a dropout
    layer of p > 0 cannot give them; `nn.functional.dropout` and dropout inside fused attention cannot be switched on.

    Args:
        samples: M, passes with dropout, at least 2.
        seed: of the masks. Sample m drops the same units for every image, so a score does not depend on the batch.
        statistic: "predictive_entropy", "mutual_information", "variation_ratio", "expected_entropy", "msp" (1 − the
            largest mean probability) or "variance" (of Bayesian SegNet, pytorch-ood's default).

    Differs from OpenOOD, which takes the softmax of the mean logits; here probabilities are averaged, as in the paper.
    Differs from the usual code in one mask per sample, not per sample and image.
    """

    name = "mc_dropout"
    paper = "Gal and Ghahramani, Dropout as a Bayesian Approximation, ICML 2016, arXiv:1506.02142"
    cite = "gal2016dropout"
    equation = "H((1/M) Σ_m p_m) over M passes with dropout, or another statistic of them"
    reads = frozenset({_DROPOUT})
    cost = "O(MC), after a tap that costs M passes of the model"

    def __init__(self, samples: int = 10, seed: int = 0, statistic: str = "predictive_entropy") -> None:
        super().__init__(statistic)
        if samples < 2:
            raise ValueError(f"samples must be at least 2, got {samples}: one pass cannot differ")
        self.samples = samples
        self.seed = seed

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The logits of the passes, with the `samples` and the `seed` that are asked for."""
        return (tap_spec(_DROPOUT, self, "samples", "seed"),)


class TTADetector(_Chosen):
    """Flags inputs on which one network's predictions for slightly changed copies are undecided or differ.

    The members are the image itself, its mirror image, four small shifts and an enlarged central crop. Choose it with
    a single network without dropout, where such changes leave the class alone: not the mirror image for digits. It
    costs one further pass per copy, 6 by default, kept like features.

    Args:
        flip: whether the mirror image is a copy.
        shift: share of the side that four copies are shifted by, at least one pixel, the edge repeated, in [0, 0.5];
            0 for none of these.
        crop: share of the side that the central crop keeps, in (0, 1]; 1 for no crop.
        statistic: as of `MCDropoutDetector`.

    Differs from the paper in fixed copies, the same for every image, where it draws random ones.
    """

    name = "tta"
    paper = (
        "Ayhan and Berens, Test-time Data Augmentation for Estimation of Heteroscedastic Aleatoric Uncertainty in "
        "Deep Neural Networks, MIDL 2018"
    )
    cite = "ayhan2018tta"
    equation = "H((1/M) Σ_m p_m) over M augmented copies, or another statistic of them"
    reads = frozenset({_VIEWS})
    cost = "O(MC), after a tap that costs M − 1 passes of the model"

    allowed = {"shift": "[0, 0.5]", "crop": "(0, 1]"}

    def __init__(
        self, flip: bool = True, shift: float = 0.04, crop: float = 0.9, statistic: str = "predictive_entropy"
    ) -> None:
        super().__init__(statistic)
        self.flip = flip
        self.shift = shift
        self.crop = crop

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The logits of the copies that are asked for."""
        return (tap_spec(_VIEWS, self, "flip", "shift", "crop"),)
