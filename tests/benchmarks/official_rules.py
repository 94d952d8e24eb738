"""The metrics of the ImageNet-A/O authors, written down literally: loops over images, nothing of the toolkit."""

import math

import numpy as np


def rms(confidence: np.ndarray, correct: np.ndarray, *, drop_last: bool) -> float:
    order = np.argsort(confidence)
    confidence, correct = confidence[order], correct[order]
    count = len(confidence) // 100
    edges = [[100 * b, 100 * (b + 1)] for b in range(count)]
    edges[-1][1] = len(confidence)
    total = 0.0
    for start, end in edges[:-1] if drop_last else edges:
        gap = confidence[start:end].mean() - correct[start:end].mean()
        total += (end - start) / len(confidence) * gap**2
    return math.sqrt(total)


def aurra(confidence: np.ndarray, correct: np.ndarray) -> float:
    ranked = correct[np.argsort(-confidence)]
    return float(np.mean([ranked[: k + 1].mean() for k in range(len(ranked))]))


def average_precision(score: np.ndarray, positive: np.ndarray) -> float:
    """Step-wise: the sum over positives of the precision where each is found, over their number."""
    found = 0
    total = 0.0
    for rank, row in enumerate(np.argsort(-score), 1):
        if positive[row]:
            found += 1
            total += found / rank
    return total / positive.sum()


def pairs_won(score: np.ndarray, positive: np.ndarray) -> float:
    wins = [float(p > n) + 0.5 * float(p == n) for p in score[positive] for n in score[~positive]]
    return float(np.mean(wins))


def fpr_at_95(score: np.ndarray, positive: np.ndarray) -> float:
    """False positives where the recall is nearest to 95%; the authors' script walks from the lowest score upwards."""
    order = np.argsort(-score)
    recall = (np.cumsum(positive[order]) / positive.sum())[::-1]
    false = np.cumsum(~positive[order])[::-1]
    return float(false[np.argmin(np.abs(recall - 0.95))] / (~positive).sum())
