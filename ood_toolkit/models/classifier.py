"""Any image classifier as a function from images to `Outputs`."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from ood_toolkit.models.afterwards import Afterwards
from ood_toolkit.models.compiled import Compiled, compiled_parts
from ood_toolkit.models.head import LOGITS, as_head, as_rows, describe_break, find_head, is_linear, logits_of
from ood_toolkit.models.reductions import Tap
from ood_toolkit.models.stages import find_stages
from ood_toolkit.models.taps import TapPlan, build_tap, missing_tap
from ood_toolkit.outputs import UNKNOWN, Head, Outputs, full_precision

Images = Float[Tensor, "N channels H W"] | UInt8[Tensor, "N channels H W"]

_IMAGE_SIZE = 224
"""Side of the images that `Classifier.head` invents when it is asked before the first batch, in pixels."""


class Classifier(nn.Module):
    """A model that ends in a linear head, as a function from images to `Outputs`: one pass, everything kept.

    Use it for any module. It owns the input normalisation, so that images are in pixel units, [0, 1], everywhere
    else. The model runs in eval mode without gradients, and is left as it was found: no hook, no gradient, the
    training flags as before.

    The head is found at the first batch: the last `nn.Linear` (or 1x1 convolution on pooled features) that is called
    and whose output is the model's output.
    The law `head(features) == logits` is checked there, and its breaking is explained.

    Args:
        model: any module from normalised images to logits; a tuple (the first tensor), a mapping or an object with
            `logits` will do.
        mean: subtracted from every channel, in pixel units, 0 to 1: one value per channel, or one for all.
        std: what every channel is divided by, > 0.
        head: the head's module name; "logits" for a model without one: its logits are its features too, under an
            identity head. Found by itself by default.
        taps: further tensors to keep from inner layers; see `ood_toolkit.models.taps`. A model may bring taps of its
            own as `own_taps`, by name. Those that this model cannot give are left out of `outputs.taps`; `tap_gaps`
            says why.
        amp: run the model under autocast in this dtype (`torch.float16`, `torch.bfloat16`). Features then carry that
            dtype's rounding, but logits are made from them in float32: half precision would make ties.
        compiled: run those parts of the model through `torch.compile` that hold neither the head nor a tapped layer.
            Passes with gradients and the further passes of some taps stay uncompiled.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        head: str | None = None,
        taps: Sequence[str] = (),
        amp: torch.dtype | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"Classifier takes a torch module, got {model!r}; load_classifier takes names")
        if len(mean) != len(std) or min(std, default=0) <= 0:
            raise ValueError(f"mean and std need one value per channel, std > 0; got {tuple(mean)} and {tuple(std)}")
        if head not in (None, LOGITS) and not is_linear(dict(model.named_modules()).get(str(head))):
            known = [name for name, module in model.named_modules() if is_linear(module)]
            raise ValueError(
                f"head {head!r} is not a Linear of {type(model).__name__}; its Linears end with {known[-3:]}"
            )
        self.model = model
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.taps = tuple(taps)
        self.amp = amp
        self.compiled = compiled
        self._compiled: Compiled = {}
        self.head_name = head
        """Module name of the head, or "logits"; None until the first batch has shown it."""
        self.tap_gaps: dict[str, str] = {}
        """Why this model does not give a tap it was asked for, by spec; filled at the first batch."""
        self._taps: dict[str, Tap] = {}
        self._afterwards: dict[str, Afterwards] = {}
        for spec in self.taps:
            tap = build_tap(spec, getattr(model, "own_taps", {}))
            if tap is None:
                self.tap_gaps[spec] = missing_tap(spec, model)
            elif isinstance(tap, Afterwards):
                self._afterwards[spec] = tap
            else:
                self._taps[spec] = tap
        self._plan: TapPlan | None = None
        self._checked = False
        self._fingerprints: dict[tuple[object, ...], str] = {}

    @property
    def built_taps(self) -> Mapping[str, Tap]:
        """The taps that this model gives, by spec."""
        return {**self._taps, **self._afterwards}

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return next((t.device for t in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def layer(self) -> nn.Linear | nn.Conv2d:
        """The model's own head layer, whose parameters carry gradients. ValueError for a model without one."""
        self._find_head()
        if self.head_name == LOGITS:
            raise ValueError(f"{type(self.model).__name__} has no head layer: its logits serve as features")
        layer = self.model.get_submodule(str(self.head_name))
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        return layer

    @property
    def head(self) -> Head:
        """The head that turns features into logits, detached."""
        self._find_head()
        if self.head_name == LOGITS:
            return self(self._blank_images()).head
        return as_head(self.layer)

    def forward(self, images: Images) -> Outputs:
        """Outputs of the images, without gradients; every label is `UNKNOWN`.

        Args:
            images: (N, C, H, W) in pixel units: float in [0, 1], or uint8, on any device.
        """
        if not self._checked:
            self.check(images[:2])
        with torch.no_grad():
            outputs = self._outputs(images, self.amp)
        return self.completed(images, outputs, self.with_taps(()) if self._afterwards else self)

    @property
    def differentiates(self) -> bool:
        """Whether a tap takes gradients of the images."""
        return any(tap.differentiates for tap in self._afterwards.values())

    def completed(self, images: Images, outputs: Outputs, plain: Any) -> Outputs:
        """The outputs of a pass with those taps that are computed afterwards.

        Args:
            images: in pixel units.
            outputs: of these images.
            plain: runs the model without taps: a `Classifier`, or what stands for one.
        """
        if not self._afterwards:
            return outputs
        pixels = images.to(self.device)
        pixels = pixels if pixels.is_floating_point() else pixels.float() / 255
        taps = {spec: tap.compute(plain, pixels, outputs) for spec, tap in self._afterwards.items()}
        return outputs.with_taps(taps)

    def with_taps(self, taps: Sequence[str]) -> "Classifier":
        """The same model, not a copy of it, with these taps instead."""
        other = Classifier(
            self.model,
            mean=self.mean,
            std=self.std,
            head=self.head_name,
            taps=taps,
            amp=self.amp,
            compiled=self.compiled,
        )
        # hashing a gigabyte of weights takes a second, and every store asks
        other._compiled, other._fingerprints = self._compiled, self._fingerprints
        other._checked = self._checked and not (other._taps or other._afterwards)
        return other

    def differentiate(
        self, images: Float[Tensor, "N channels H W"], inside: AbstractContextManager[Any] | None = None
    ) -> Outputs:
        """Outputs whose logits and features carry gradients to `images` and to the head's own parameters.

        Gradients reach whatever requires them when this is called: `images` where its `requires_grad` is set, and
        the parameters of `layer` unless they are frozen. Take them with `torch.autograd.grad`, which leaves no
        `.grad` behind. Runs without autocast, because small gradients vanish in half precision.

        Args:
            images: in pixel units, float in [0, 1].
            inside: entered around the pass, such as hooks on inner layers.
        """
        if not images.is_floating_point():
            raise ValueError(f"gradients need floating-point images in [0, 1], got {images.dtype}")
        if not self._checked:
            self.check(images[:2].detach())
        layer = None if self.head_name == LOGITS else self.layer
        with torch.enable_grad(), _for_gradients(layer, self.model), inside or nullcontext():
            return self._outputs(images, None)

    def check(self, images: Images) -> None:
        """Finds the head and enforces the law `head(features) == logits`. Runs by itself on the first batch.

        Raises:
            ValueError: names the layer that breaks the law, the cause, and what to do.
        """
        self._check_images(images)
        with torch.no_grad(), _evaluating(self.model):
            inputs = self._normalise(images)
            if self.head_name is None:
                self.head_name = find_head(self.model, inputs)
            if self.head_name != LOGITS:
                seen: dict[str, Tensor] = {}
                with _capturing(self.layer, seen):
                    logits = logits_of(self.model(inputs))
                broken = describe_break(type(self.model).__name__, self.head_name, self.head, seen, logits)
                if broken:
                    raise ValueError(broken)
            if self._taps and self._plan is None:
                self._plan = self._plan_taps(images)
            self._check_afterwards(images)
        self._checked = True

    def _plan_taps(self, images: Tensor) -> TapPlan:
        """Tries every tap by itself; a plan for those that this model gives."""
        stages = find_stages(self.model, lambda: self._features(images))
        for spec, tap in list(self._taps.items()):
            try:
                plan, kept = TapPlan(self.model, stages, {spec: tap}), {}
                with plan.watching(kept):
                    self._features(images)
                plan.fill(kept, lambda inside: self._features(images, inside))
            except (ValueError, RuntimeError) as error:
                if getattr(tap, "layers", None) is not None:
                    raise ValueError(f"tap {spec}: {error}") from error
                self.tap_gaps[spec] = str(error).splitlines()[0]
                del self._taps[spec]
        return TapPlan(self.model, stages, self._taps)

    def _check_afterwards(self, images: Tensor) -> None:
        """Leaves out the taps that are computed after the pass and that this model cannot give."""
        for spec, tap in list(self._afterwards.items()):
            try:
                tap.check(self.model, self._features, images)
            except ValueError as error:
                self.tap_gaps[spec] = str(error)
                del self._afterwards[spec]

    def fingerprint(self) -> str:
        """SHA-256 of all that decides the outputs: weights, architecture, normalisation, head and taps.

        Computed once; make a new `Classifier` after changing the weights.
        """
        known = (self.taps, self.head_name == LOGITS)
        if known not in self._fingerprints:
            digest = hashlib.sha256()
            facts = (type(self.model).__qualname__, str(self.model), self.mean, self.std, self.taps)
            digest.update(repr((facts, self.head_name == LOGITS)).encode())
            for name, value in self.model.state_dict().items():
                if isinstance(value, Tensor):
                    digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
                    digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._fingerprints[known] = digest.hexdigest()
        return self._fingerprints[known]

    def _outputs(self, images: Tensor, amp: torch.dtype | None) -> Outputs:
        """One pass with the head's input and the taps captured; gradients as the caller has set them."""
        self._check_images(images)
        seen: dict[str, Tensor] = {}
        kept: dict[tuple[str, str], Tensor] = {}
        layer = None if self.head_name == LOGITS else self.layer
        watching = self._plan.watching(kept) if self._plan else nullcontext()
        with _evaluating(self.model), _autocast(self.device, amp):
            inputs = self._normalise(images)
            with self._compiling(), _capturing(layer, seen), watching:
                logits = logits_of(self.model(inputs))
            with torch.no_grad():
                taps = self._plan.fill(kept, lambda inside: self._features(images, inside)) if self._plan else {}
        if layer is None:
            features = logits = full_precision(logits)
            head = Head.identity(logits.shape[1], logits)
        else:
            head = as_head(layer)
            features = full_precision(seen["features"])
            if logits.dtype in (torch.float16, torch.bfloat16):
                # 8 bits of a bfloat16 logit make ties; the float32 product of the same features does not
                logits = head(features)
        return Outputs(
            logits=logits,
            features=features,
            labels=torch.full((len(logits),), UNKNOWN, dtype=torch.int64, device=logits.device),
            head=head,
            taps=taps,
        )

    def _compiling(self) -> AbstractContextManager[None]:
        """Compiled parts for a pass without gradients, where that was asked for."""
        if not self.compiled or torch.is_grad_enabled():
            return nullcontext()
        head = () if self.head_name == LOGITS else (str(self.head_name),)
        return compiled_parts(self.model, (*head, *(self._plan.watched if self._plan else ())), self._compiled)

    def _features(self, images: Tensor, inside: AbstractContextManager[Any] | None = None) -> Tensor:
        """What enters the head in a pass inside a context; the model is in eval mode already."""
        seen: dict[str, Tensor] = {}
        layer = None if self.head_name == LOGITS else self.layer
        with inside or nullcontext(), _capturing(layer, seen):
            logits = logits_of(self.model(self._normalise(images)))
        return full_precision(seen.get("features", logits))

    def _normalise(self, images: Tensor) -> Tensor:
        """Images on the model's device, in its dtype, normalised; never the caller's own memory."""
        inputs = images.to(self.device, non_blocking=True)
        if not inputs.is_floating_point():
            inputs = inputs.float() / 255
        if any(self.mean) or any(value != 1 for value in self.std):
            full = inputs if inputs.dtype == torch.float64 else inputs.float()
            mean, std = (full.new_tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
            inputs = (full - mean) / std
        inputs = inputs.to(self.dtype)
        # a model whose first layer works in place must not write into the caller's images
        return inputs.clone() if inputs is images else inputs

    def _check_images(self, images: Tensor) -> None:
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a torch tensor, got {type(images).__name__}; torch.as_tensor makes one")
        if images.ndim != 4 or not (images.is_floating_point() or images.dtype == torch.uint8):
            raise ValueError(
                "images must be (N, channels, height, width), float in [0, 1] or uint8; "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        identity = not any(self.mean) and all(value == 1 for value in self.std)
        if not identity and images.shape[1] != len(self.mean) and len(self.mean) > 1:
            raise ValueError(f"the normalisation has {len(self.mean)} channels, the images have {images.shape[1]}")
        if not identity and not self._checked and images.is_floating_point() and images.numel():
            low, high = images.min().item(), images.max().item()
            if low < -0.5 or high > 1.5:
                raise ValueError(
                    f"images span [{low:.3g}, {high:.3g}] where pixels lie in [0, 1]; "
                    "leave the normalisation out of the transform, the classifier does it"
                )

    def _find_head(self) -> None:
        if self.head_name is None:
            try:
                self.check(self._blank_images())
            except (RuntimeError, TypeError, AssertionError) as error:
                raise ValueError(
                    f"the head of {type(self.model).__name__} is not known before a first batch; "
                    "call check(images) with real ones first"
                ) from error

    def _blank_images(self) -> Tensor:
        """Grey images of the size the model says it takes."""
        config = getattr(self.model, "pretrained_cfg", None) or {}
        size = config.get("input_size") if isinstance(config, Mapping) else None
        channels = next((m.in_channels for m in self.model.modules() if isinstance(m, nn.Conv2d)), 3)
        grey = torch.full((2, *(size or (channels, _IMAGE_SIZE, _IMAGE_SIZE))), 0.5)
        return grey * torch.tensor([0.5, 1.5]).view(2, 1, 1, 1)


def _autocast(device: torch.device, amp: torch.dtype | None) -> AbstractContextManager[Any]:
    # an explicit disabled block, so that a caller's own autocast does not leak in
    return torch.autocast(device.type, dtype=amp, enabled=amp is not None)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards exactly those modules train that did before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _for_gradients(layer: nn.Module | None, model: nn.Module) -> Iterator[None]:
    """All parameters frozen but the layer's, and no activation in place, whose input autograd would have to copy."""
    kept = {id(parameter) for parameter in layer.parameters()} if layer is not None else set()
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    activations: list[Any] = [module for module in model.modules() if getattr(module, "inplace", None) is True]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module in activations:
            module.inplace = False
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for module in activations:
            module.inplace = True


@contextmanager
def _capturing(layer: nn.Module | None, seen: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the last input of `layer` as `seen["features"]`."""
    if layer is None:
        yield
        return

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["features"] = as_rows(inputs[0])

    hook = layer.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()
