"""What every detector is: outputs in, one number per row out, higher = more out-of-distribution."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ood_toolkit.fitted import Fitted
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks

if TYPE_CHECKING:
    from ood_toolkit.deploy import GuardedClassifier

Family = Literal["logits", "features", "layers", "live", "uncertainty", "vision-language"]
Needs = Literal["nothing", "head", "train"]


class Detector(Fitted, ABC):
    """Gives every row of `Outputs` a score: higher = more out-of-distribution, or more likely misclassified.

    A subclass sets `name`, `paper` and the class facts below, stores its hyper-parameters in `__init__`, learns
    tensors in `fit` and reads only per-row fields and its own tensors in `score`.

    A call computes in the dtype of the outputs that the detector was fitted on; rows of another dtype are brought to
    it, and their scores back. `detector.to(torch.float64)` changes it.
    """

    family: ClassVar[Family] = "features"
    """Where the score looks."""
    needs: ClassVar[Needs] = "nothing"
    """What `fit` needs: nothing, only the head (any outputs of the model will do), or training rows."""
    held_out: ClassVar[bool] = False
    """Whether `fit` wants labelled rows that the model was not trained on: it learns how the model errs."""
    reads: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
    """The per-row fields that `score` reads. One that reads only logits can score calibrated logits too."""
    needs_offset: ClassVar[bool] = False
    """Whether the score reads the common offset of a row's logits, which log-probabilities have lost."""
    cost: ClassVar[str] = ""
    """Cost of scoring one row, for `--list`: an order in C classes, D features, N training rows."""
    taps: ClassVar[tuple[str, ...]] = ()
    """Names of the taps (per-row tensors beside logits and features) that `fit` and `score` read."""
    block_rows: ClassVar[int | None] = None
    """Rows that `__call__` scores at once, None being what fits a cache. For scores with work to redo in each block."""
    sweep: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """The values that automatic choice on a validation OOD set tries, by hyper-parameter; {} where there is none."""
    fitted_like: Float[Tensor, "D 0"]
    """No numbers, in the width and dtype of the outputs that something was learned from."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("fit", "score"):
            if method in vars(cls):
                setattr(cls, method, _takes_outputs(vars(cls)[method]))

    def fit(self, train: Outputs) -> Self:
        """Learns from outputs of in-distribution training inputs. Returns itself."""
        _require_outputs(self, train, ".fit")
        return self

    @abstractmethod
    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) scores: higher = more out-of-distribution. See `__call__` for blockwise scoring."""

    def forward(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """`score`, block by block, so that the memory does not grow with the number of rows."""
        _require_outputs(self, outputs)
        self._require_sizes(outputs)
        given, own = outputs.head.weight.dtype, self._dtype(outputs)
        scores, start = outputs.head.weight.new_zeros(0), 0
        if missing := sorted(set(self.taps) - set(outputs.taps)):
            raise ValueError(
                f"{self.name} reads the tap {missing[0]!r}, but the outputs hold the taps {sorted(outputs.taps)}"
            )
        for block in blocks(outputs, self.block_rows):
            part = self.score(block) if own == given else self.score(block.to(own)).to(given)
            if part.shape != (len(block),):
                raise ValueError(
                    f"{type(self).__name__}.score should give one number per row, ({len(block)},), got "
                    f"{tuple(part.shape)}"
                )
            if not start:
                scores = part.new_empty(len(outputs))
            scores[start : start + len(part)] = part
            start += len(part)
            # left alive, so small a tensor would keep the allocator from using the room of a block's large ones again
            del part
        return scores

    def _dtype(self, outputs: Outputs) -> torch.dtype:
        like = self._buffers.get("fitted_like")
        return outputs.head.weight.dtype if like is None else like.dtype

    def _require_sizes(self, outputs: Outputs) -> None:
        for axis, what, got in (("C", "classes", outputs.classes), ("D", "features", outputs.width)):
            learned = self.learned_size(axis)
            if learned not in (None, got) and (axis == "C" or "features" in self.reads):
                raise ValueError(
                    f"{self!r} was fitted on outputs with {learned} {what}, but these have {got}; fit it on outputs of "
                    "the same model and class mask"
                )

    def wrap(self, model: nn.Module, **settings: Any) -> "GuardedClassifier":
        """This detector and `model` as one module that classifies and says when not to believe it.

        See `ood_toolkit.deploy.GuardedClassifier` for the settings.
        """
        from ood_toolkit.deploy import GuardedClassifier

        return GuardedClassifier(model, self, **settings)


def _takes_outputs(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same `fit` or `score`, which refuses anything but `Outputs`; `fit` remembers their width and dtype."""

    @functools.wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        outputs: Any = next(iter((*given, *named.values())), None)
        _require_outputs(self, outputs, f".{method.__name__}")
        result = method(self, *given, **named)
        if method.__name__ == "fit" and any(tensor.is_floating_point() for tensor in self.buffers()):
            self.fitted_like = outputs.head.weight.new_empty(outputs.width, 0)
        return result

    return guarded


def _require_outputs(detector: object, outputs: object, method: str = "") -> None:
    if not isinstance(outputs, Outputs):
        got = f"a tensor {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TypeError(
            f"{type(detector).__name__}{method} takes Outputs, got {got}; for logits alone write "
            "Outputs.from_logits(logits, labels), else Outputs(logits=…, features=…, labels=…, head=…)"
        )


def as_pixels(images: Tensor) -> Float[Tensor, "N 3 H W"]:
    """Images as floats in [0, 1], detached: uint8 is divided by 255."""
    return images.detach() if images.is_floating_point() else images.float() / 255


class Differentiable(Protocol):
    """What a live detector asks of a classifier. `ood_toolkit.models.Classifier` is one."""

    def __call__(self, images: Float[Tensor, "N 3 H W"]) -> Outputs:
        """Outputs without gradients."""
        ...

    def differentiate(self, images: Float[Tensor, "N 3 H W"]) -> Outputs:
        """Outputs whose logits and features carry gradients to the images and to the head's parameters."""
        ...


class LiveDetector(Fitted, ABC):
    """A detector that must run the model itself (for gradients). The model is an argument, never kept.

    `score` gets images as floats in pixel units, [0, 1]: the classifier owns the normalisation.
    """

    family: ClassVar[Family] = "live"
    needs: ClassVar[Needs] = "nothing"
    held_out: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"images"})
    cost: ClassVar[str] = ""
    taps: ClassVar[tuple[str, ...]] = ()

    def fit(self, train: Outputs) -> Self:
        """Learns from outputs of in-distribution training inputs. Returns itself."""
        _require_outputs(self, train, ".fit")
        return self

    @abstractmethod
    def score(self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        """(N,) scores: higher = more out-of-distribution. Leaves no hook, no gradient and no changed weight."""

    def forward(self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        """`score` of the images as floats in [0, 1], whether they come so or as uint8."""
        if not hasattr(classifier, "differentiate"):
            kind = type(classifier).__name__
            raise TypeError(
                f"{type(self).__name__} takes a Classifier and images, got {kind}; write Classifier(model), of "
                "ood_toolkit.models"
            )
        if not isinstance(images, Tensor) or images.ndim != 4:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"{type(self).__name__} takes images as a tensor (N, 3, H, W) in [0, 1], got {got}")
        return self.score(classifier, as_pixels(images))

    def wrap(self, model: nn.Module, **settings: Any) -> "GuardedClassifier":
        """This detector and `model` as one module that classifies and says when not to believe it."""
        from ood_toolkit.deploy import GuardedClassifier

        return GuardedClassifier(model, self, **settings)
