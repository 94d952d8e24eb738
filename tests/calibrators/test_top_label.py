import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from ood_toolkit.calibrators import (
    BetaCalibrator,
    HistogramCalibrator,
    ScalingBinningCalibrator,
    SplineCalibrator,
    TopLabelIsotonicCalibrator,
    TopLabelPlattCalibrator,
)
from ood_toolkit.calibrators.histogram import bin_edges, bin_means
from ood_toolkit.calibrators.top_label import top_label_log_odds, with_top_confidence
from tests.calibrators.data import drawn

ALL = [
    BetaCalibrator,
    HistogramCalibrator,
    ScalingBinningCalibrator,
    SplineCalibrator,
    TopLabelIsotonicCalibrator,
    TopLabelPlattCalibrator,
]


def top_label(logits, labels):
    """Confidence and correctness, the naive way."""
    p, predicted = logits.softmax(1).max(1)
    return p.numpy(), (predicted == labels).numpy()


@pytest.mark.parametrize("kind", ALL)
def test_the_prediction_gets_the_mapped_confidence_and_the_rest_keep_their_proportions(kind):
    logits, labels = drawn(2000, 8)
    fitted = kind().fit(logits, labels)
    fresh = drawn(500, 8, seed=1)[0]
    probabilities = fitted(fresh)
    mapped = fitted.confidence(top_label_log_odds(fresh))
    top, predicted = probabilities.max(1)
    assert torch.equal(predicted, fresh.argmax(1))
    inside = (mapped > 1 / 8 + 1e-4) & (mapped < 1 - 1e-6)
    torch.testing.assert_close(top[inside], mapped[inside], rtol=0, atol=1e-12)
    plain = fresh.softmax(1).scatter(1, predicted[:, None], 0.0)
    naive = plain / plain.sum(1, keepdim=True) * (1 - mapped[:, None])
    free = inside & (naive.amax(1) < mapped)
    assert int(free.sum()) > 200
    torch.testing.assert_close(
        probabilities.scatter(1, predicted[:, None], 0.0)[free], naive[free], rtol=1e-9, atol=1e-15
    )


def test_capped_rows_are_what_moving_the_excess_step_by_step_gives():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 6, generator=generator, dtype=torch.float64) * 2
    confidence = 0.17 + 0.3 * torch.rand(300, generator=generator, dtype=torch.float64)
    result = with_top_confidence(logits, confidence)
    for row, g, got in zip(logits, confidence.tolist(), result, strict=True):
        top = int(row.argmax())
        mass = row.softmax(0)
        mass[top] = 0
        mass *= (1 - g) / mass.sum()
        cap = g / (1 + 1e-6)
        full = torch.zeros(6, dtype=torch.bool)
        full[top] = True
        while bool((mass[~full] > cap).any()):  # cap what is over, share its excess among the rest, look again
            full |= mass > cap
            mass[full] = cap
            mass[top] = 0
            mass[~full] *= (1 - g - float(mass[full].sum())) / float(mass[~full].sum())
        mass[top] = g
        torch.testing.assert_close(got, mass, rtol=1e-9, atol=1e-12)


def test_rows_with_one_possible_class_keep_it():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert with_top_confidence(logits.double(), torch.tensor([0.4]).double()).tolist() == [[1.0, 0.0, 0.0]]
    assert with_top_confidence(torch.zeros(2, 1).double(), torch.tensor([0.4, 0.2]).double()).tolist() == [[1.0], [1.0]]


def test_log_odds_keep_what_a_confidence_of_1_loses():
    logits = torch.tensor([[100.0, 0.0, 0.0], [50.0, 0.0, 0.0]])
    expected = torch.tensor([100.0, 50.0]).double() - np.log(2)
    torch.testing.assert_close(top_label_log_odds(logits.double()), expected)


def test_platt_is_the_sigmoid_scikit_learn_fits():
    logits, labels = drawn(3000, 5)
    _, correct = top_label(logits, labels)
    odds = top_label_log_odds(logits)
    theirs = _SigmoidCalibration().fit(odds.numpy(), correct.astype(int))
    ours = TopLabelPlattCalibrator().fit(logits, labels)
    np.testing.assert_allclose(ours.confidence(odds).numpy(), theirs.predict(odds.numpy()), atol=1e-5)


