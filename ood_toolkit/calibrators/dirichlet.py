"""Dirichlet calibration: matrix scaling of log-probabilities."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.matrix import MatrixCalibrator


class DirichletCalibrator(MatrixCalibrator):
    """`softmax(W ln p + b)`: what calibrates if the probabilities of each class's rows are Dirichlet distributed.

    Differs from matrix scaling of logits by reading log-probabilities, which have no free offset; the penalties,
    defaults and cost are those of `MatrixCalibrator` (ODIR), W and b the paper's linear parametrisation.
    """

    name = "dirichlet"
    paper = "Kull et al., Beyond temperature scaling, NeurIPS 2019, arXiv:1910.12656"
    cite = "kull2019dirichlet"
    equation = "softmax(W log p + b)"

    def _inputs(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        return logits.log_softmax(dim=-1)
