import numpy as np
import pytest
import torch

from ood_toolkit.detectors import (
    ClipCosineDetector,
    ClipEnergyDetector,
    ClipEntropyDetector,
    GLMCMDetector,
    MCMDetector,
)
from ood_toolkit.detectors.clip import local_concept_mismatch
from ood_toolkit.outputs import Head, Outputs

GOLDEN = [
    ("mcm/MCM/tau=1", MCMDetector(), -1.0),
    ("ninco/MCM/tau=1", MCMDetector(), -1.0),
    ("openood/MCM/tau=1", MCMDetector(), -1.0),
    ("pytorch-ood/MCM/tau=1", MCMDetector(), -1.0),
    ("openood-vlm/MCM/tau=1/logit_scale=100", MCMDetector(temperature=0.01), -1.0),
    ("mcm/ClipCosine", ClipCosineDetector(), 0.0),
    ("ninco/ClipCosine", ClipCosineDetector(), 0.0),
    ("mcm/ClipEnergy/tau=1", ClipEnergyDetector(temperature=1.0), 0.0),
    ("mcm/ClipEnergy/tau=0.01", ClipEnergyDetector(), 0.0),
    ("mcm/ClipEntropy/tau=1", ClipEntropyDetector(), 0.0),
]


@pytest.mark.parametrize(("key", "detector", "offset"), GOLDEN, ids=[key for key, *_ in GOLDEN])
def test_it_equals_the_other_tools_on_cosines_whatever_the_scale_of_the_head(golden, key, detector, offset):
    known, unknown = golden.clip_outputs()
    fitted = detector.clone().fit(known)
    golden.check(key, fitted(known), fitted(unknown), offset=offset)


def test_neither_the_length_of_embeddings_nor_the_head_s_scale_matters(golden):
    known, _ = golden.clip_outputs()
    head = Head(known.head.weight * torch.rand(20, 1).add(0.5), known.head.bias)
    features = known.features * torch.rand(len(known), 1).add(0.5)
    scaled = Outputs(logits=head(features), features=features, labels=known.labels, head=head)
    assert torch.allclose(MCMDetector().fit(scaled)(scaled), MCMDetector().fit(known)(known), rtol=0, atol=2e-7)


def test_the_local_match_is_the_best_patch_and_class_written_out():
    cosines = torch.rand(12, 5, 7, dtype=torch.float64)
    got = local_concept_mismatch(cosines, temperature=0.1)
    for image, score in zip(cosines.numpy() / 0.1, got.tolist(), strict=True):
        best = max((np.exp(patch) / np.exp(patch).sum()).max() for patch in image)
        assert score == pytest.approx(1 - best, rel=1e-9)


def test_gl_mcm_adds_the_weighted_local_part(golden):
    known, _ = golden.clip_outputs()
    patches = known.features.unsqueeze(1) + 0.1 * torch.randn(len(known), 9, known.width)
    cosines = torch.nn.functional.normalize(patches, dim=2) @ torch.nn.functional.normalize(known.head.weight, dim=1).T
    tapped = known.with_taps({"local_mcm": local_concept_mismatch(cosines)})
    whole = known.features @ torch.nn.functional.normalize(known.head.weight, dim=1).T
    for weight in (1.0, 0.3):
        got = GLMCMDetector(local_weight=weight).fit(known)(tapped)
        # the paper's S_MCM + λ S_L-MCM
        confidence = whole.softmax(dim=1).amax(dim=1) + weight * cosines.softmax(dim=2).amax(dim=(1, 2))
        assert torch.allclose(got, 1 + weight - confidence, atol=1e-6)
