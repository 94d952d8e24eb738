"""What no network should give but some do: every calibrator and pool answers or says why not, and never with NaN."""

import pytest
import torch
from torch import Tensor

from ood_toolkit import registry
from tests.calibrators.data import drawn

ROWS, CLASSES = 300, 6
LOGITS = drawn(ROWS, CLASSES)[0].float()
LABELS = drawn(ROWS, CLASSES)[1]
EVEN = torch.arange(ROWS) % 2 == 0
LAST = torch.arange(CLASSES) == CLASSES - 1

CASES: dict[str, tuple[Tensor, Tensor]] = {
    "all right": (LOGITS, LOGITS.argmax(1)),
    "all wrong": (LOGITS, LOGITS.argmin(1)),
    "labels at random": (LOGITS, LABELS.roll(1)),
    "one constant": (torch.full_like(LOGITS, 3.0), LABELS),
    "a constant per row": (LOGITS[:, :1].repeat(1, CLASSES), LABELS),
    "labels of one class": (LOGITS, torch.zeros_like(LABELS)),
    "one class in all": (LOGITS[:, :1], torch.zeros_like(LABELS)),
    "one row": (LOGITS[:1], LABELS[:1]),
    "an impossible class": (LOGITS.masked_fill(LAST, -torch.inf), LABELS % (CLASSES - 1)),
    "a class impossible in some rows": (
        LOGITS.masked_fill(EVEN[:, None] & LAST, -torch.inf),
        LABELS % (CLASSES - 1),
    ),
    "logits times a million": (LOGITS * 1e6, LABELS),
}
ANSWERS = {
    "all right": {"bbq", "beta", "enir", "irova_ts", "mix_n_match", "netcal", "prior_shift", "temperature"},
    "all wrong": {"bbq", "beta", "enir", "irova_ts", "mix_n_match", "netcal", "prior_shift", "temperature"},
    "labels at random": {"irova_ts", "mix_n_match", "prior_shift", "temperature"},
    "one class in all": {"bbq", "beta", "enir", "netcal"},
    "one row": {"bbq", "beta", "enir", "irova_ts", "mix_n_match", "netcal", "prior_shift", "spline", "temperature"},
    "an impossible class": {"dirichlet", "matrix"},
    "a class impossible in some rows": {"dirichlet", "matrix"},
    "logits times a million": {"irova_ts", "mix_n_match", "prior_shift", "temperature"},
}
"""Who refuses to answer, where somebody does: those whose likelihood has no best point, or whose map has no rows."""
REASONS = "still falls at T|needs right and wrong rows|separates right from wrong|at least 2 held-out|may be -inf"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", registry.calibrator_classes())
def test_every_calibrator_answers_without_nan_or_says_why_not(name: str, case: str):
    logits, labels = CASES[case]
    calibrator = registry.build_calibrator(name)
    if name in ANSWERS.get(case, ()):
        with pytest.raises(ValueError, match=REASONS):
            calibrator.fit(logits, labels)
        return
    calibrator.fit(logits, labels)
    probabilities, logs = calibrator(logits), calibrator.log_probabilities(logits)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(logits)), atol=1e-5, rtol=0)
    assert bool((probabilities >= 0).all())
    assert not bool(logs.isnan().any())
    assert float(probabilities[logits.isneginf()].sum()) == 0
    for key, learned in calibrator.state_dict().items():
        assert bool(learned.isfinite().all()), key
        assert "temperature" not in key or bool((learned > 0).all()), key
    if calibrator.preserves_argmax:
        chosen = probabilities.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
        assert torch.equal(chosen, probabilities.amax(1))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", registry.calibrator_classes())
def test_every_calibrator_refuses_nan_and_infinity_by_row(name: str, wrong: float):
    logits = LOGITS.clone()
    logits[3, 2] = wrong
    with pytest.raises(ValueError, match=r"1 of 300 rows hold NaN, \+inf or only -inf, first \[3\]"):
        registry.build_calibrator(name).fit(logits, LABELS)


@pytest.mark.parametrize("name", registry.calibrator_classes())
def test_a_row_with_nan_comes_back_as_nan_and_leaves_the_others_alone(name: str):
    fitted = registry.build_calibrator(name).fit(LOGITS, LABELS)
    broken = LOGITS.clone()
    broken[3, 2] = torch.nan
    probabilities = fitted(broken)
    assert bool(probabilities[3].isnan().all())
    others = torch.arange(ROWS) != 3
    assert torch.equal(probabilities[others], fitted(LOGITS)[others])


@pytest.mark.parametrize("name", registry.calibrator_classes())
def test_numpy_arrays_are_refused_in_words(name: str):
    with pytest.raises(TypeError, match=r"labels must be a torch tensor, got ndarray; torch.as_tensor makes one"):
        registry.build_calibrator(name).fit(LOGITS, LABELS.numpy())  # pyright: ignore[reportArgumentType]


def test_ets_keeps_every_prediction_although_the_uniform_part_takes_all():
    fitted = registry.build_calibrator("ets").fit(LOGITS, LOGITS.argmin(1))
    assert float(fitted.state_dict()["weights"][2]) > 0.999
    assert torch.equal(fitted(LOGITS).argmax(1), LOGITS.argmax(1))


@pytest.mark.parametrize("members", [LOGITS, LOGITS[None][:0]], ids=["one model's logits", "no member"])
@pytest.mark.parametrize("name", ["mean_probability", "mean_logit", "geometric_mean", "majority_vote"])
def test_a_pool_that_learns_nothing_still_refuses_what_has_no_members(name: str, members: Tensor):
    with pytest.raises(ValueError, match=r"at least one member, \(M, N, C\), but got shape \((300|0, 300), 6\)"):
        registry.build_ensemble(name).fit(members, LABELS)


@pytest.mark.parametrize("case", ["one constant", "one class in all", "one row", "an impossible class", "all right"])
@pytest.mark.parametrize("name", registry.ensemble_classes())
def test_every_pool_answers_without_nan_or_says_why_not(name: str, case: str):
    logits, labels = CASES[case]
    members = torch.stack([logits, logits.flip(0) if case == "one constant" else logits * 0.5])
    pool = registry.build_ensemble(name)
    needs_best = name in ("calibrate_then_pool", "pool_then_calibrate", "pooled_temperature")
    if needs_best and case in ("one row", "all right"):
        with pytest.raises(ValueError, match="still falls at T"):
            pool.fit(members, labels)
        return
    pooled = pool.fit(members, labels)(members)
    assert not bool(pooled.isnan().any())
    torch.testing.assert_close(pooled.exp().sum(1), torch.ones(len(logits)), atol=1e-5, rtol=0)
    assert bool((pooled[logits.isneginf()] < -80).all())
