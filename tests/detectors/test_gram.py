from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.gram import GramDetector, gram_rows
from ood_toolkit.detectors.layers import join_layers
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import check_detector

LAYERS = ("conv1", "relu1", "conv2", "relu2")
TAP = "stage_gram(layers=('conv1', 'relu1', 'conv2', 'relu2'), powers=5)"


def _holding_out(golden, train: Outputs, key: str) -> Outputs:
    """The rows reordered, so that every tenth is one that the peer has held out."""
    held, kept = [], []
    for c, out in zip(golden.aux[f"{key}/class_order"], golden.aux[f"{key}/holdout_index_within_class"], strict=True):
        for position, row in enumerate((train.labels == c).nonzero().flatten().tolist()):
            (held if position in out else kept).append(row)
    assert len(kept) == 9 * len(held)
    order = [row for place, last in enumerate(held) for row in (*kept[9 * place : 9 * place + 9], last)]
    return train.rows(order)


@pytest.mark.parametrize("tool", ["openood", "pytorch-ood"])
def test_it_equals_the_other_tools(golden, golden_classifier, golden_images, tool):
    key = f"{tool}/Gram/powers=1-5"
    classifier = golden_classifier(TAP)
    detector = GramDetector(layers=LAYERS, powers=5, group="label", confidence=False)
    detector.fit(_holding_out(golden, golden_images(classifier, "fit"), key))
    fitted = golden.entries[key]["hyperparameters"]
    theirs = torch.tensor(fitted.get("fitted_normalize_factors") or fitted["fitted_layer_norm"])
    torch.testing.assert_close(detector.normalisers, theirs, rtol=1e-4, atol=0)
    scores = []
    for split in ("id", "ood"):
        outputs = golden_images(classifier, split)
        # OpenOOD divides by the confidence, but not within the normaliser; pytorch-ood not at all
        confidence = outputs.logits.softmax(dim=1).amax(dim=1) if tool == "openood" else 1
        scores.append(detector(outputs) / confidence)
    golden.check(key, *scores)


def _gram_rows_literally(layer: torch.Tensor, powers: int) -> torch.Tensor:
    rows = []
    for image in layer:
        per_power = []
        for p in range(1, powers + 1):
            matrix = (image**p) @ (image**p).T
            sums = matrix.sum(dim=1)
            per_power.append(sums.sign() * sums.abs() ** (1 / p))
        rows.append(torch.stack(per_power))
    return torch.stack(rows)


def test_row_sums_are_those_of_the_whole_matrix():
    layer = torch.randn(5, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(gram_rows(layer, 10), _gram_rows_literally(layer, 10))


def test_large_activations_do_not_overflow():
    layer = 1e4 * torch.rand(3, 6, 10) + 1
    expected = _gram_rows_literally(layer.double(), 10)
    torch.testing.assert_close(gram_rows(layer, 10).double(), expected, rtol=1e-5, atol=0)


def _outputs(rows: int, seed: int) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    maps = [torch.randn(rows, width, 6, generator=generator, dtype=torch.float64) for width in (4, 5)]
    plain = Outputs.from_logits(logits, torch.randint(3, (rows,), generator=generator))
    return replace(plain, taps={"stage_gram": join_layers([gram_rows(layer, 10) for layer in maps])})


def test_it_is_the_papers_algorithm_in_loops():
    train, test = _outputs(200, 0), _outputs(15, 1)
    widths = [slice(0, 4), slice(5, 10)]
    kept, held = {c: [] for c in range(3)}, {c: [] for c in range(3)}
    for row, c in enumerate(train.logits.argmax(dim=1).tolist()):
        (held if row % 10 == 9 else kept)[c].append(row)

    def deviations(outputs: Outputs, row: int, c: int) -> list[float]:
        found = []
        for part in widths:
            total = 0.0
            for p in range(10):
                for column in range(part.start, part.stop):
                    known = train.taps["stage_gram"][kept[c], p, column]
                    low, high = known.min().item(), known.max().item()
                    value = outputs.taps["stage_gram"][row, p, column].item()
                    if value < low:
                        total += (low - value) / abs(low + 1e-6)
                    if value > high:
                        total += (value - high) / abs(high + 1e-6)
            found.append(total / outputs.logits[row].softmax(dim=0).max().item())
        return found

    norms = torch.tensor([deviations(train, row, c) for c in held for row in held[c]]).mean(dim=0)
    expected = [
        sum(d / (n + 1e-7) for d, n in zip(deviations(test, row, c), norms.tolist(), strict=True))
        for row, c in enumerate(test.logits.argmax(dim=1).tolist())
    ]
    torch.testing.assert_close(
        GramDetector().fit(train)(test), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9
    )


def test_a_class_without_rows_is_refused_or_takes_the_widest_bounds():
    train = _outputs(200, 0)
    lacking = train.rows(train.predictions != 1)
    with pytest.raises(ValueError, match=r"classes \[1\] have none"):
        GramDetector().fit(lacking)
    detector = GramDetector(absent="skip").fit(lacking)
    torch.testing.assert_close(detector.low[1], detector.low[[0, 2]].amin(dim=0), equal_nan=True)
    torch.testing.assert_close(detector.high[1], detector.high[[0, 2]].amax(dim=0), equal_nan=True)


def test_it_keeps_the_laws():
    check_detector(GramDetector)
