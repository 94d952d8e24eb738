from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ood_toolkit import outputs as outputs_module
from ood_toolkit import reading as reading_module
from ood_toolkit.outputs import UNKNOWN, Head, NaNRows, Outputs


def outputs(rows: int = 6, classes: int = 4, width: int = 3, dtype: torch.dtype = torch.float32) -> Outputs:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(rows, width, generator=generator).to(dtype)
    head = Head(torch.randn(classes, width, generator=generator).to(dtype), torch.arange(classes).to(dtype))
    labels = torch.arange(rows) % classes
    return Outputs(logits=head(features), features=features, labels=labels, head=head, taps={"t": features[:, :1]})


def test_the_head_turns_features_into_logits():
    seen = outputs()
    expected = torch.stack(
        [torch.tensor([float(w @ x) + float(b) for w, b in zip(seen.head.weight, seen.head.bias, strict=True)])
         for x in seen.features]
    )  # fmt: skip
    assert torch.allclose(seen.logits, expected, atol=1e-6)


def test_half_precision_is_promoted_so_that_close_logits_do_not_tie():
    logits = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    seen = Outputs.from_logits(logits)
    assert seen.logits.dtype == seen.features.dtype == seen.head.weight.dtype == torch.float32


def test_logits_alone_are_features_under_an_identity_head():
    logits = torch.randn(5, 3)
    seen = Outputs.from_logits(logits)
    assert torch.equal(seen.head(seen.features), logits)
    assert seen.labels.tolist() == [UNKNOWN] * 5


def test_batches_are_the_rows_in_order():
    seen = outputs(rows=7)
    parts = list(seen.batches(rows=3))
    assert [len(part) for part in parts] == [3, 3, 1]
    together = Outputs.cat(parts)
    for name in ("logits", "features", "labels"):
        assert torch.equal(getattr(together, name), getattr(seen, name))
    assert torch.equal(together.taps["t"], seen.taps["t"])


@pytest.mark.parametrize("index", [slice(1, 4), [2, 0], torch.tensor([True, False] * 3)])
def test_rows_keep_every_field_together(index: object):
    seen = outputs()
    picked = seen.rows(index)  # pyright: ignore[reportArgumentType]
    numbers = torch.arange(len(seen))[index]  # pyright: ignore[reportArgumentType]
    assert torch.equal(picked.logits, seen.logits[numbers])
    assert torch.equal(picked.labels, seen.labels[numbers])
    assert torch.equal(picked.taps["t"], seen.taps["t"][numbers])


def test_a_class_mask_cuts_logits_and_head_alike_and_renumbers_labels():
    seen = outputs()
    masked = seen.select_classes(torch.tensor([3, 1]))
    assert torch.allclose(masked.head(masked.features), masked.logits, atol=1e-6)
    assert torch.equal(masked.logits, seen.logits[:, [3, 1]])
    # labels 0 1 2 3 0 1: class 1 is now 1, class 3 is now 0, the others are unknown
    assert masked.labels.tolist() == [UNKNOWN, 1, UNKNOWN, 0, UNKNOWN, 1]


def test_a_class_mask_leaves_unknown_labels_unknown():
    seen = outputs().with_labels(torch.full((6,), UNKNOWN))
    assert seen.select_classes(torch.tensor([3, 1])).labels.tolist() == [UNKNOWN] * 6


def test_a_class_mask_names_a_class_once():
    with pytest.raises(ValueError, match="twice"):
        outputs().select_classes(torch.tensor([1, 1]))


def test_nan_rows_are_named():
    logits = torch.zeros(4, 3)
    logits[2, 1] = torch.nan
    with pytest.raises(NaNRows, match=r"logits hold NaN in 1 of 4 rows, first \[2\]") as error:
        Outputs.from_logits(logits)
    assert error.value.rows == [2]


