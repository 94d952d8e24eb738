import pytest
import torch

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
