from dataclasses import replace

import numpy as np
import pytest
import torch

from ood_toolkit.detectors.layers import join_layers, split_layers
from ood_toolkit.detectors.mahalanobis_layers import MahalanobisLayersDetector
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import check_detector

RELUS = ("relu1", "relu2")
TAP = "stage_means(layers=('relu1', 'relu2'))"


# the ½ of the Gaussian; a covariance that is divided by 1 or N − 1 and not N; the mean over layers; a ridge
@pytest.mark.parametrize(
    ("key", "settings", "factor"),
    [
        ("openood/MahalanobisEnsemble/noise=0.0", {}, 1 / 2),
        ("openood-vlm/MahalanobisEnsemble/noise=0.0", {}, 1 / 2),
        ("pytorch-ood/MultiMahalanobis", {}, 1 / 400),
        ("pytorch-ood-0.2.0/MultiMahalanobis", {"ridge": 1e-6 * 199 / 200}, 199 / 400),
        ("oodeel/MultiMahalanobis", {"scale": "std"}, 1 / 2),
    ],
)
def test_it_equals_the_other_tools_up_to_scale(golden, golden_classifier, golden_images, key, settings, factor):
    classifier = golden_classifier(TAP)
    detector = MahalanobisLayersDetector(layers=RELUS, **settings).fit(golden_images(classifier, "fit"))
    golden.check(key, *(detector(golden_images(classifier, split)) for split in ("id", "ood")), scale=factor)


def test_the_stages_of_the_golden_network_are_found(golden_classifier, golden_images):
    classifier = golden_classifier(TAP, "stage_means")
    found = golden_images(classifier, "id").taps
    assert torch.equal(found[TAP].nan_to_num(9), found["stage_means"].nan_to_num(9))


def _layered(rows: int, seed: int) -> tuple[Outputs, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 3
    layers = [
        torch.randn(rows, width, generator=generator, dtype=torch.float64) @ torch.full((width, width), 0.2).double()
        + torch.randn(rows, width, generator=generator, dtype=torch.float64)
        + labels.unsqueeze(1)
        for width in (4, 7)
    ]
    plain = Outputs.from_logits(torch.zeros(rows, 3, dtype=torch.float64), labels)
    return replace(plain, taps={"stage_means": join_layers(layers)}), layers


def test_it_equals_a_loop_with_scipy_and_numpy():
    from scipy.spatial.distance import mahalanobis

    train, train_layers = _layered(300, 0)
    test, test_layers = _layered(20, 1)
    expected = np.zeros(20)
    for weight, known, probes in zip((0.3, 2.0), train_layers, test_layers, strict=True):
        known, probes, labels = known.numpy(), probes.numpy(), train.labels.numpy()
        means = [known[labels == c].mean(axis=0) for c in range(3)]
        residuals = known - np.stack(means)[labels]
        precision = np.linalg.inv(residuals.T @ residuals / len(known))
        expected += [weight * min(mahalanobis(row, mean, precision) ** 2 for mean in means) for row in probes]
    detector = MahalanobisLayersDetector(weights=(0.3, 2.0)).fit(train)
    torch.testing.assert_close(detector(test), torch.from_numpy(expected), rtol=1e-9, atol=0)


def test_tuned_weights_favour_the_layer_that_separates():
    train, _ = _layered(300, 0)
    id_rows, layers = _layered(100, 1)
    ood = replace(id_rows, taps={"stage_means": join_layers([layers[0] + 6, layers[1]])})
    tuned = MahalanobisLayersDetector().fit(train).tuned(id_rows, ood)
    assert tuned.weights is not None
    assert tuned.weights[0] > 5 * abs(tuned.weights[1])
    assert (tuned(ood).unsqueeze(1) > tuned(id_rows)).double().mean() > 0.99
    again = tuned.clone().fit(train)
    torch.testing.assert_close(again(ood), tuned(ood))


def test_layers_come_back_as_they_were_joined():
    layers = [torch.rand(3, 2, 5), torch.rand(3, 2, 1), torch.rand(3, 2, 4)]
    for joined in (join_layers(layers), join_layers(layers)[1:], join_layers(layers).double()):
        for before, after in zip(layers, split_layers(joined), strict=True):
            assert torch.equal(before[-len(after) :].to(after.dtype), after)


def test_it_keeps_the_laws():
    check_detector(MahalanobisLayersDetector)
    check_detector(MahalanobisLayersDetector(scale="std"))
