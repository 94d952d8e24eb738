"""ASH, SCALE and ReAct on the feature map before pooling, instead of on the pooled features."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.ash import ActivationShaping
from ood_toolkit.detectors.layers import tap_spec
from ood_toolkit.detectors.react import ReActDetector
from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.detectors.scale import SCALEDetector
from ood_toolkit.outputs import Outputs


class MapShaping(Rectifier):
    """Scores the logits of a shaped map. A subclass names the hyper-parameters that shape it.

    Args:
        score: which equation reads the logits, a key of `HEAD_SCORES`.
    """

    family = "layers"
    reads = frozenset({"taps"})
    cost = "O(D·H·W) in the pass, O(C·D)"
    parameter = "percentile"

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The features of the shaped map."""
        return (tap_spec(self.name, self, self.parameter),)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Nothing more: the shaping happened in the pass."""
        return features

    def rectified_logits(self, outputs: Outputs) -> Float[Tensor, "N C"]:
        """The head's logits for the pooled, shaped map."""
        return outputs.taps[self.taps[0]] @ self.weight.T + self.bias


class ASHPMapDetector(MapShaping):
    """Prunes the map: only the largest of all its numbers remain. Needs no training data.

    Choose `ash_p` unless results on maps are to be compared: the authors' networks shape the pooled features, and
    the two rank differently.

    Args:
        percentile: share of the D·H·W numbers that is dropped, in percent.
        score: the equation that reads the new logits.

    Differs from the authors' code, which shapes pooled features; the algorithm is the same.
    """

    name = "ash_p_map"
    paper, cite = ActivationShaping.paper, ActivationShaping.cite
    equation = "S(W g + b) with g the positional mean of the map, all but its k largest numbers set to 0"

    def __init__(self, percentile: float = 60.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)


class ASHBMapDetector(MapShaping):
    """Prunes the map and shares its sum equally among the numbers that remain. Needs no training data.

    Choose `ash_b` unless results on maps are to be compared. A map after a ReLU is mostly zeros (92 % in
    EfficientNet-Lite0), and pooled features are not: a percentile below that share makes zeros, by no more than their
    position, equal to the largest numbers, and the score is near chance.

    Args:
        percentile: share of the D·H·W numbers that is dropped, in percent; above the share of zeros.
        score: the equation that reads the new logits.

    Differs from the authors' code, which shapes pooled features; the algorithm is the same.
    """

    name = "ash_b_map"
    paper, cite = ActivationShaping.paper, ActivationShaping.cite
    equation = "S(W g + b) with g the positional mean of the map, its k largest numbers set to s₁ / k, the rest to 0"

    def __init__(self, percentile: float = 65.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)


class ASHSMapDetector(MapShaping):
    """Prunes the map and scales what remains by how much was pruned. Needs no training data.

    Choose `ash_s` unless results on maps are to be compared.

    Args:
        percentile: share of the D·H·W numbers that is dropped, in percent.
        score: the equation that reads the new logits.

    Differs from the authors' code, which shapes pooled features; the algorithm is the same.
    """

    name = "ash_s_map"
    paper, cite = ActivationShaping.paper, ActivationShaping.cite
    equation = "S(W g + b) with g the positional mean of the map, its k largest numbers times exp(s₁/s₂), the rest 0"

    def __init__(self, percentile: float = 90.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)


class SCALEMapDetector(MapShaping):
    """Scales the map by how concentrated it is, and prunes nothing. Needs no training data.

    Choose `scale` unless results on maps are to be compared.

    Args:
        percentile: share of the D·H·W numbers outside the scaling sum, in percent.
        score: the equation that reads the new logits.

    Differs from the authors' code, which scales pooled features by their own concentration.
    """

    name = "scale_map"
    paper, cite = SCALEDetector.paper, SCALEDetector.cite
    equation = "S(W g + b) with g the positional mean of the map times exp(s₁/s₂)"

    def __init__(self, percentile: float = 85.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)


class ReActMapDetector(MapShaping):
    """Limits every number of the map before pooling. Needs no training data, but a threshold.

    Choose `react`, which learns its threshold, unless results on maps are to be compared. A position of a map is many
    times larger than a mean over positions, so the authors' c = 1, meant for pooled features, cuts most of a
    map's evidence off and can rank below chance (EfficientNet-Lite0's map: 99th percentile 2.7, end 6).

    Args:
        threshold: c, in units of the activations of a position. The authors' ImageNet script uses 1 on pooled features.
        score: the equation that reads the new logits.

    Differs from the authors' code, which limits pooled features.
    """

    name = "react_map"
    paper, cite = ReActDetector.paper, ReActDetector.cite
    equation = "S(W g + b) with g the positional mean of min(map, c)"
    parameter = "threshold"

    allowed = {"threshold": "(0, inf]"}

    def __init__(self, threshold: float = 1.0, score: str = "energy") -> None:
        super().__init__(score)
        self.threshold = threshold
