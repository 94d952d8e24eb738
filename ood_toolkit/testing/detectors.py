"""The laws of detectors that see `Outputs` only, and the one call that checks them."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.fitted import NotFitted
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.testing.laws import (
    BrokenLaw,
    require,
    require_close,
    require_declared,
    require_literal_hyperparameters,
    require_unchanged,
    run_laws,
    snapshot,
)
from ood_toolkit.testing.live import LIVE_LAWS, LiveCase
from ood_toolkit.testing.synthetic import Splits, TapMaker, synthetic_outputs

AUROC_FLOOR = 0.75
"""What the easy OOD set must give; sound methods are near 1 there, a reversed sign gives less than ½."""


def check_detector(
    detector: Detector | LiveDetector | type[Detector] | type[LiveDetector],
    *,
    data: Splits | None = None,
    law: str | None = None,
    exempt: Mapping[str, str] | None = None,
    makers: Mapping[str, TapMaker] | None = None,
    device: str = "cpu",
) -> None:
    """Checks that a detector, yours or ours, keeps every law of this toolkit; raises `BrokenLaw` with all that broke.

    The laws: `DETECTOR_LAWS`, or `LIVE_LAWS` for a detector that runs the model itself.

    Args:
        detector: a class, built with its defaults, or an instance, of which only the hyper-parameters are used.
        data: what to fit and score; by default `synthetic_outputs` with the taps the detector declares. A live
            detector is checked with `SyntheticClassifier`.
        law: the name of the single law to check.
        exempt: law → the reason why the method itself cannot keep it.
        makers: tap → (features, head, generator) → one (N, ...) tensor, for taps of your own in the default data.
        device: where to run.

    >>> from ood_toolkit.detectors import EnergyDetector
    >>> check_detector(EnergyDetector(temperature=2))
    """
    unfitted = detector() if isinstance(detector, type) else detector.clone()
    if isinstance(unfitted, LiveDetector):
        run_laws(repr(unfitted), LiveCase(unfitted, device), LIVE_LAWS, law, exempt or {})
        return
    data = (data or synthetic_outputs(unfitted.taps, makers=makers)).to(device)
    run_laws(repr(unfitted), DetectorCase(unfitted, data), DETECTOR_LAWS, law, exempt or {})


@dataclass(frozen=True)
class DetectorCase:
    """A detector and what to check it on; `detector` is never fitted itself."""

    detector: Detector
    data: Splits

    def fit(self, train: Outputs) -> Detector:
        """A fresh copy fitted on `train`."""
        copy = self.detector.clone().to(train.features.device)
        fitted = copy.fit(train)
        require(fitted is copy, f"fit should return the detector itself, got {type(fitted).__name__}")
        return fitted

    @cached_property
    def fitted(self) -> Detector:
        """Fitted on the training rows."""
        return self.fit(self.data.train)

    @cached_property
    def mixed(self) -> Outputs:
        """Half ID, half OOD."""
        return Outputs.cat([self.data.id, self.data.ood])

    @cached_property
    def scores(self) -> Tensor:
        """Of the mixed rows."""
        return self.fitted(self.mixed)


def _scores_are_one_finite_number_per_row(case: DetectorCase) -> None:
    scores = case.scores
    require(scores.shape == (len(case.mixed),), f"scores are {tuple(scores.shape)} for {len(case.mixed)} rows")
    require(scores.is_floating_point(), f"scores are {scores.dtype}")
    require(not scores.requires_grad, "scores carry gradients")
    require(bool(scores.isfinite().all()), f"{int((~scores.isfinite()).sum())} scores are not finite")
    require(case.fitted(case.mixed.rows(slice(0, 0))).shape == (0,), "no rows should give no scores")


def _ranks_ood_above_id(case: DetectorCase) -> None:
    in_distribution, out = case.fitted(case.data.id), case.fitted(case.data.ood)
    pairs = out.unsqueeze(1) - in_distribution
    auroc = float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)
    require(
        auroc > AUROC_FLOOR,
        f"AUROC {auroc:.3f} on the easy set, expected above {AUROC_FLOOR}; higher must mean more OOD. (OOD rows there "
        "are small, lie near the origin and far from every class mean; for a method that looks for something else give "
        "`data` or an exemption.)",
    )


def _a_row_scores_the_same_alone_or_in_a_batch(case: DetectorCase) -> None:
    data = case.data.to(torch.float64)
    fitted, mixed = case.fit(data.train), Outputs.cat([data.id, data.ood])
    whole = fitted.score(mixed)
    some = range(0, len(mixed), max(1, len(mixed) // 16))
    alone = torch.cat([fitted.score(mixed.rows(slice(i, i + 1))) for i in some])
    require_close(alone, whole[list(some)], 1e-7, "a row scored alone, against the same row in a batch")
    parts = torch.cat([fitted.score(batch) for batch in mixed.batches(rows=37)])
    require_close(parts, whole, 1e-7, "scores of successive batches, against scores of the whole")


def _the_order_of_rows_does_not_matter(case: DetectorCase) -> None:
    shuffled = torch.randperm(len(case.mixed), generator=torch.Generator().manual_seed(0))
    scores = case.fitted(case.mixed.rows(shuffled))
    require_close(scores, case.scores[shuffled.to(case.scores.device)], 1e-4, "scores of shuffled rows")


def _fitting_again_forgets_the_first_fit(case: DetectorCase) -> None:
    other = case.data.train.rows(slice(0, len(case.data.train) // 2))
    again = case.fit(replace(other, features=other.features + 1.0, logits=other.head(other.features + 1.0)))
    require_close(again.fit(case.data.train)(case.mixed), case.scores, 1e-6, "scores after fitting twice")


def _unfitted_use_raises_not_fitted(case: DetectorCase) -> None:
    unfitted = case.detector.clone()
    if unfitted.needs == "nothing":
        require_close(unfitted(case.mixed), case.scores, 1e-9, "needs = 'nothing', but unfitted scores")
        return
    try:
        unfitted(case.mixed)
    except NotFitted:
        return
    except AttributeError as error:
        raise BrokenLaw(f"it reads what no fit has learned ({error}); declare its learned tensors") from error
    raise BrokenLaw(f"needs = {unfitted.needs!r}, yet it scores without a fit; declare its learned tensors")


def _a_state_dict_restores_an_unfitted_copy(case: DetectorCase) -> None:
    require_declared(case.fitted)
    state = case.fitted.state_dict()
    require(bool(state) or case.detector.needs == "nothing", "fitted, but its state_dict is empty")
    copy = case.detector.clone().to(case.scores.device)
    copy.load_state_dict(state)
    require(torch.equal(copy(case.mixed), case.scores), "scores differ after load_state_dict into an unfitted copy")


def _a_pickle_scores_the_same(case: DetectorCase) -> None:
    copy = pickle.loads(pickle.dumps(case.fitted))
    require(torch.equal(copy(case.mixed), case.scores), "scores differ after pickling")


def _spec_and_repr_round_trip(case: DetectorCase) -> None:
    require_literal_hyperparameters(case.detector)
    require(bool(case.detector.paper), "`paper` is empty: say authors, title, venue, identifier")


def _float64_gives_float64_close_to_float32(case: DetectorCase) -> None:
    data = case.data.to(torch.float64)
    scores = case.fit(data.train)(Outputs.cat([data.id, data.ood]))
    require(scores.dtype == torch.float64, f"float64 outputs give {scores.dtype} scores")
    require(case.scores.dtype == torch.float32, f"float32 outputs give {case.scores.dtype} scores")
    require_close(case.scores, scores, 1e-3, "float32 scores, against float64")


def _outputs_of_another_dtype_are_brought_to_its_own(case: DetectorCase) -> None:
    double = case.data.to(torch.float64)
    for what, train, rows in (
        ("fitted in float32, scoring float64", case.data.train, Outputs.cat([double.id, double.ood])),
        ("fitted in float64, scoring float32", double.train, case.mixed),
    ):
        scores = case.fit(train)(rows)
        given = rows.logits.dtype
        require(scores.dtype == given, f"{what}: scores are {scores.dtype}, the rows {given}")
        require_close(scores, case.scores, 1e-3, what)


def _what_is_no_outputs_is_refused(case: DetectorCase) -> None:
    logits = case.mixed.logits
    for what, act in (("fit", case.detector.clone().fit), ("a call", case.fitted), ("score", case.fitted.score)):
        try:
            act(logits)  # pyright: ignore[reportArgumentType]
        except TypeError as error:
            require("Outputs" in str(error), f"{what} of a tensor raises {error}, which does not name Outputs")
            continue
        raise BrokenLaw(f"{what} takes a tensor where Outputs belong")


def _outputs_of_another_size_are_refused_or_score_finite(case: DetectorCase) -> None:
    rows = case.mixed.rows(slice(0, 8))
    head = Head(rows.head.weight[:-1, :-2], rows.head.bias[:-1])
    features = rows.features[:, :-2]
    taps = {name: tap[:, :-2] if tap.ndim == 2 else tap for name, tap in rows.taps.items()}
    other = Outputs(logits=head(features), features=features, labels=rows.labels.clamp(max=-1), head=head, taps=taps)
    try:
        scores = case.fitted(other)
    except ValueError:
        return
    require(bool(scores.isfinite().all()), f"outputs of another number of classes and features score {scores.tolist()}")


def _half_precision_is_promoted(case: DetectorCase) -> None:
    half = _mapped(case.mixed, torch.bfloat16)
    promoted = half.rows(slice(None))
    scores = case.fitted(half)
    require(scores.dtype == torch.float32, f"bfloat16 outputs give {scores.dtype} scores, and so ties")
    require(torch.equal(scores, case.fitted(promoted)), "bfloat16 outputs score differently from their float32 copy")


def _fits_on_a_mapped_half_precision_store(case: DetectorCase) -> None:
    half = _mapped(case.data.train, torch.float16)
    scores = case.fit(half)(case.mixed)
    require_close(
        scores,
        case.fit(half.rows(slice(None)))(case.mixed),
        1e-4,
        "scores after fitting on a float16 store (the fields of a store keep its dtype; read rows, promoted, from "
        "`train.batches()`)",
    )


def _mapped(outputs: Outputs, dtype: torch.dtype) -> Outputs:
    taps = {name: tap.to(dtype) if tap.is_floating_point() else tap for name, tap in outputs.taps.items()}
    return Outputs.mapped(
        logits=outputs.logits.to(dtype),
        features=outputs.features.to(dtype),
        labels=outputs.labels,
        head=outputs.head,
        taps=taps,
    )


def _saturated_rows_do_not_tie(case: DetectorCase) -> None:
    sharp = Splits(*(_sharpened(part) for part in (case.data.train, case.data.id, case.data.ood)))
    single = case.fit(sharp.train)(sharp.id)
    # rounded at the end only: what float32 can tell apart at the score's own size
    double = case.fit(sharp.train.to(torch.float64))(sharp.id.to(torch.float64)).float()
    ties, honest = len(single) - len(single.unique()), len(double) - len(double.unique())
    require(
        ties <= honest + len(single) // 10,
        f"confident rows make {ties} ties among {len(single)} float32 scores, {honest} where float64 is rounded at "
        "the end: the score rounds early (1 − p where p ≈ 1?); compute the small part directly",
    )


def _sharpened(outputs: Outputs, factor: float = 4.0) -> Outputs:
    head = Head(outputs.head.weight * factor, outputs.head.bias * factor)
    taps = {k: v * factor if k.endswith("logits") else v for k, v in outputs.taps.items()}
    return replace(outputs, logits=outputs.logits * factor, head=head, taps=taps)


def _extreme_rows_score_finite(case: DetectorCase) -> None:
    rows = case.mixed.rows(slice(0, 8))
    zero = torch.zeros_like(rows.features)
    for what, features in (
        ("features × 1000", rows.features * 1e3),
        ("features × 0.001", rows.features * 1e-3),
        ("all features 0", zero),
        ("equal features", zero + 1),
    ):
        scores = case.fitted(replace(rows, features=features, logits=rows.head(features)))
        require(bool(scores.isfinite().all()), f"{what}: scores {scores.tolist()}")


def _inputs_stay_as_they_were(case: DetectorCase) -> None:
    for what, outputs in (("fit", case.data.train), ("score", case.mixed)):
        before = snapshot(_tensors(outputs))
        fitted = case.fit(outputs) if what == "fit" else case.fitted
        fitted.score(outputs)
        require_unchanged(before, _tensors(outputs), what)


def _tensors(outputs: Outputs) -> dict[str, Tensor]:
    return {
        "logits": outputs.logits,
        "features": outputs.features,
        "labels": outputs.labels,
        "head.weight": outputs.head.weight,
        "head.bias": outputs.head.bias,
        **outputs.taps,
    }


def _what_is_read_is_declared(case: DetectorCase) -> None:
    for field in sorted({"logits", "features"} - case.detector.reads):
        changed = replace(case.mixed, **{field: torch.zeros_like(getattr(case.mixed, field))})
        require(
            torch.equal(case.fitted(changed), case.scores),
            f"reads = {sorted(case.detector.reads)}, it says, but {field} change scores",
        )
    known = replace(case.mixed, labels=torch.zeros_like(case.mixed.labels))
    require(torch.equal(case.fitted(known), case.scores), "labels change scores: a score may not look at them")


def _only_the_head_is_needed(case: DetectorCase) -> None:
    if case.detector.needs != "head":
        return
    from_nothing = case.fit(case.data.train.rows(slice(0, 0)))
    require_close(from_nothing(case.mixed), case.scores, 1e-6, "needs = 'head', but a fit on 0 rows gives other scores")


DETECTOR_LAWS: dict[str, Callable[[DetectorCase], None]] = {
    law.__name__.removeprefix("_"): law
    for law in (
        _scores_are_one_finite_number_per_row,
        _ranks_ood_above_id,
        _a_row_scores_the_same_alone_or_in_a_batch,
        _the_order_of_rows_does_not_matter,
        _fitting_again_forgets_the_first_fit,
        _unfitted_use_raises_not_fitted,
        _only_the_head_is_needed,
        _a_state_dict_restores_an_unfitted_copy,
        _a_pickle_scores_the_same,
        _spec_and_repr_round_trip,
        _float64_gives_float64_close_to_float32,
        _outputs_of_another_dtype_are_brought_to_its_own,
        _what_is_no_outputs_is_refused,
        _outputs_of_another_size_are_refused_or_score_finite,
        _half_precision_is_promoted,
        _fits_on_a_mapped_half_precision_store,
        _saturated_rows_do_not_tie,
        _extreme_rows_score_finite,
        _inputs_stay_as_they_were,
        _what_is_read_is_declared,
    )
}
"""Every law of a detector by name."""
