"""Taps: what detectors of inner layers keep of a pass, reduced on the device to one small tensor per image.

`Classifier(model, taps=("stage_means", "stage_gram(layers=('layer3','layer4'))"))` fills `outputs.taps` under these
very words.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ood_toolkit.detectors.ash import concentration, kept_count, largest
from ood_toolkit.detectors.rankfeat import without_rank_one
from ood_toolkit.fitted import parse
from ood_toolkit.models.afterwards import (
    AugmentedLogits,
    DropoutLogits,
    GradientDensity,
    GradientMeans,
    NudgedFeatures,
)
from ood_toolkit.models.reductions import (
    ActivationExtremes,
    BlockMaxima,
    Reduction,
    ShallowStatistics,
    StageGram,
    StageMeans,
    Tap,
)
from ood_toolkit.models.stages import Map, Stages, as_map, hooked, like_output, shown_inputs

Edit = Callable[[Map], Map]


class Edited(Tap):
    """The features that enter the head when a map on the way there is edited.

    Where the head reads the mean of the very map, they cost nothing beyond the edit. Anywhere else, the model runs
    once more with the edited map in place.
    """

    @abstractmethod
    def edits(self, stages: Stages) -> list[tuple[str, Edit]]:
        """Module names and what to do to their maps; more than one give a stack of features."""


class RankOneRemoved(Edited):
    """(N, 2, D): features after the last stage, then the last but one, has lost its rank-1 component."""

    name = "rank_one_removed"

    def edits(self, stages: Stages) -> list[tuple[str, Edit]]:
        """The two last stages."""
        if len(stages.names) < 2:
            raise ValueError("RankFeat edits the last two stages, but this model shows fewer")
        return [(name, without_rank_one) for name in (stages.names[-1], stages.names[-2])]


class ShapedMap(Edited):
    """(N, D): the features when all numbers of an image's last map are shaped together."""

    def edits(self, stages: Stages) -> list[tuple[str, Edit]]:
        """The map that is pooled, or the last stage."""
        if not (stages.pooled or stages.names):
            raise ValueError("this model shows no feature map")
        return [(stages.pooled or stages.names[-1], lambda layer: self.shape(layer.flatten(1)).view_as(layer))]

    @abstractmethod
    def shape(self, rows: Float[Tensor, "N DP"]) -> Float[Tensor, "N DP"]:
        """What becomes of all numbers of a map."""


class _Percentile(ShapedMap):
    def __init__(self, percentile: float) -> None:
        self.percentile = percentile


class ASHPMap(_Percentile):
    """ASH-P on the map."""

    name = "ash_p_map"

    def __init__(self, percentile: float = 60.0) -> None:
        super().__init__(percentile)

    def shape(self, rows: Float[Tensor, "N DP"]) -> Float[Tensor, "N DP"]:
        """The largest numbers; zero elsewhere."""
        return rows * largest(rows, self.percentile)


class ASHBMap(_Percentile):
    """ASH-B on the map."""

    name = "ash_b_map"

    def __init__(self, percentile: float = 65.0) -> None:
        super().__init__(percentile)

    def shape(self, rows: Float[Tensor, "N DP"]) -> Float[Tensor, "N DP"]:
        """The sum, shared equally by the largest numbers; zero elsewhere."""
        share = rows.sum(dim=1, keepdim=True) / kept_count(rows.shape[1], self.percentile)
        return largest(rows, self.percentile) * share


class ASHSMap(_Percentile):
    """ASH-S on the map."""

    name = "ash_s_map"

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__(percentile)

    def shape(self, rows: Float[Tensor, "N DP"]) -> Float[Tensor, "N DP"]:
        """The largest numbers, scaled by how much was pruned; zero elsewhere."""
        return rows * largest(rows, self.percentile) * concentration(rows, self.percentile).exp()


class SCALEMap(_Percentile):
    """SCALE on the map."""

    name = "scale_map"

    def __init__(self, percentile: float = 85.0) -> None:
        super().__init__(percentile)

    def shape(self, rows: Float[Tensor, "N DP"]) -> Float[Tensor, "N DP"]:
        """All numbers, scaled."""
        return rows * concentration(rows, self.percentile).exp()


class ReActMap(ShapedMap):
    """ReAct on the map, at a threshold that is given beforehand: the pass that would show it is this one."""

    name = "react_map"

    def __init__(self, threshold: float = 1.0) -> None:
        self.threshold = threshold

    def shape(self, rows: Float[Tensor, "N DP"]) -> Float[Tensor, "N DP"]:
        """Numbers, at most the threshold."""
        return rows.clamp(max=self.threshold)


TAPS: dict[str, type[Tap]] = {
    tap.name: tap
    for tap in (
        StageMeans,
        StageGram,
        ShallowStatistics,
        BlockMaxima,
        ActivationExtremes,
        RankOneRemoved,
        ASHPMap,
        ASHBMap,
        ASHSMap,
        SCALEMap,
        ReActMap,
        NudgedFeatures,
        DropoutLogits,
        AugmentedLogits,
        GradientDensity,
        GradientMeans,
    )
}
"""Every tap that a model can give, by name. A new one is a class and a word here."""


_ELSEWHERE = {
    "member_logits": "comes from no single classifier",
    "local_mcm": "only zero-shot models show it; take --model open_clip:ARCH/TAG",
    "negative_cosines": "only zero-shot models have it; take --model open_clip:ARCH/TAG with --negatives",
    "outlier_cosines": "only zero-shot models have it; take --model open_clip:ARCH/TAG with --outlier-prompt",
}


