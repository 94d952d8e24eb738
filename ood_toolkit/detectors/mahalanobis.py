"""Mahalanobis distance to the nearest class, plain, relative to a background, and on normalised features."""

from typing import Self

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import l2_normalise, moments, nearest_point, present_classes, whitening

_PLUS_PLUS = (
    "Müller and Hein, Mahalanobis++: Improving OOD Detection via Feature Normalization, ICML 2025, arXiv:2505.18032"
)


def whiten(
    features: Float[Tensor, "N D"], centre: Float[Tensor, " D"], whitener: Float[Tensor, "D R"]
) -> Float[Tensor, "N R"]:
    """`(x − centre) V` in float64: ‖·‖² of a difference of two such rows is their squared Mahalanobis distance.

    A direction of small variance is stretched by up to 10⁶ here, and so is the rounding of a float32 product.
    """
    return (features.double() - centre.double()) @ whitener.double()


class MahalanobisDetector(Detector):
    """Flags features far from every class mean, in units of the shared within-class covariance.

    `min_c (f − μ_c)ᵀ Σ⁻¹ (f − μ_c)` (Lee et al.), Σ the covariance of all rows about their class means,
    divided by N. Strong where classes are compact, as in large pre-trained transformers; weak for near OOD, where
    `rmds` helps, and where feature norms vary, where `mahalanobis_pp` helps.

    Args:
        ridge: added to the diagonal of Σ, in squared feature units, ≥ 0. With 0, directions without variance are
            left out (the pseudo-inverse).
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the authors' code in scale: that keeps the ½ of the Gaussian. The ranking is the same.
    """

    name = "mahalanobis"
    paper = (
        "Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks, "
        "NeurIPS 2018, arXiv:1807.03888, Eq. 1 and 2"
    )
    cite = "lee2018simple"
    equation = "min_c (f − μ_c)ᵀ Σ⁻¹ (f − μ_c)"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(D² + C·D)"

    centre: Float[Tensor, " D"]
    whitener: Float[Tensor, "D R"]
    means: Float[Tensor, "K R"]

    allowed = {"ridge": "[0, inf)", "absent": ("error", "skip")}

    def __init__(self, ridge: float = 0.0, absent: str = "error") -> None:
        super().__init__()
        self.ridge = ridge
        self.absent = absent

    def represent(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """What distances are taken of: the features themselves."""
        return features

    def fit(self, train: Outputs) -> Self:
        """One sweep; the means are kept whitened."""
        gathered = moments(train, transform=self.represent)
        present = present_classes(gathered.counts, self.absent)
        self.centre = gathered.mean
        self.whitener = whitening(gathered.within, self.ridge)
        self.means = whiten(gathered.class_means[present], self.centre, self.whitener)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) squared distances ≥ 0; higher = more out-of-distribution."""
        rows = whiten(self.represent(outputs.features), self.centre, self.whitener)
        return nearest_point(rows, self.means.double())[0].to(outputs.features.dtype)


class RMDSDetector(MahalanobisDetector):
    """Flags features that are farther from every class than from the training set as a whole.

    `min_c d_c(f) − d_0(f)` (Ren et al.), d_c the squared Mahalanobis distance to class c as in
    `mahalanobis`, d_0 that to the mean of all training rows under their covariance. What is unusual in ways that
    have nothing to do with the classes cancels, which helps for near OOD.

    Args:
        ridge: added to the diagonal of both covariances, in squared feature units, ≥ 0. With 0, directions without
            variance are left out (the pseudo-inverse).
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the paper in nothing; both covariances are divided by N.
    """

    name = "rmds"
    paper = "Ren et al., A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection, 2021, arXiv:2106.09022"
    cite = "ren2021simple"
    equation = "min_c (f − μ_c)ᵀ Σ⁻¹ (f − μ_c) − (f − μ)ᵀ Σ₀⁻¹ (f − μ)"

    background: Float[Tensor, "D R0"]

    allowed = {"ridge": "[0, inf)", "absent": ("error", "skip")}

    def fit(self, train: Outputs) -> Self:
        """One sweep; the means are kept whitened."""
        gathered = moments(train, transform=self.represent)
        present = present_classes(gathered.counts, self.absent)
        self.centre = gathered.mean
        self.whitener = whitening(gathered.within, self.ridge)
        self.background = whitening(gathered.total, self.ridge)
        self.means = whiten(gathered.class_means[present], self.centre, self.whitener)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) differences of squared distances, of either sign; higher = more out-of-distribution."""
        features = self.represent(outputs.features)
        to_class = nearest_point(whiten(features, self.centre, self.whitener), self.means.double())[0]
        to_all = whiten(features, self.centre, self.background).square().sum(dim=1)
        return (to_class - to_all).to(outputs.features.dtype)


class MahalanobisPPDetector(MahalanobisDetector):
    """Flags directions of features far from every class mean: `mahalanobis` on features of unit length.

    Choose it over `mahalanobis` wherever feature norms vary between or within classes, which most networks show:
    normalising (Müller and Hein) brings the rows closer to Gaussians with one covariance.

    Args:
        ridge: added to the diagonal of the covariance, in units of squared unit-length features, ≥ 0. With 0,
            directions without variance are left out (the pseudo-inverse).
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the authors' code in nothing that changes the ranking: means and covariance are those of the
    normalised rows, and the means are not normalised again.
    """

    name = "mahalanobis_pp"
    paper = f"{_PLUS_PLUS}, Eq. 4 of unit-length features"
    cite = "muller2025mahalanobis"
    equation = "min_c (f̂ − μ_c)ᵀ Σ⁻¹ (f̂ − μ_c)"

    def represent(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Features of unit Euclidean length, in float64."""
        return l2_normalise(features.double())


class RMDSPPDetector(RMDSDetector):
    """Flags directions of features that fit no class better than the whole: `rmds` on features of unit length.

    Choose it for near OOD where feature norms vary.

    Args:
        ridge: added to the diagonal of both covariances, in units of squared unit-length features, ≥ 0. With 0,
            directions without variance are left out (the pseudo-inverse).
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the authors' code in nothing that changes the ranking.
    """

    name = "rmds_pp"
    paper = _PLUS_PLUS
    cite = MahalanobisPPDetector.cite
    equation = "min_c (f̂ − μ_c)ᵀ Σ⁻¹ (f̂ − μ_c) − (f̂ − μ)ᵀ Σ₀⁻¹ (f̂ − μ)"

    def represent(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Features of unit Euclidean length, in float64."""
        return l2_normalise(features.double())
