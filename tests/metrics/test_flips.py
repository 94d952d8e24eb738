import itertools

import numpy as np
import pytest
from scipy.stats import rankdata

from ood_toolkit.metrics import UndefinedMetricError, flip_probability, top5_distance


def literal_distance(earlier: list[int], later: list[int]) -> int:
    """The double sum of the paper over whole rankings: 1(1 ≤ j − 1 ≤ 5) for j between min(i, σ(i)) + 1 and the max."""
    total = 0
    for i in range(1, 6):
        sigma = later.index(earlier[i - 1]) + 1
        for j in range(min(i, sigma) + 1, max(i, sigma) + 1):
            total += 1 <= j - 1 <= 5
    return total


@pytest.mark.parametrize("with_first", [False, True])
def test_top5_distance_is_the_papers_double_sum_over_whole_rankings(with_first: bool):
    draw = np.random.default_rng(0)
    for _ in range(20):
        frames = np.argsort(-(np.linspace(2, 0, 12) + draw.normal(size=(6, 12)) * draw.uniform(0, 1)), axis=1)
        literal = [
            literal_distance(frames[0 if with_first else number - 1].tolist(), frames[number].tolist())
            for number in range(1, 6)
        ]
        assert top5_distance(frames[:, :5], with_first=with_first) == pytest.approx(np.mean(literal))


def test_top5_distance_agrees_with_ranks_capped_at_six():
    """The authors compute it from ranks: |min(i, 6) − min(rank, 6)| over the first five of the earlier frame."""
    logits = np.random.default_rng(1).normal(size=(8, 30))
    expected = []
    for earlier, later in itertools.pairwise(logits):
        ranks = rankdata(-later, method="ordinal")[np.argsort(-earlier)]
        expected.append(np.abs(np.minimum(np.arange(1, 31), 6) - np.minimum(ranks, 6))[:5].sum())
    assert top5_distance(np.argsort(-logits, axis=1)[:, :5]) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("with_first", [False, True])
def test_flip_probability_counts_changes_from_the_frame_before_or_from_the_first(with_first: bool):
    predictions = np.random.default_rng(2).integers(0, 3, 40).tolist()
    flips = 0
    reference = predictions[0]
    for prediction in predictions[1:]:
        flips += prediction != reference
        if not with_first:
            reference = prediction
    assert flip_probability(predictions, with_first=with_first) == pytest.approx(flips / 39)


def test_a_steady_sequence_never_flips_and_an_alternating_one_always_does():
    assert flip_probability([4] * 9) == top5_distance([[1, 2, 3, 4, 5]] * 9) == 0
    assert flip_probability([1, 2] * 5) == 1
    assert top5_distance([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]) == 15


def test_a_single_frame_has_no_flip_probability():
    with pytest.raises(UndefinedMetricError, match="two frames to compare, got 1"):
        flip_probability([3])
    with pytest.raises(ValueError, match=r"expected 2 axes.*\(4,\)"):
        top5_distance([1, 2, 3, 4])
