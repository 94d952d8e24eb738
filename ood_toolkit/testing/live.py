"""The laws of live detectors: what they must leave behind when they have run the model."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ood_toolkit.detectors import LiveDetector
from ood_toolkit.fitted import NotFitted
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing.laws import (
    BrokenLaw,
    require,
    require_close,
    require_declared,
    require_literal_hyperparameters,
)
from ood_toolkit.testing.synthetic import SyntheticClassifier, synthetic_images


@dataclass(frozen=True)
class LiveCase:
    """A live detector, a small classifier with images of its classes, and images of none."""

    detector: LiveDetector
    device: str

    @cached_property
    def classifier(self) -> SyntheticClassifier:
        """In eval mode."""
        return SyntheticClassifier().to(self.device)

    @cached_property
    def train(self) -> Outputs:
        """Labelled outputs of training images."""
        images, labels = synthetic_images("train", rows=200)
        return replace(self.classifier(images.to(self.device)), labels=labels.to(self.device))

    def images(self, split: str) -> Tensor:
        """Images in [0, 1]."""
        return synthetic_images(split)[0].to(self.device)

    @cached_property
    def fitted(self) -> LiveDetector:
        """Fitted on outputs of the training images."""
        copy = self.detector.clone().to(self.device)
        require(copy.fit(self.train) is copy, "fit should return the detector itself")
        return copy

    @cached_property
    def scores(self) -> Tensor:
        """Of the ID images."""
        return self.fitted(self.classifier, self.images("id"))


def _scores_are_one_finite_number_per_row(case: LiveCase) -> None:
    require(case.scores.shape == (40,), f"scores are {tuple(case.scores.shape)} for 40 images")
    require(not case.scores.requires_grad, "scores carry gradients")
    require(bool(case.scores.isfinite().all()), f"{int((~case.scores.isfinite()).sum())} scores are not finite")


def _ranks_ood_above_id(case: LiveCase) -> None:
    pairs = case.fitted(case.classifier, case.images("ood")).unsqueeze(1) - case.scores
    auroc = float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)
    require(auroc > 0.75, f"AUROC {auroc:.3f} on the easy set, expected above 0.75; higher must mean more OOD")


def _a_row_scores_the_same_alone_or_in_a_batch(case: LiveCase) -> None:
    classifier = SyntheticClassifier().to(case.device).double()
    images = torch.cat([case.images("id")[:4], case.images("ood")[:4]]).double()
    train = case.train.to(torch.float64)
    fitted = case.detector.clone().to(case.device).fit(train)
    whole = fitted(classifier, images)
    alone = torch.cat([fitted(classifier, images[i : i + 1]) for i in range(len(images))])
    require_close(alone, whole, 1e-6, "an image scored alone, against the same image in a batch")


def _unfitted_use_raises_not_fitted(case: LiveCase) -> None:
    unfitted = case.detector.clone().to(case.device)
    if unfitted.needs == "nothing":
        require_close(unfitted(case.classifier, case.images("id")), case.scores, 1e-9, "unfitted scores")
        return
    try:
        unfitted(case.classifier, case.images("id"))
    except NotFitted:
        return
    raise BrokenLaw(f"needs = {unfitted.needs!r}, yet it scores without a fit; declare its learned tensors")


def _a_state_dict_restores_an_unfitted_copy(case: LiveCase) -> None:
    require_declared(case.fitted)
    copy = case.detector.clone().to(case.device)
    copy.load_state_dict(case.fitted.state_dict())
    require_close(copy(case.classifier, case.images("id")), case.scores, 1e-6, "scores after load_state_dict")


def _a_pickle_scores_the_same(case: LiveCase) -> None:
    copy = pickle.loads(pickle.dumps(case.fitted))
    require_close(copy(case.classifier, case.images("id")), case.scores, 1e-6, "scores after pickling")


def _spec_and_repr_round_trip(case: LiveCase) -> None:
    require_literal_hyperparameters(case.detector)
    require(bool(case.detector.paper), "`paper` is empty: say authors, title, venue, identifier")


def _the_model_is_left_as_it_was(case: LiveCase) -> None:
    # a user's grads and frozen parameters must survive too
    classifier = SyntheticClassifier().to(case.device)
    first, *rest = classifier.parameters()
    first.grad = torch.ones_like(first)
    rest[-1].requires_grad_(False)
    images = case.images("id")[:4]
    kept = images.clone()
    before = _state(classifier)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            case.fitted(classifier, images)
            require(torch.is_grad_enabled() == enabled, "the gradient mode of torch is not restored")
        _require_same(before, _state(classifier), "scoring")
    require(torch.equal(images, kept), "scoring wrote into the images")
    require(images.grad is None and not images.requires_grad, "scoring left gradients on the images")


def _the_model_is_left_as_it_was_after_an_exception(case: LiveCase) -> None:
    images = case.images("id")[:4]
    for calls in range(8):
        classifier = SyntheticClassifier().to(case.device)
        before = _state(classifier)
        fuse = _Fuse(classifier, calls)
        try:
            case.fitted(fuse, images)
        except _Blown:
            _require_same(before, _state(classifier), f"an exception at call {calls + 1} of the classifier")
            require(torch.is_grad_enabled(), "an exception leaves gradients switched off")
        else:
            require(calls > 0, "it never calls the classifier that it is given")
            return


class _Blown(RuntimeError):
    pass


class _Fuse:
    """A classifier that raises after some calls; everything else is the classifier's."""

    def __init__(self, classifier: SyntheticClassifier, calls: int) -> None:
        self._classifier, self._left = classifier, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._classifier, name)

    def _burn(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Blown

    def __call__(self, images: Tensor) -> Outputs:
        self._burn()
        return self._classifier(images)

    def differentiate(self, images: Tensor) -> Outputs:
        self._burn()
        return self._classifier.differentiate(images)


def _state(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    state: dict[str, Any] = {f"{n} hooks": sum(len(getattr(m, h)) for h in hooks) for n, m in model.named_modules()}
    state |= {f"{name} training": module.training for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach().clone()
        state[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
        state[f"{name}.requires_grad"] = parameter.requires_grad
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def _require_same(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    for name, old in before.items():
        new = after[name]
        same = (
            torch.equal(old, new) if isinstance(old, Tensor) and isinstance(new, Tensor) else old is new or old == new
        )
        require(same, f"{what} changes the model's {name.strip()}")


LIVE_LAWS: dict[str, Callable[[LiveCase], None]] = {
    law.__name__.removeprefix("_"): law
    for law in (
        _scores_are_one_finite_number_per_row,
        _ranks_ood_above_id,
        _a_row_scores_the_same_alone_or_in_a_batch,
        _unfitted_use_raises_not_fitted,
        _a_state_dict_restores_an_unfitted_copy,
        _a_pickle_scores_the_same,
        _spec_and_repr_round_trip,
        _the_model_is_left_as_it_was,
        _the_model_is_left_as_it_was_after_an_exception,
    )
}
"""Every law of a live detector by name."""