def test_platt_without_pseudo_rows_is_logistic_regression():
    logits, labels = drawn(3000, 5)
    _, correct = top_label(logits, labels)
    odds = top_label_log_odds(logits)
    theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(odds[:, None].numpy(), correct)
    ours = TopLabelPlattCalibrator(prior_count=0).fit(logits, labels)
    np.testing.assert_allclose(ours.weights.numpy(), [theirs.coef_[0, 0], theirs.intercept_[0]], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_beta_maximises_its_likelihood_under_its_bounds(temperature):
    logits, labels = drawn(2000, 3, temperature=temperature)
    p, correct = top_label(logits, labels)

    def loss(w):
        margin = w[0] * np.log(p) - w[1] * np.log1p(-p) + w[2]
        return -np.where(correct, np.log(expit(margin)), np.log(expit(-margin))).mean()

    best = minimize(loss, [1, 1, 0], method="L-BFGS-B", bounds=[(0, None), (0, None), (None, None)], tol=1e-14)
    weights = BetaCalibrator().fit(logits, labels).weights.numpy()
    assert (weights[:2] >= 0).all()
    assert loss(weights) <= best.fun + 1e-9


def test_separable_confidence_is_an_error_that_names_the_way_out():
    logits, _ = drawn(300, 4)
    with pytest.raises(ValueError, match="prior_count=1"):
        BetaCalibrator().fit(logits, logits.argmax(1))
    with_prior = BetaCalibrator(prior_count=1.0).fit(logits, logits.argmax(1))
    assert float(with_prior(logits).amax(1).mean()) == pytest.approx(301 / 302, abs=1e-3)
    by_default = TopLabelPlattCalibrator().fit(logits, logits.argmax(1))
    assert float(by_default(logits).amax(1).mean()) == pytest.approx(301 / 302, abs=1e-3)


@pytest.mark.parametrize("equal", ["width", "mass"])
def test_histogram_values_are_accuracies_counted_by_hand(equal):
    logits, labels = drawn(1000, 4)
    p, correct = top_label(logits, labels)
    fitted = HistogramCalibrator(bins=7, equal=equal).fit(logits, labels)
    edges = [0.0, *fitted.edges.tolist(), 1.0]
    counts = []
    for low, high, value in zip(edges[:-1], edges[1:], fitted.values.tolist(), strict=True):
        inside = (p > low) & (p <= high)
        counts.append(inside.sum())
        assert value == pytest.approx(correct[inside].mean() if inside.any() else (low + high) / 2)
    assert sum(counts) == 1000
    if equal == "mass":
        assert max(counts) - min(counts) <= 1
    else:
        np.testing.assert_allclose(edges, np.linspace(0, 1, 8))


def test_equal_mass_bins_never_cut_a_run_of_ties():
    values = torch.tensor([0.2] * 5 + [0.5] * 90 + [0.9] * 5).double()
    edges = bin_edges(values, 10, "mass")
    assert edges.tolist() == pytest.approx([0.7])  # the cut after row 10 moves to the end of the run, row 95
    assert bin_edges(torch.ones(50).double(), 10, "mass").tolist() == []
    assert bin_means(torch.ones(4).double(), torch.tensor([1.0, 0, 1, 1]).double(), edges).tolist()[-1] == 0.75


def test_isotonic_is_scikit_learns_isotonic_regression():
    logits, labels = drawn(1500, 4)
    p, correct = top_label(logits, labels)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(p, correct)
    fitted = TopLabelIsotonicCalibrator().fit(logits, labels)
    fresh = drawn(800, 4, seed=5)[0]
    expected = theirs.predict(fresh.softmax(1).amax(1).numpy())
    np.testing.assert_allclose(fitted.confidence(top_label_log_odds(fresh)).numpy(), expected, atol=1e-7)


def test_scaling_binning_rounds_the_sigmoid_to_its_bins_mean():
    logits, labels = drawn(1500, 4)
    fitted = ScalingBinningCalibrator(bins=5).fit(logits, labels)
    smooth = TopLabelPlattCalibrator().fit(logits, labels).confidence(top_label_log_odds(logits)).numpy()
    binned = fitted.confidence(top_label_log_odds(logits)).numpy()
    order = np.argsort(smooth)
    for rows in np.array_split(order, 5):
        np.testing.assert_allclose(binned[rows], smooth[rows].mean(), atol=1e-12)


def test_the_spline_adds_the_slope_of_the_accumulated_excess():
    logits, labels = drawn(900, 4)
    p, correct = top_label(logits, labels)
    order = np.argsort(p)
    rank = np.linspace(0, 1, len(p))
    excess = np.cumsum(correct[order] - p[order]) / len(p)

    def distance(heights):
        return ((CubicSpline(np.linspace(0, 1, 6), heights, bc_type="natural")(rank) - excess) ** 2).sum()

    best = minimize(distance, np.zeros(6), tol=1e-14)
    slope = CubicSpline(np.linspace(0, 1, 6), best.x, bc_type="natural")(rank, 1)
    fitted = SplineCalibrator().fit(logits, labels)
    got = fitted.confidence(top_label_log_odds(logits)).numpy()[order]
    np.testing.assert_allclose(got, np.clip(p[order] + slope, 0, 1), atol=1e-4)