def missing_tap(spec: str, model: nn.Module) -> str:
    """Why the model does not give a tap that `build_tap` does not know, and what to do."""
    name, _ = parse(spec)
    reasons: Mapping[str, str] = getattr(model, "tap_reasons", {})
    return reasons.get(name) or _ELSEWHERE.get(
        name, "no tap of that name is known; a model brings its own in the attribute own_taps, see docs/own-methods.md"
    )


def build_tap(spec: str, own: Mapping[str, Callable[..., Tap]] = MappingProxyType({})) -> Tap | None:
    """The tap that a spec such as `stage_means(layers=('layer4',))` asks for; None if the model does not give it.

    Args:
        spec: name and arguments.
        own: the taps that the model brings beside `TAPS`, by name.
    """
    name, arguments = parse(spec)
    kind: Any = own.get(name, TAPS.get(name))
    if kind is None:
        return None
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"tap {spec}: {error}; it takes {', '.join(inspect.signature(kind).parameters)}") from None


class TapPlan:
    """How the passes of one model fill one set of taps.

    Args:
        model: the model.
        stages: its inner layers.
        taps: taps by spec.
    """

    def __init__(self, model: nn.Module, stages: Stages, taps: dict[str, Tap]) -> None:
        self._model = model
        self._layers: dict[str, tuple[str, ...]] = {}
        self._free: dict[str, dict[str, tuple[Callable[[Map], Tensor], Callable[[Map], Tensor]]]] = {}
        self._before: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {}
        self._reruns: list[tuple[str, str, Edit]] = []
        for spec, tap in taps.items():
            if isinstance(tap, Reduction):
                self._layers[spec] = tap.chosen(stages)
                for layer in self._layers[spec]:
                    if tap.before:
                        self._before.setdefault(layer, {})[spec] = tap.reduce
                    else:
                        self._free.setdefault(layer, {})[spec] = (tap.reduce, tap.reduce_tokens)
            elif isinstance(tap, Edited):
                edits = tap.edits(stages)
                self._layers[spec] = tuple(layer for layer, _ in edits)
                for layer, edit in edits:
                    if layer == stages.pooled:
                        pooled = _then_mean(edit)
                        self._free.setdefault(layer, {})[spec] = (pooled, pooled)
                    else:
                        self._reruns.append((spec, layer, edit))
        self._joins = {spec: tap.join for spec, tap in taps.items() if isinstance(tap, Reduction)}
        missing = sorted(
            {layer for layers in self._layers.values() for layer in layers} - dict(model.named_modules()).keys()
        )
        if missing or not all(self._layers.values()):
            raise ValueError(
                f"{type(model).__name__} has no layers {missing}; name some of its modules"
                if missing
                else f"no stages are found in {type(model).__name__}; name them with layers=(...)"
            )

    @property
    def watched(self) -> tuple[str, ...]:
        """Modules that a watched pass looks at."""
        return tuple({**self._free, **self._before})

    @contextmanager
    def watching(self, kept: dict[tuple[str, str], Tensor]) -> Iterator[None]:
        """While this lasts, a pass leaves its reductions in `kept`, by (spec, layer)."""

        def reduce(layer: str) -> Callable[[Tensor], None]:
            def keep(output: Tensor) -> None:
                seen = as_map(output, self._model)
                # no gradient goes through a tap, and a graph would keep all of its intermediate maps
                with torch.no_grad():
                    for spec, functions in self._free[layer].items():
                        kept[spec, layer] = functions[output.ndim == 3](seen.detach())

            return keep

        def reduce_input(layer: str) -> Callable[[Tensor], None]:
            def keep(entering: Tensor) -> None:
                with torch.no_grad():
                    for spec, function in self._before[layer].items():
                        kept[spec, layer] = function(entering.detach())

            return keep

        with (
            hooked(self._model, {layer: reduce(layer) for layer in self._free}),
            shown_inputs(self._model, {layer: reduce_input(layer) for layer in self._before}),
        ):
            yield

    def fill(
        self,
        kept: dict[tuple[str, str], Tensor],
        rerun: Callable[[AbstractContextManager[None]], Tensor],
    ) -> dict[str, Tensor]:
        """The taps by spec.

        Args:
            kept: what the watched pass has left.
            rerun: runs the model on the same images inside a context, and returns what entered the head.
        """
        for spec, layer, edit in self._reruns:
            kept[spec, layer] = rerun(hooked(self._model, {layer: self._replacing(edit)}))
        filled: dict[str, Tensor] = {}
        for spec, layers in self._layers.items():
            silent = [layer for layer in layers if (spec, layer) not in kept]
            if silent:
                raise ValueError(f"the layers {silent} are not called in a forward pass")
            parts = [kept[spec, layer] for layer in layers]
            if spec in self._joins:
                filled[spec] = self._joins[spec](parts)
            else:
                filled[spec] = parts[0] if len(parts) == 1 else torch.stack(parts, dim=1)
        return filled

    def _replacing(self, edit: Edit) -> Callable[[Tensor], Tensor]:
        return lambda output: like_output(edit(as_map(output, self._model)), output, self._model)


def _then_mean(edit: Edit) -> Callable[[Map], Tensor]:
    return lambda layer: edit(layer).mean(dim=2)
