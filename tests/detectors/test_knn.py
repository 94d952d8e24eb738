import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch.nn.functional import normalize

from ood_toolkit.detectors import KNNDetector
from ood_toolkit.outputs import Outputs


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("pytorch-ood/KNN/k=50", {}),
        ("pytorch-ood/KNN/k=1", {"k": 1}),
        ("pytorch-ood-0.2.0/KNN/k=1", {"k": 1, "normalise": False}),
    ],
)
def test_knn_agrees_with_the_tools_that_return_distances(golden, key, settings):
    detector = KNNDetector(**settings).fit(golden.outputs("fit"))
    golden.check(key, detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize(
    ("key", "k", "scale", "offset"),
    [
        ("openood/KNN/k=50", 50, 1.0, 0.0),
        ("openood/KNN/k=1", 1, 1.0, 0.0),
        ("openood-vlm/KNN/k=50", 50, 1.0, 0.0),
        ("oodeel/KNN/k=50", 50, 1.0, 0.0),
        ("oodeel/KNN/k=1", 1, 1.0, 0.0),
        ("detectors/KNN/k=50", 50, 1.0, 0.0),
        ("detectors/KNN/k=50/metric=cosine", 50, 0.5, -1.0),  # minus the cosine: d²/2 − 1
    ],
)
def test_knn_squared_agrees_with_the_tools_that_return_squares_or_cosines(golden, key, k, scale, offset):
    detector = KNNDetector(k=k).fit(golden.outputs("fit"))
    scores = [detector(golden.outputs(part)).double().square() for part in ("id", "ood")]
    golden.check(key, *scores, scale=scale, offset=offset)


@pytest.mark.parametrize("k", [1, 7, 240])
def test_the_kth_distance_is_scikit_learns(outputs_like, k):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    search = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(normalize(train.features).numpy())
    expected = torch.from_numpy(search.kneighbors(normalize(test.features).numpy())[0][:, -1])
    torch.testing.assert_close(KNNDetector(k=k).fit(train)(test), expected, rtol=1e-7, atol=1e-9)


def test_a_training_row_is_at_distance_zero_of_itself_in_float32(outputs_like):
    train = outputs_like(240).to(torch.float32)
    assert KNNDetector(k=1).fit(train)(train).abs().max() == 0


def test_near_duplicates_keep_their_distance_in_float32():
    # ‖a‖² + ‖b‖² − 2ab would round 1e-10 away
    base = normalize(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)))
    moved = base.clone()
    moved[:, 0] += 1e-5
    scores = KNNDetector(k=1, normalise=False).fit(Outputs.from_logits(base))(Outputs.from_logits(moved))
    torch.testing.assert_close(scores, (moved - base).norm(dim=1), rtol=1e-6, atol=0)
    assert (scores > 5e-6).all()


def test_more_neighbours_than_training_rows_are_refused(outputs_like):
    with pytest.raises(ValueError, match="between 1 and the 20 training rows, got 50"):
        KNNDetector(k=50).fit(outputs_like(20))
