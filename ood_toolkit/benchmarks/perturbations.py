"""How steady the answers are along the videos of ImageNet-P, counted from the rankings in the score file."""

import re
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from ood_toolkit.benchmarks.answers import Answerer
from ood_toolkit.corruptions import compares_with_first
from ood_toolkit.metrics import flip_probability, top5_distance
from ood_toolkit.scorefile import Column, ScoreFile

_FRAME = re.compile(r"(.+)#(\d+)(?:\.\w+)?")
"""`<video>#<number>`, as `VideoFrames` calls them; a frame that was extracted has a suffix."""
_MOST = 15.0
"""The largest top-5 distance."""


def steadiness(scores: ScoreFile, who: Answerer, part: str, view: str, level: float | None) -> dict[str, Any]:
    """Flip probability and top-5 distance of one model or ensemble on the videos of one perturbation.

    Every video counts alike. One with a frame that could not be read is left out, as is one of a single frame.

    Args:
        scores: of the run, with rankings of the part.
        who: whose answers.
        part: "imagenet-p/<perturbation>".
        view: class mask in words, "" for all classes.
        level: of the intervals, which are normal over videos; None for none.
    """
    perturbation = part.split("/")[1]
    first = compares_with_first(perturbation)
    ranking = scores.columns[Column("ranking", who.model, who.method, part, view)]
    videos, torn = _videos(scores.ids[part])
    place: dict[str, Any] = {"model": str(who), "dataset": part, "perturbation": perturbation, "mask": view}
    if not videos:
        why = "no video has all its frames; frames that were extracted must be called <video>#<number>.<suffix>"
        return place | {"videos": 0, "left_out": torn, "reason": why}
    flips = [flip_probability(ranking[rows, 0], with_first=first) for rows in videos]
    distances = [top5_distance(ranking[rows], with_first=first) for rows in videos]
    return place | {
        "videos": len(videos),
        "left_out": torn,
        "with_first": first,
        "flip": _number(flips, 1.0, level),
        "top5_distance": _number(distances, _MOST, level),
    }


def _videos(ids: Sequence[str]) -> tuple[list[list[int]], int]:
    """The rows of every whole video in the order of its frames, and how many videos are not whole."""
    found: dict[str, dict[int, int]] = {}
    for row, name in enumerate(ids):
        frame = _FRAME.fullmatch(name)
        if frame is not None:
            found.setdefault(frame[1], {})[int(frame[2])] = row
    numbers = [number for rows in found.values() for number in rows]
    expected = range(min(numbers, default=0), max(numbers, default=0) + 1)
    whole = [[rows[number] for number in expected] for rows in found.values() if set(rows) == set(expected)]
    whole = [rows for rows in whole if len(rows) > 1]
    return whole, len(found) - len(whole)


def _number(values: Sequence[float], most: float, level: float | None) -> dict[str, float | None]:
    mean = fmean(values)
    if level is None or len(values) < 2:
        return {"value": mean, "low": None, "high": None}
    half = NormalDist().inv_cdf(0.5 + level / 2) * stdev(values) / len(values) ** 0.5
    return {"value": mean, "low": max(0.0, mean - half), "high": min(most, mean + half)}
