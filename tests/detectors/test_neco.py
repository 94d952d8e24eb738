from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from ood_toolkit.detectors import NECODetector


@pytest.mark.parametrize("arch", ["resnet", "vit", "deit"])
def test_neco_agrees_with_the_authors_code(golden, arch):
    detector = NECODetector(dim=20, arch=arch).fit(golden.outputs("fit"))
    golden.check(f"neco-copy/NECO/dim=20/arch={arch}", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("constant", [False, True])
def test_neco_is_the_kept_share_of_the_standardised_length(outputs_like, constant):
    def prepared(outputs):
        features = outputs.features.clone()
        if constant:
            features[:, 2] = 0.1  # a dead unit, which standardising must not blow up
        return replace(outputs, features=features, logits=outputs.head(features))

    train, test = prepared(outputs_like(240)), prepared(outputs_like(30, seed=1))
    scaler = StandardScaler().fit(train.features.numpy())
    pca = PCA(0.9, svd_solver="full").fit(scaler.transform(train.features.numpy()))
    scaled = scaler.transform(test.features.numpy())
    ratio = np.linalg.norm(pca.transform(scaled), axis=1) / np.linalg.norm(scaled, axis=1)
    expected = torch.from_numpy(-ratio * test.logits.numpy().max(axis=1))
    torch.testing.assert_close(NECODetector().fit(train)(test), expected, rtol=1e-8, atol=1e-9)


def test_neco_of_all_components_is_minus_one(outputs_like):
    detector = NECODetector(dim=8, arch="resnet").fit(outputs_like(240))
    torch.testing.assert_close(detector(outputs_like(30, seed=1)), -torch.ones(30, dtype=torch.float64))


def test_unknown_variants_and_dimensions_are_refused(outputs_like):
    with pytest.raises(ValueError, match="arch must be one of resnet, vit, deit, swin, got 'vgg'"):
        NECODetector(arch="vgg").fit(outputs_like(20))
    with pytest.raises(ValueError, match="dim must lie between 1 and 8, got 9"):
        NECODetector(dim=9).fit(outputs_like(20))