def test_minus_infinity_is_a_class_that_cannot_be():
    seen = Outputs.from_logits(torch.tensor([[0.0, -torch.inf]]))
    assert seen.predictions.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(6, 5)}, r"logits should be \(6, 4\)"),
        ({"features": torch.zeros(6, 2)}, r"features should be \(6, 3\)"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, r"labels should be \(6,\)"),
        ({"labels": torch.full((6,), 4)}, r"labels must lie in \[0, 4\)"),
        ({"labels": torch.full((6,), -2)}, r"labels must lie in \[0, 4\)"),
        ({"labels": torch.zeros(6)}, "labels must be integers"),
        ({"logits": torch.zeros(6, 4, dtype=torch.int64)}, "logits must be floating-point"),
        ({"taps": {"t": torch.zeros(2)}}, "tap 't' has 2 rows"),
    ],
)
def test_wrong_shapes_and_kinds_are_refused_by_name(change: dict, message: str):
    seen = outputs()
    fields = {"logits": seen.logits, "features": seen.features, "labels": seen.labels, "head": seen.head, **change}
    with pytest.raises(ValueError, match=message):
        Outputs(**fields)


def test_mapped_outputs_keep_the_dtype_of_the_file_and_promote_on_reading():
    half = outputs(dtype=torch.float64)
    fields = {"labels": half.labels, "head": half.head}
    seen = Outputs.mapped(logits=half.logits.half(), features=half.features.half(), **fields)
    assert seen.logits.dtype == torch.float16
    (batch,) = seen.batches()
    assert batch.logits.dtype == torch.float32
    assert torch.equal(batch.logits, half.logits.half().float())


def test_moving_to_another_dtype_leaves_labels_alone():
    seen = outputs().to(torch.float64)
    assert seen.logits.dtype == seen.head.bias.dtype == seen.taps["t"].dtype == torch.float64
    assert seen.labels.dtype == torch.int64


