"""Zero-shot scores of vision-language models: image embeddings against the text embeddings of the class names.

They read CLIP-like outputs: features are image embeddings, and the rows of the head are text embeddings. Both are
brought to unit length here, so the scale of the head (CLIP's 100) does not matter: all temperatures divide cosines.
"""

from typing import Self

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.energy import energy
from ood_toolkit.detectors.entropy import entropy
from ood_toolkit.detectors.layers import tap_spec
from ood_toolkit.detectors.msp import one_minus_msp
from ood_toolkit.detectors.softmax import log_probabilities
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import l2_normalise

_MCM = (
    "Ming et al., Delving into Out-of-Distribution Detection with Vision-Language Representations, NeurIPS 2022, "
    "arXiv:2211.13445"
)


def local_concept_mismatch(patch_cosines: Float[Tensor, "N P C"], temperature: float = 1.0) -> Float[Tensor, " N"]:
    """`1 − max_{patch, class} softmax(cos / τ)`: the tap "local_mcm", made where the patch tokens are at hand.

    196 patches × 1000 classes would be 0.8 MB per image; this one number per image is all that GL-MCM needs.
    """
    return one_minus_msp(patch_cosines.flatten(0, 1) / temperature).unflatten(0, patch_cosines.shape[:2]).amin(dim=1)


class ZeroShotDetector(Detector):
    """What zero-shot detectors share: the text embeddings, learned from the head, and the cosines to them."""

    family = "vision-language"
    needs = "head"
    reads = frozenset({"features"})
    cost = "O(CD)"
    text: Float[Tensor, "C D"]

    allowed = {"temperature": "(0, inf)"}

    def fit(self, train: Outputs) -> Self:
        """Takes the class text embeddings from the head, at unit length; a bias is left out. Returns itself."""
        self.text = l2_normalise(train.head.weight)
        return self

    def cosines(self, outputs: Outputs) -> Float[Tensor, "N C"]:
        """Between every image and every class text."""
        return l2_normalise(outputs.features) @ self.text.T

    def tap(self, outputs: Outputs) -> Tensor:
        """The one tap that this detector reads."""
        (name,) = self.taps
        if name not in outputs.taps:
            raise ValueError(
                f"{self.name} reads the tap {name!r}, but the outputs hold the taps {sorted(outputs.taps)}"
            )
        return outputs.taps[name]


class MCMDetector(ZeroShotDetector):
    """Flags images that match no class text clearly better than the others: `1 − max softmax(cos / τ)`.

    The standard zero-shot detector. At τ = 1 the softmax of cosines is almost flat, so values lie near 1 − 1/C; only
    their order matters.

    Args:
        temperature: τ > 0, divides cosines. The paper uses 1; τ = 0.01 is CLIP's own softmax.

    Differs from the paper in direction and by the constant 1. OpenOOD-VLM divides logits that were already multiplied
    by 100, so its τ = 1 is 0.01 here.
    """

    name = "mcm"
    paper = _MCM
    cite = "ming2022mcm"
    equation = "1 − max_c softmax_c(cos(f, t) / τ)"

    sweep = {"temperature": (0.01, 1.0, 10.0)}

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1 − 1/C]; higher = more out-of-distribution."""
        return one_minus_msp(self.cosines(outputs) / self.temperature)


class ClipCosineDetector(ZeroShotDetector):
    """Flags images that are far from every class text: minus the largest cosine (max-logit on CLIP).

    Prefer it to MCM where images may match several class names equally well.

    Differs from the paper in direction only.
    """

    name = "clip_cosine"
    paper = _MCM
    cite = "ming2022mcm"
    equation = "−max_c cos(f, t_c)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [−1, 1]; higher = more out-of-distribution."""
        return -self.cosines(outputs).amax(dim=1)


class ClipEnergyDetector(ZeroShotDetector):
    """Flags images by the free energy of their cosines, `−τ log Σ exp(cos / τ)`.

    Between `clip_cosine`, its limit for small τ, and the mean cosine to all classes, its limit for large τ.

    Args:
        temperature: τ > 0, divides cosines. 0.01 is CLIP's own; at 1 the sum sees all classes alike and ranks badly.

    Differs from the paper in nothing.
    """

    name = "clip_energy"
    paper = _MCM
    cite = "ming2022mcm"
    equation = "−τ log Σ_c exp(cos(f, t_c) / τ)"

    def __init__(self, temperature: float = 0.01) -> None:
        super().__init__()
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,), near the negative largest cosine for small τ; higher = more out-of-distribution."""
        return energy(self.cosines(outputs), self.temperature)


class ClipEntropyDetector(ZeroShotDetector):
    """Flags images by the entropy of `softmax(cos / τ)`.

    Choose it over MCM where it matters how the other classes share the rest.

    Args:
        temperature: τ > 0, divides cosines. The paper's code uses 1.

    Differs from the paper in nothing.
    """

    name = "clip_entropy"
    paper = _MCM
    cite = "ming2022mcm"
    equation = "H(softmax(cos(f, t) / τ))"

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, log C] nats; higher = more out-of-distribution."""
        cosines = self.cosines(outputs) / self.temperature
        return entropy(log_probabilities(cosines))


class GLMCMDetector(ZeroShotDetector):
    """Flags images of which neither the whole nor any patch matches a class text: MCM plus MCM of the best patch.

    Choose it for scenes with several objects, where one known object in a corner should count.

    Args:
        temperature: τ > 0, divides cosines, of the whole image and of patches. The paper uses 1.
        local_weight: λ ≥ 0, the weight of the local part. The paper uses 1.
        tokens: which patch embeddings: "values" of the last attention, as the paper, or the last block's "output".

    It reads the tap "local_mcm", (N,), see `local_concept_mismatch`, made with the same temperature and tokens.

    Differs from the paper in direction and by the constant 1 + λ.
    """

    name = "gl_mcm"
    paper = (
        "Miyai et al., GL-MCM: Global and Local Maximum Concept Matching for Zero-Shot Out-of-Distribution Detection, "
        "IJCV 2025, arXiv:2304.04521"
    )
    cite = "miyai2025glmcm"
    equation = "m(f) + λ min_i m(f_i) over patches i, with m(f) = 1 − max_c softmax_c(cos(f, t) / τ)"
    reads = frozenset({"features", "local_mcm"})

    allowed = {"local_weight": "[0, inf)", "tokens": ("values", "output")}

    def __init__(self, temperature: float = 1.0, local_weight: float = 1.0, tokens: str = "values") -> None:
        super().__init__()
        self.temperature = temperature
        self.local_weight = local_weight
        self.tokens = tokens

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The local part, by the same temperature and patches."""
        return (tap_spec("local_mcm", self, "temperature", "tokens"),)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1 + λ]; higher = more out-of-distribution."""
        whole = one_minus_msp(self.cosines(outputs) / self.temperature)
        return whole + self.local_weight * self.tap(outputs)
