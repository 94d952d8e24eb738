"""The laws of calibrators, and the one call that checks them."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators import Calibrator
from ood_toolkit.fitted import NotFitted
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing.laws import (
    BrokenLaw,
    require,
    require_close,
    require_literal_hyperparameters,
    require_unchanged,
    run_laws,
)


def check_calibrator(
    calibrator: Calibrator | type[Calibrator],
    *,
    law: str | None = None,
    exempt: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> None:
    """Checks that a calibrator, yours or ours, keeps every law of this toolkit; raises `BrokenLaw` with all that broke.

    Args:
        calibrator: a class, built with its defaults, or an instance, of which only the hyper-parameters are used.
        law: the name of the single law to check, from `CALIBRATOR_LAWS`.
        exempt: law → the reason why the method itself cannot keep it.
        device: where to run.

    >>> from ood_toolkit.calibrators import Identity
    >>> check_calibrator(Identity, exempt={"helps_overconfident_logits": "it is the uncalibrated softmax"})
    """
    unfitted = calibrator() if isinstance(calibrator, type) else calibrator.clone()
    run_laws(repr(unfitted), CalibratorCase(unfitted, device), CALIBRATOR_LAWS, law, exempt or {})


def overconfident_logits(
    rows: int, classes: int = 5, seed: int = 0, factor: float = 3.0
) -> tuple[Float[Tensor, "N C"], Int[Tensor, " N"]]:
    """Logits that are `factor` times too large, and labels drawn from the softmax of the true ones."""
    generator = torch.Generator().manual_seed(seed)
    true = 1.5 * torch.randn(rows, classes, generator=generator)
    labels = true.softmax(dim=1).multinomial(1, generator=generator).flatten()
    return factor * true, labels


@dataclass(frozen=True)
class CalibratorCase:
    """A calibrator, never fitted itself, and where to run it."""

    calibrator: Calibrator
    device: str

    def data(self, rows: int, seed: int, classes: int = 5) -> tuple[Tensor, Tensor]:
        """Overconfident logits and labels."""
        logits, labels = overconfident_logits(rows, classes, seed)
        return logits.to(self.device), labels.to(self.device)

    def fit(self, logits: Tensor, labels: Tensor) -> Calibrator:
        """A fresh copy, fitted."""
        copy = self.calibrator.clone().to(self.device)
        require(copy.fit(logits, labels) is copy, "fit should return the calibrator itself")
        return copy

    @cached_property
    def fitted(self) -> Calibrator:
        """Fitted on 1,500 rows."""
        return self.fit(*self.data(1500, seed=0))

    @cached_property
    def fresh(self) -> Tensor:
        """Logits of 200 other rows."""
        return self.data(200, seed=1)[0]

    @cached_property
    def probabilities(self) -> Tensor:
        """Of the other rows."""
        return self.fitted(self.fresh)


def _require_distributions(probabilities: Tensor, like: Tensor, what: str, tolerance: float = 1e-5) -> None:
    require(probabilities.shape == like.shape, f"{what}: shape {tuple(probabilities.shape)} for {tuple(like.shape)}")
    require(bool(probabilities.isfinite().all()), f"{what}: probabilities are not finite")
    low, high = float(probabilities.min()), float(probabilities.max())
    require(low >= 0 and high <= 1 + tolerance, f"{what}: probabilities span [{low:g}, {high:g}]")
    off = float((probabilities.sum(dim=1) - 1).abs().max())
    require(off <= tolerance, f"{what}: rows sum to 1 ± {off:g}")


def _rows_are_distributions(case: CalibratorCase) -> None:
    _require_distributions(case.probabilities, case.fresh, "held-out rows")
    require(not case.probabilities.requires_grad, "probabilities carry gradients")
    empty = case.fitted(case.fresh[:0])
    require(empty.shape == (0, 5), f"no rows should give (0, 5), got {tuple(empty.shape)}")


def _extreme_logits_give_distributions(case: CalibratorCase) -> None:
    rows = case.fresh[:8]
    impossible = rows.clone()
    impossible[:, 2] = -torch.inf
    for what, logits in (
        ("logits × 1000", rows * 1e3),
        ("logits + 10000", rows + 1e4),
        ("all logits 0", rows * 0),
        ("a logit of −inf", impossible),
    ):
        probabilities = case.fitted(logits)
        _require_distributions(probabilities, logits, what)
        leaked = float(probabilities[logits.isneginf()].sum())
        require(leaked == 0, f"{what}: the class that cannot be has probability {leaked / len(rows):g}")
        logs = case.fitted.log_probabilities(logits)
        require(not bool(logs.isnan().any()), f"{what}: log-probabilities are NaN")


def _nan_is_not_hidden(case: CalibratorCase) -> None:
    logits = case.fresh[:8].clone()
    logits[3, 2] = torch.nan
    try:
        probabilities = case.fitted(logits)
    except ValueError:
        return
    require(bool(probabilities[3].isnan().any()), "a row with a NaN logit gets probabilities like any other")
    require(bool(probabilities[:3].isfinite().all()), "a NaN in one row reaches the rows before it")


def _data_without_an_answer_are_refused(case: CalibratorCase) -> None:
    logits, labels = case.data(400, seed=8)
    torn, impossible = logits.clone(), logits.clone()
    torn[3, 2] = torch.nan
    impossible[3, labels[3]] = -torch.inf
    for what, data in (
        ("a NaN logit", (torn, labels)),
        ("a label of the class -1", (logits, labels - 1)),
        ("a label as large as the number of classes", (logits, labels + 1)),
        ("a label on an impossible class", (impossible, labels)),
        ("no rows", (logits[:0], labels[:0])),
    ):
        try:
            case.fit(*data)
        except ValueError:
            continue
        raise BrokenLaw(f"fit accepts {what}; ood_toolkit.calibrators.base.checked refuses such data")


def _two_classes_are_enough(case: CalibratorCase) -> None:
    fitted = case.fit(*case.data(400, seed=2, classes=2))
    logits = case.data(50, seed=3, classes=2)[0]
    _require_distributions(fitted(logits), logits, "two classes")


def _an_unseen_class_is_no_accident(case: CalibratorCase) -> None:
    logits, labels = case.data(400, seed=4)
    fitted = case.fit(logits, labels % 4)
    _require_distributions(fitted(case.fresh), case.fresh, "class 4 never seen in the fit")


def _the_most_likely_class_stays(case: CalibratorCase) -> None:
    if not case.calibrator.preserves_argmax:
        return
    chosen = case.probabilities.gather(1, case.fresh.argmax(dim=1, keepdim=True)).squeeze(1)
    lost = int((chosen < case.probabilities.amax(dim=1)).sum())
    require(lost == 0, f"preserves_argmax, it says, but {lost} of {len(chosen)} rows change their class")


def _a_row_is_the_same_alone_or_in_a_batch(case: CalibratorCase) -> None:
    alone = torch.cat([case.fitted(case.fresh[i : i + 1]) for i in range(0, 200, 13)])
    require_close(alone, case.probabilities[::13], 1e-5, "a row calibrated alone, against the same row in a batch")


def _fitting_again_forgets_the_first_fit(case: CalibratorCase) -> None:
    logits, labels = case.data(700, seed=5)
    again = case.fit(logits * 2 + 1, labels.roll(1)).fit(*case.data(1500, seed=0))
    require_close(again(case.fresh), case.probabilities, 1e-6, "probabilities after fitting twice")


def _unfitted_use_raises_not_fitted(case: CalibratorCase) -> None:
    unfitted = case.calibrator.clone()
    if not case.fitted.state_dict():
        require_close(unfitted(case.fresh), case.probabilities, 1e-9, "learns nothing, but unfitted probabilities")
        return
    try:
        unfitted(case.fresh)
    except NotFitted:
        return
    raise BrokenLaw("it calibrates without a fit; declare its learned tensors")


def _a_state_dict_restores_an_unfitted_copy(case: CalibratorCase) -> None:
    copy = case.calibrator.clone().to(case.device)
    copy.load_state_dict(case.fitted.state_dict())
    require(torch.equal(copy(case.fresh), case.probabilities), "probabilities differ after load_state_dict")


def _a_pickle_gives_the_same(case: CalibratorCase) -> None:
    copy = pickle.loads(pickle.dumps(case.fitted))
    require(torch.equal(copy(case.fresh), case.probabilities), "probabilities differ after pickling")


def _spec_and_repr_round_trip(case: CalibratorCase) -> None:
    require_literal_hyperparameters(case.calibrator)


def _float64_gives_float64_close_to_float32(case: CalibratorCase) -> None:
    logits, labels = case.data(1500, seed=0)
    probabilities = case.fit(logits.double(), labels)(case.fresh.double())
    require(probabilities.dtype == torch.float64, f"float64 logits give {probabilities.dtype}")
    require(case.probabilities.dtype == torch.float32, f"float32 logits give {case.probabilities.dtype}")
    _require_distributions(probabilities, case.fresh, "float64", 1e-9)
    off = float((case.probabilities - probabilities).abs().max())
    require(off <= 1e-3, f"float32 and float64 probabilities differ by {off:g}")


def _logits_of_another_dtype_are_calibrated_alike(case: CalibratorCase) -> None:
    logits, labels = case.data(1500, seed=0)
    for what, fitted, fresh in (
        ("fitted in float32, calibrating float64", case.fitted, case.fresh.double()),
        ("fitted in float64, calibrating float32", case.fit(logits.double(), labels), case.fresh),
    ):
        probabilities = fitted(fresh)
        require(probabilities.dtype == fresh.dtype, f"{what} gives {probabilities.dtype}")
        require_close(probabilities, case.probabilities, 1e-3, what)


def _what_is_no_logits_is_refused(case: CalibratorCase) -> None:
    wrong: dict[str, Any] = {
        "Outputs": Outputs.from_logits(case.fresh),
        "a list": case.fresh.tolist(),
        "an array": case.fresh.cpu().numpy(),
    }
    for what, given in wrong.items():
        for act in (case.fitted, case.fitted.log_probabilities, lambda z: case.calibrator.clone().fit(z, z)):
            try:
                act(given)
            except TypeError as error:
                require("logits" in str(error), f"{what} for logits raises {error}")
                continue
            raise BrokenLaw(f"it takes {what} where logits belong")


def _another_number_of_classes_is_refused_or_calibrated(case: CalibratorCase) -> None:
    for classes in (3, 7):
        logits = case.data(50, seed=3, classes=classes)[0]
        try:
            probabilities = case.fitted(logits)
        except ValueError as error:
            require("classes" in str(error), f"{classes} classes after a fit on 5 raise {error}")
            continue
        _require_distributions(probabilities, logits, f"{classes} classes after a fit on 5")


def _logs_are_the_logs(case: CalibratorCase) -> None:
    logs = case.fitted.log_probabilities(case.fresh)
    off = float((logs.exp() - case.probabilities).abs().max())
    require(off <= 1e-5, f"exp(log_probabilities) and probabilities differ by {off:g}")


def _inputs_stay_as_they_were(case: CalibratorCase) -> None:
    logits, labels = case.data(400, seed=6)
    before = {"logits": logits.clone(), "labels": labels.clone()}
    case.fit(logits, labels)(logits)
    require_unchanged(before, {"logits": logits, "labels": labels}, "fit or calibration")


def _helps_overconfident_logits(case: CalibratorCase) -> None:
    logits, labels = case.data(3000, seed=7)
    truth = torch.nn.functional.one_hot(labels, 5)
    before = float((logits.softmax(dim=1) - truth).square().sum(dim=1).mean())
    after = float((case.fitted(logits) - truth).square().sum(dim=1).mean())
    require(after < before, f"logits three times too large: Brier score {before:.4f} before, {after:.4f} after")


CALIBRATOR_LAWS: dict[str, Callable[[CalibratorCase], None]] = {
    law.__name__.removeprefix("_"): law
    for law in (
        _rows_are_distributions,
        _extreme_logits_give_distributions,
        _nan_is_not_hidden,
        _data_without_an_answer_are_refused,
        _two_classes_are_enough,
        _an_unseen_class_is_no_accident,
        _the_most_likely_class_stays,
        _a_row_is_the_same_alone_or_in_a_batch,
        _fitting_again_forgets_the_first_fit,
        _unfitted_use_raises_not_fitted,
        _a_state_dict_restores_an_unfitted_copy,
        _a_pickle_gives_the_same,
        _spec_and_repr_round_trip,
        _float64_gives_float64_close_to_float32,
        _logits_of_another_dtype_are_calibrated_alike,
        _what_is_no_logits_is_refused,
        _another_number_of_classes_is_refused_or_calibrated,
        _logs_are_the_logs,
        _inputs_stay_as_they_were,
        _helps_overconfident_logits,
    )
}
"""Every law of a calibrator by name."""
