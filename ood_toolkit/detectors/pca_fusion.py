"""PCA fusion: the energy of rectified logits, weakened by how badly principal components reconstruct the feature."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.pca import reconstruction_error
from ood_toolkit.outputs import Outputs
from ood_toolkit.quantiles import quantile
from ood_toolkit.stats import leading_axes, moments, one_group


class PCAFusionDetector(Detector):
    """Flags inputs with little mass in the logits, or whose feature the principal components hardly reconstruct.

    `−log Σ_c exp(W f⁺ + b)_c · (1 − r)`: the energy of `react`, with f⁺ = min(f, c), times one minus the regularised
    reconstruction error `r = ‖(I − U Uᵀ)(f⁺ − μ)‖ / ‖f⁺‖` of `pca`. The norm below the fraction bar keeps large
    features, which are familiar ones, from large errors. Prefer it to `pca`, which looks at the feature alone.
    The product means what it should where the sum of exponentials exceeds 1, as it does for any usual head.

    Args:
        dim: components kept, 1 to D; by default D / 8, the authors' 256 for D = 2048. All where few training rows span
            fewer.
        percentile: c is this percentile of all numbers in the training features, in [0, 100); None clips nothing.
        clip: c itself, in feature units, instead of the percentile.
        residual_of: what the error above the bar is of: f⁺ ("clipped"), or f ("raw").

    Differs from the authors' code, which is all that could be read, where that is of two minds: it computes the 92nd
    percentile and then sets c = 1 (`clip=1.0`), and takes the error above the bar from f⁺ for OOD rows but from f for
    ID rows (`residual_of="raw"`), which no detector can tell apart. There, high means in-distribution.
    """

    name = "pca_fusion"
    paper = "Guan et al., Revisit PCA-based Technique for Out-of-Distribution Detection, ICCV 2023"
    cite = "guan2023revisit"
    equation = "−log Σ_c exp(W f⁺ + b)_c (1 − ‖(I − U Uᵀ)(f⁺ − μ)‖₂ / ‖f⁺‖₂) with f⁺ = min(f, c)"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(CD + D·dim)"

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]
    threshold: Float[Tensor, ""]
    centre: Float[Tensor, " D"]
    axes: Float[Tensor, "D q"]

    allowed = {
        "dim": "[1, inf)",
        "percentile": "[0, 100)",
        "clip": "(-inf, inf)",
        "residual_of": ("clipped", "raw"),
    }
    sweep = {"percentile": (85.0, 90.0, 92.0, 95.0, 99.0)}

    def __init__(
        self,
        dim: int | None = None,
        percentile: float | None = 92.0,
        clip: float | None = None,
        residual_of: str = "clipped",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.percentile = percentile
        self.clip = clip
        self.residual_of = residual_of

    def fit(self, train: Outputs) -> Self:
        """Copies the head, and learns axes and threshold from all rows, labelled or not. Returns itself."""
        dim = max(1, train.width // 8) if self.dim is None else self.dim
        if not 1 <= dim <= train.width:
            raise ValueError(f"dim must lie between 1 and {train.width}, got {dim}")
        gathered = moments(train, groups=one_group)
        self.centre, self.axes = gathered.mean, leading_axes(gathered.total, dim)
        self.weight, self.bias = train.head.weight.clone(), train.head.bias.clone()
        if self.clip is not None:
            self.threshold = self.bias.new_tensor(self.clip)
        elif self.percentile is not None:
            self.threshold = quantile(train, self.percentile / 100)
        else:
            self.threshold = self.bias.new_tensor(torch.inf)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) fused energies, in logit units; higher = more out-of-distribution."""
        clipped = outputs.features.clamp(max=self.threshold)
        centred = (clipped if self.residual_of == "clipped" else outputs.features) - self.centre.to(clipped)
        length = torch.linalg.vector_norm(clipped, dim=1).clamp_min(1e-12)
        share = reconstruction_error(centred, self.axes.to(clipped)) / length
        return -linear(clipped, self.weight, self.bias).logsumexp(dim=1) * (1 - share)
