from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from scipy.stats import yeojohnson
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import PowerTransformer, StandardScaler

from ood_toolkit.detectors.combood import CombOODDetector, yeo_johnson
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import check_detector

TAP = "activation_extremes"


@pytest.fixture
def extreme(outputs_like):
    """Outputs with skewed extremes of three activations."""

    def outputs(rows: int, seed: int) -> Outputs:
        plain = outputs_like(rows, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        skewed = torch.cat([-noise[:, :3].exp(), (0.5 * noise[:, 3:] + plain.features[:, :3]).exp()], dim=1)
        return replace(plain, taps={TAP: skewed})

    return outputs


def reference(train: Outputs, test: Outputs, k: int, weight: float, ridge: float) -> np.ndarray:
    """The score by scikit-learn and scipy, row by row."""

    def extremes(outputs: Outputs) -> np.ndarray:
        logits = outputs.logits.numpy()
        return np.column_stack([outputs.taps[TAP].numpy(), logits.max(axis=1), -logits.min(axis=1)])

    def unit(outputs: Outputs) -> np.ndarray:
        features = outputs.features.numpy()
        return features / np.linalg.norm(features, axis=1, keepdims=True)

    scaler, power = StandardScaler(), PowerTransformer()
    known = np.asarray(power.fit_transform(scaler.fit_transform(extremes(train))))
    precision = np.linalg.inv(np.cov(known, rowvar=False) + ridge * np.eye(known.shape[1]))
    inner = [mahalanobis(row, 0 * row, precision) for row in power.transform(scaler.transform(extremes(test)))]
    near = NearestNeighbors(n_neighbors=k).fit(unit(train)).kneighbors(unit(test))[0][:, -1]
    return weight * np.log(near**2) + np.square(inner)


@pytest.mark.parametrize(("k", "weight", "ridge"), [(50, None, 1.0), (3, 8.0, 0.1)])
def test_it_is_the_sum_that_scikit_learn_and_scipy_give(extreme, k, weight, ridge):
    train, test = extreme(400, 0), extreme(30, 1)
    expected = reference(train, test, k, 8**0.5 if weight is None else weight, ridge)
    scores = CombOODDetector(k, weight, ridge).fit(train)(test)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-6)


def test_blocks_of_training_rows_merge_to_the_same_transform(extreme, monkeypatch):
    train, test = extreme(400, 0), extreme(30, 1)
    whole = CombOODDetector().fit(train)(test)
    monkeypatch.setattr("ood_toolkit.stats._CHUNK_NUMBERS", 8 * 8 * 64)
    np.testing.assert_allclose(CombOODDetector().fit(train)(test).numpy(), whole.numpy(), rtol=1e-7)


@pytest.mark.parametrize("power", [-1.5, 0.0, 0.3, 1.0, 2.0, 3.0])
def test_the_power_transform_is_scipys(power):
    values = np.array([-5.0, -0.5, 0.0, 1e-9, 0.7, 20.0])
    found = yeo_johnson(torch.from_numpy(values).unsqueeze(1), torch.tensor([power], dtype=torch.float64))
    np.testing.assert_allclose(found.squeeze(1).numpy(), np.asarray(yeojohnson(values, power)), rtol=1e-12)


def test_a_column_that_never_varies_changes_nothing(extreme):
    train, test = extreme(200, 0), extreme(30, 1)

    def widened(outputs: Outputs) -> Outputs:
        still = torch.full((len(outputs), 1), 3.0, dtype=torch.float64)
        return replace(outputs, taps={TAP: torch.cat([outputs.taps[TAP], still], dim=1)})

    plain = CombOODDetector().fit(train)(test)
    torch.testing.assert_close(CombOODDetector().fit(widened(train))(widened(test)), plain)


def test_a_training_row_itself_scores_finite(extreme):
    train = extreme(200, 0)
    assert CombOODDetector(k=1).fit(train)(train).isfinite().all()


def test_k_must_be_a_number_of_neighbours(extreme):
    with pytest.raises(ValueError, match="k must lie between 1 and the 20 training rows, got 50"):
        CombOODDetector().fit(extreme(20, 0))


def test_it_keeps_the_laws():
    check_detector(CombOODDetector)
    check_detector(CombOODDetector(k=5, weight=1.0))