Change = Callable[[Outputs], Outputs]
CHANGES: dict[str, Change] = {
    "a slice": lambda seen: seen.rows(slice(1, -1)),
    "every other row": lambda seen: seen.rows(slice(None, None, 2)),
    "rows in another order": lambda seen: seen.rows(torch.arange(len(seen)).flip(0)),
    "rows from the end": lambda seen: seen.rows([-1, -2, 0]),
    "a mask": lambda seen: seen.rows(seen.labels != 1),
    "successive rows": lambda seen: seen.rows(torch.arange(len(seen) // 2) + len(seen) // 4),
    "all rows": lambda seen: seen.rows(torch.arange(len(seen))),
    "two classes": lambda seen: seen.select_classes(torch.tensor([1, 0])),
    "calibrated": lambda seen: seen.through(lambda logits: (2 * logits).log_softmax(dim=1)),
    "float64": lambda seen: seen.to(torch.float64),
    "the same place": lambda seen: seen.to("cpu"),
    "other labels": lambda seen: seen.with_labels(seen.labels.clamp_max(0)),
}


def in_memory_and_mapped(rows: int = 41) -> tuple[Outputs, Outputs]:
    seen = outputs(rows=rows)
    mapped = Outputs.mapped(
        logits=seen.logits, features=seen.features, labels=seen.labels, head=seen.head, taps=seen.taps
    )
    return seen, mapped


def assert_equal(one: Outputs, other: Outputs) -> None:
    assert len(one) == len(other)
    assert (one.classes, one.width, sorted(one.taps)) == (other.classes, other.width, sorted(other.taps))
    fields: dict[str, Callable[[Outputs], Tensor]] = {
        "logits": lambda seen: seen.logits,
        "features": lambda seen: seen.features,
        "labels": lambda seen: seen.labels,
        "predictions": lambda seen: seen.predictions,
        "correct": lambda seen: seen.correct,
        "head": lambda seen: seen.head.weight,
        **{f"tap {name}": lambda seen, name=name: seen.taps[name] for name in one.taps},
    }
    for name, field in fields.items():
        assert field(one).dtype == field(other).dtype, name
        assert torch.equal(field(one), field(other)), name


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("second", CHANGES)
def test_mapped_outputs_change_as_those_in_memory_do(first: str, second: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outputs_module, "_BATCH_NUMBERS", 30)
    monkeypatch.setattr(reading_module, "BLOCK_NUMBERS", 30)
    plain, mapped = in_memory_and_mapped(rows=150)
    for change in (CHANGES[first], CHANGES[second]):
        plain, mapped = change(plain), change(mapped)
    assert_equal(plain, mapped)
    for one, other in zip(plain.batches(rows=7), mapped.batches(rows=7), strict=True):
        assert_equal(one, other)
    assert_equal(replace(plain, labels=plain.labels.clamp_min(0)), replace(mapped, labels=mapped.labels.clamp_min(0)))


def test_a_row_that_is_not_there_is_refused_in_mapped_outputs():
    _, mapped = in_memory_and_mapped()
    with pytest.raises(IndexError, match="index 41 is out of bounds"):
        mapped.rows([0, 41])
    with pytest.raises(IndexError, match="index -42 is out of bounds"):
        mapped.rows([0, -42])


def test_a_tap_of_mapped_outputs_is_asked_for_by_name():
    _, mapped = in_memory_and_mapped()
    assert list(mapped.taps) == ["t"]
    assert len(mapped.taps) == 1
    with pytest.raises(KeyError, match="'logits'"):
        mapped.taps["logits"]


class Largest(TorchDispatchMode):
    """Counts the numbers in the largest tensor that some operation makes anew."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point() and not made._is_view():
            self.numbers = max(self.numbers, made.numel())
        return made


def test_a_sweep_over_chosen_masked_calibrated_moved_rows_holds_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outputs_module, "_BATCH_NUMBERS", 1 << 10)
    monkeypatch.setattr(reading_module, "BLOCK_NUMBERS", 1 << 10)
    whole = outputs(rows=10_000)
    seen = Outputs.mapped(
        logits=whole.logits.half(), features=whole.features.half(), labels=whole.labels, head=whole.head
    )
    with Largest() as largest:
        chosen = seen.rows(torch.randperm(10_000)[:9_000]).rows(slice(10, None))
        chosen = chosen.select_classes(torch.tensor([2, 0, 1])).rows(torch.arange(8_000)).to(torch.float64)
        total = sum(float(batch.logits.sum() + batch.features.sum()) for batch in chosen.batches())
        known = chosen.through(lambda logits: logits.log_softmax(dim=1)).rows(slice(0, 7_000))
        right = int(known.correct.sum()) + sum(float(batch.features.exp().sum()) for batch in known.batches())
    assert total != 0
    assert right > 7_000  # probabilities sum to 1 in each row
    assert largest.numbers <= 1 << 10


def test_half_precision_is_promoted_before_it_is_calibrated():
    seen = outputs()
    half = seen.logits.half()
    mapped = Outputs.mapped(logits=half, features=seen.features.half(), labels=seen.labels, head=seen.head)
    calibrated = mapped.through(lambda logits: (logits / 3).log_softmax(dim=1))
    assert torch.equal(calibrated.logits, (half.float() / 3).log_softmax(dim=1))


def test_batches_are_smaller_where_a_tap_is_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outputs_module, "_BATCH_NUMBERS", 70 * 500)
    seen = outputs(rows=1000).with_taps({"wide": torch.zeros(1000, 10, 49)})
    mapped = Outputs.mapped(
        logits=seen.logits, features=seen.features, labels=seen.labels, head=seen.head, taps=seen.taps
    )
    assert len(next(seen.batches())) == len(next(mapped.batches())) == 70 * 500 // (4 + 3 + 490)


def test_the_owner_of_a_store_lives_as_long_as_somebody_may_read():
    import gc
    import weakref

    class Owner: ...

    seen = outputs()
    owner = Owner()
    alive = weakref.ref(owner)
    mapped = Outputs.mapped(logits=seen.logits, features=seen.features, labels=seen.labels, head=seen.head, owner=owner)
    (batch,) = mapped.rows(slice(0, 3)).select_classes(torch.tensor([0, 2])).to(torch.float64).batches()
    del owner, mapped
    gc.collect()
    assert alive() is not None
    del batch
    gc.collect()
    assert alive() is None
