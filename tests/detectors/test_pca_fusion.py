import numpy as np
import pytest
import torch

from ood_toolkit.detectors import EnergyDetector, PCADetector, ReActDetector
from ood_toolkit.detectors.pca_fusion import PCAFusionDetector
from ood_toolkit.testing import check_detector


def literal_scores(train, test, *, dim, clip, residual_of="clipped"):
    """The authors' steps in NumPy, one row at a time."""
    rows, head = train.features.numpy(), train.head
    weight, bias = head.weight.numpy(), head.bias.numpy()
    axes = np.linalg.svd(np.cov(rows.T))[0][:, :dim]
    rest = np.identity(rows.shape[1]) - axes @ axes.T
    scores = []
    for feature in test.features.numpy():
        clipped = np.minimum(feature, clip)
        error = (clipped if residual_of == "clipped" else feature) - rows.mean(axis=0)
        share = np.linalg.norm(error @ rest) / np.linalg.norm(clipped)
        scores.append(-np.log(np.exp(weight @ clipped + bias).sum()) * (1 - share))
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("residual_of", ["clipped", "raw"])
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("percentile", [60.0, 92.0])
def test_it_is_the_authors_recipe_row_by_row(outputs_like, dim, percentile, residual_of):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    clip = np.percentile(train.features.numpy(), percentile)
    expected = literal_scores(train, test, dim=dim, clip=clip, residual_of=residual_of)
    scores = PCAFusionDetector(dim, percentile, residual_of=residual_of).fit(train)(test)
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)


def test_a_clip_that_is_given_takes_the_place_of_the_percentile(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    scores = PCAFusionDetector(dim=2, clip=1.0).fit(train)(test)
    torch.testing.assert_close(scores, literal_scores(train, test, dim=2, clip=1.0), rtol=1e-9, atol=1e-9)


def test_it_is_the_product_of_the_two_detectors_it_joins(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    error = PCADetector(dim=3).fit(train)(test)
    energy = EnergyDetector()(test)
    torch.testing.assert_close(PCAFusionDetector(dim=3, percentile=None).fit(train)(test), energy * (1 - error))
    every_axis = PCAFusionDetector(dim=8, percentile=90.0).fit(train)(test)
    torch.testing.assert_close(every_axis, ReActDetector(90.0).fit(train)(test))


def test_few_rows_leave_out_the_axes_that_only_rounding_would_choose(outputs_like):
    train, test = outputs_like(5), outputs_like(30, seed=1)
    scores = PCAFusionDetector(dim=7).fit(train)(test)
    torch.testing.assert_close(scores, PCAFusionDetector(dim=4).fit(train)(test), rtol=0, atol=0)
    torch.testing.assert_close(PCAFusionDetector(dim=7).fit(train.rows([3, 1, 4, 0, 2]))(test), scores)


def test_it_keeps_an_eighth_of_the_axes_unless_told(golden):
    detector = PCAFusionDetector().fit(golden.outputs("fit"))
    assert detector.axes.shape[1] == golden.outputs("fit").width // 8


def test_impossible_parameters_are_refused(outputs_like):
    with pytest.raises(ValueError, match="dim must lie between 1 and 8, got 9"):
        PCAFusionDetector(dim=9).fit(outputs_like(20))
    with pytest.raises(ValueError, match="residual_of must be 'clipped' or 'raw', got 'both'"):
        PCAFusionDetector(residual_of="both")
    with pytest.raises(ValueError, match=r"percentile must lie in \[0, 100\)"):
        PCAFusionDetector(percentile=100)


@pytest.mark.parametrize(
    "detector", [PCAFusionDetector(), PCAFusionDetector(dim=10, percentile=None, residual_of="raw")]
)
def test_it_keeps_the_laws(detector):
    check_detector(detector)
