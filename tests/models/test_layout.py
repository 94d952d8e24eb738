"""The memory layout of convolutions changes how fast a model is, and nothing that anyone keeps."""

from dataclasses import replace

import pytest
import torch

from ood_toolkit.benchmarks.choices import DEFAULTS
from ood_toolkit.benchmarks.loading import load_models
from ood_toolkit.models import Classifier

TAPS = (
    "stage_means",
    "stage_gram",
    "rank_one_removed",
    "ash_p_map",
    "ash_b_map",
    "ash_s_map",
    "scale_map",
    "react_map",
    "nudged_features",
    "augmented_logits",
    "gradient_density",
    "gradient_means",
)


def loaded(layout: str, name: str) -> Classifier:
    torch.manual_seed(0)
    choices = replace(DEFAULTS, models=(name,), pretrained=False, channels_last=layout)
    (model,), _ = load_models(choices, "folders", "cpu", TAPS)
    return model.classifier


def is_channels_last(classifier: Classifier) -> bool:
    weights = [p for p in classifier.model.parameters() if p.ndim == 4 and min(p.shape[1:3]) > 1]
    return all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:mobilenet_v2", "timm:convnext_atto"])
def test_either_layout_gives_the_same_outputs_and_taps(name: str):
    plain, last = loaded("off", name), loaded("auto", name)
    assert (is_channels_last(plain), is_channels_last(last)) == (False, True)
    images = torch.rand(3, 3, 64, 64)
    expected, got = plain(images), last(images)
    assert set(expected.taps) == set(got.taps)
    for field in ("logits", "features"):
        assert torch.allclose(getattr(got, field), getattr(expected, field), rtol=1e-4, atol=1e-5), field
    for tap in set(expected.taps) - {"nudged_features", "stage_gram"}:
        assert torch.allclose(got.taps[tap], expected.taps[tap], rtol=1e-3, atol=1e-4, equal_nan=True), tap


def test_either_layout_has_the_same_store():
    assert loaded("on", "timm:resnet18").fingerprint() == loaded("off", "timm:resnet18").fingerprint()


def test_another_word_for_the_layout_is_refused():
    with pytest.raises(ValueError, match="--channels-last must be auto, on or off; got 'yes'"):
        loaded("yes", "timm:resnet18")
