import numpy as np
import pytest
import torch

from ood_toolkit.detectors import NegLabelDetector, OutlierPromptsDetector

KEYS = [
    *(("openood-vlm", groups) for groups in (1, 5, 100)),
    *(("neglabel", groups) for groups in (5, 100)),
]


@pytest.mark.parametrize(("peer", "groups"), KEYS)
def test_it_is_one_minus_the_other_tools_score_under_their_permutation(golden, peer, groups):
    key = f"{peer}/NegLabel/groups={groups}/logit_scale=100"
    known, unknown = golden.clip_outputs()
    theirs = tuple(golden.aux[f"{key}/perm"].tolist())
    for detector in (NegLabelDetector(groups=groups, permutation=theirs), NegLabelDetector(groups=groups)):
        detector.fit(known)
        golden.check(key, detector(known), detector(unknown), offset=-1.0)


def literal(cosines: np.ndarray, negatives: np.ndarray, groups: list[list[int]], temperature: float) -> float:
    confidence = []
    for group in groups:
        top = np.exp(cosines / temperature)
        confidence.append(top.sum() / (top.sum() + np.exp(negatives[group] / temperature).sum()))
    return 1 - float(np.mean(confidence))


def test_surplus_negatives_are_dropped_before_the_permutation(golden):
    known, _ = golden.clip_outputs()
    few = (
        known.rows(slice(0, 20))
        .with_taps({"negative_cosines": known.taps["negative_cosines"][:20, :11]})
        .to(torch.float64)
    )
    permutation = (8, 0, 3, 6, 1, 7, 2, 5, 4)  # of 9 = 11 − 11 mod 3
    got = NegLabelDetector(groups=3, permutation=permutation).fit(few)(few)
    groups = [[8, 0, 3], [6, 1, 7], [2, 5, 4]]
    text = torch.nn.functional.normalize(few.head.weight, dim=1)
    cosines = (torch.nn.functional.normalize(few.features, dim=1) @ text.T).numpy()
    for row, negatives, score in zip(cosines, few.taps["negative_cosines"].numpy(), got.tolist(), strict=True):
        assert score == pytest.approx(literal(row, negatives, groups, 0.01), rel=1e-9)


def test_another_seed_groups_otherwise_and_one_group_needs_no_seed(golden):
    known, _ = golden.clip_outputs()
    first, second = (NegLabelDetector(groups=5, seed=seed).fit(known)(known) for seed in (0, 1))
    assert not torch.equal(first, second)
    alone, also = (NegLabelDetector(groups=1, seed=seed).fit(known)(known) for seed in (0, 1))
    assert torch.allclose(alone, also, rtol=1e-5)


def test_outlier_prompts_get_the_softmax_mass_beside_the_classes(golden):
    known, _ = golden.clip_outputs()
    tapped = known.with_taps({"outlier_cosines": known.taps["negative_cosines"][:, :3]}).to(torch.float64)
    got = OutlierPromptsDetector().fit(tapped)(tapped)
    text = torch.nn.functional.normalize(tapped.head.weight, dim=1)
    cosines = torch.nn.functional.normalize(tapped.features, dim=1) @ text.T
    everything = torch.cat([cosines, tapped.taps["outlier_cosines"]], dim=1) / 0.01
    assert torch.allclose(got, everything.softmax(dim=1)[:, 20:].sum(dim=1), rtol=1e-9)


def test_wrong_groups_and_permutations_are_refused(golden):
    known, _ = golden.clip_outputs()
    with pytest.raises(ValueError, match="at least 1"):
        NegLabelDetector(groups=0)
    with pytest.raises(ValueError, match="at least as many negative labels"):
        NegLabelDetector(groups=501).fit(known)(known)
    with pytest.raises(ValueError, match="each of 0 … 499 once"):
        NegLabelDetector(groups=5, permutation=(0, 1, 2)).fit(known)(known)


def test_outputs_without_the_tap_are_told_which_one_is_missing(golden):
    known, _ = golden.clip_outputs()
    with pytest.raises(ValueError, match=r"'outlier_cosines'.*\['negative_cosines'\]"):
        OutlierPromptsDetector().fit(known)(known)
