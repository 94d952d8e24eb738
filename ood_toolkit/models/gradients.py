"""Gradients on the maps of normalisation layers, from one pass that keeps nothing before the first of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

from ood_toolkit.models.stages import Stages, hooked
from ood_toolkit.outputs import full_precision

Reduce = Callable[[Float[Tensor, "N K H W"]], Float[Tensor, "N K"]]
"""What is kept of the gradient on one map: a number per channel."""


def normalisation_layers(model: nn.Module, stages: Stages, within: Sequence[str] | None) -> tuple[str, ...]:
    """The modules whose outputs are normalised maps, before any activation: batch, group and instance norms.

    Of a norm that brings its own activation (timm's `BatchNormAct2d`), the module between the two.

    Args:
        model: the model.
        stages: its inner layers.
        within: names of modules that they must lie in, "" for the whole model; by default the last two stages, or the
            whole model where these have none.

    Raises:
        ValueError: says which of the names is no module, or that there is no such layer.
    """
    known = dict(model.named_modules())
    norms = [name for name, module in known.items() if isinstance(module, BatchNorm | nn.GroupNorm | InstanceNorm)]
    places = stages.names[-2:] if within is None else tuple(within)
    missing = sorted(set(places) - known.keys())
    if missing:
        raise ValueError(f"{type(model).__name__} has no layers {missing}; name some of its modules")
    inside = [n for n in norms if any(not place or n == place or n.startswith(f"{place}.") for place in places)]
    if within is None and not inside:
        inside = norms
    if not inside:
        where = f" in {', '.join(places)}" if within else ""
        raise ValueError(f"{type(model).__name__} has no batch, group or instance norm{where}")
    return tuple(f"{name}.drop" if f"{name}.drop" in known and f"{name}.act" in known else name for name in inside)


class GradientWatch:
    """Reduces the gradients that arrive at some modules' outputs as soon as they arrive.

    Autograd begins at the first of the modules: what leads there is run without a graph where nothing else asks for
    one. Use it as `with watch.watching(model): …`, run the model inside, then call `norms`.

    Args:
        names: the modules; an output that is no map (N, K, H, W) is passed over.
        reduce: what to keep of a gradient.
    """

    def __init__(self, names: Sequence[str], reduce: Reduce) -> None:
        self._names = names
        self._reduce = reduce
        self._starts: list[Tensor] = []
        self._found: list[Tensor | None] = []
        self._channels: list[int] = []

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """While this lasts, a pass with gradients is watched."""
        return hooked(model, dict.fromkeys(self._names, self._watch))

    def norms(self, objective: Float[Tensor, " N"]) -> Float[Tensor, "N L"]:
        """`‖s‖₂ / √K` for every layer's reduced gradient s, K the channels of all layers.

        So the squares of a row add up to the mean of s² over all channels.

        Args:
            objective: what the gradients are of, one number per image. Taken once: its graph is gone afterwards.
        """
        if not self._starts or not objective.requires_grad:
            raise ValueError("no normalisation layer gives a map (N, K, H, W) on the way to the head")
        torch.autograd.grad(objective, self._starts, torch.ones_like(objective), allow_unused=True)
        nothing = objective.new_zeros(len(objective), 1)
        lengths = [torch.linalg.vector_norm(nothing if s is None else s, dim=1) for s in self._found]
        return torch.stack(lengths, dim=1) / sum(self._channels) ** 0.5

    def _watch(self, output: Tensor) -> Tensor | None:
        if not isinstance(output, Tensor) or output.ndim != 4:
            return None
        if not output.requires_grad:
            start = output.detach().requires_grad_()
            self._starts.append(start)
            output = start.clone()  # a later layer may work in place, which a leaf forbids
        place = len(self._found)
        self._found.append(None)
        self._channels.append(output.shape[1])

        def keep(gradient: Tensor) -> None:
            self._found[place] = self._reduce(full_precision(gradient.detach()))

        # of the tensor as it is now: a layer that works in place later does not change what arrives here
        output.register_hook(keep)
        return output


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """While this lasts, no parameter asks for gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def nonzero_share(gradient: Float[Tensor, "N K H W"]) -> Float[Tensor, "N K"]:
    """The share of positions where a channel's gradient is not 0."""
    return (gradient != 0).to(gradient.dtype).mean(dim=(2, 3))


def mean_gradient(gradient: Float[Tensor, "N K H W"]) -> Float[Tensor, "N K"]:
    """A channel's mean gradient over its positions."""
    return gradient.mean(dim=(2, 3))
