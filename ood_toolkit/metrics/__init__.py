"""Metrics: pure functions of scores, confidences and probabilities, in float64 on exact ranks.

`detection` and `selective` take two samples of scores, `(id, ood)` or `(correct, wrong)`, higher = more OOD or more
likely wrong; `calibration` and `smooth` take `(confidence, correct)`; `scoring` takes `(probabilities, labels)`.
`bootstrap` puts an interval around any of them, and `significance` compares detectors.
"""

from ood_toolkit.metrics.arrays import UndefinedMetricError as UndefinedMetricError
from ood_toolkit.metrics.calibration import Bins as Bins
from ood_toolkit.metrics.calibration import ReliabilityCurve as ReliabilityCurve
from ood_toolkit.metrics.calibration import ace as ace
from ood_toolkit.metrics.calibration import binned as binned
from ood_toolkit.metrics.calibration import classwise_ece as classwise_ece
from ood_toolkit.metrics.calibration import debiased_classwise_rms as debiased_classwise_rms
from ood_toolkit.metrics.calibration import debiased_ece as debiased_ece
from ood_toolkit.metrics.calibration import debiased_mean_square as debiased_mean_square
from ood_toolkit.metrics.calibration import debiased_rms as debiased_rms
from ood_toolkit.metrics.calibration import ece as ece
from ood_toolkit.metrics.calibration import mce as mce
from ood_toolkit.metrics.calibration import overconfidence as overconfidence
from ood_toolkit.metrics.calibration import reliability_curve as reliability_curve
from ood_toolkit.metrics.calibration import rms_calibration_error as rms_calibration_error
from ood_toolkit.metrics.calibration import rms_calibration_error_official as rms_calibration_error_official
from ood_toolkit.metrics.calibration import top_label as top_label
from ood_toolkit.metrics.calibration import underconfidence as underconfidence
from ood_toolkit.metrics.detection import PrecisionRecallCurve as PrecisionRecallCurve
from ood_toolkit.metrics.detection import RocCurve as RocCurve
from ood_toolkit.metrics.detection import aupr as aupr
from ood_toolkit.metrics.detection import aupr_base_rate as aupr_base_rate
from ood_toolkit.metrics.detection import aupr_id as aupr_id
from ood_toolkit.metrics.detection import aupr_id_trapezoid as aupr_id_trapezoid
from ood_toolkit.metrics.detection import aupr_trapezoid as aupr_trapezoid
from ood_toolkit.metrics.detection import auroc as auroc
from ood_toolkit.metrics.detection import autc as autc
from ood_toolkit.metrics.detection import detection_error as detection_error
from ood_toolkit.metrics.detection import fpr_at_tpr as fpr_at_tpr
from ood_toolkit.metrics.detection import fpr_at_tpr_id_positive as fpr_at_tpr_id_positive
from ood_toolkit.metrics.detection import oscr as oscr
from ood_toolkit.metrics.detection import partial_auroc as partial_auroc
from ood_toolkit.metrics.detection import per_class as per_class
from ood_toolkit.metrics.detection import precision_recall_curve as precision_recall_curve
from ood_toolkit.metrics.detection import roc_curve as roc_curve
from ood_toolkit.metrics.detection import tnr_at_tpr as tnr_at_tpr
from ood_toolkit.metrics.scoring import BrierDecomposition as BrierDecomposition
from ood_toolkit.metrics.scoring import accuracy as accuracy
from ood_toolkit.metrics.scoring import brier as brier
from ood_toolkit.metrics.scoring import brier_decomposition as brier_decomposition
from ood_toolkit.metrics.scoring import brier_rows as brier_rows
from ood_toolkit.metrics.scoring import brier_top_label as brier_top_label
from ood_toolkit.metrics.scoring import entropy as entropy
from ood_toolkit.metrics.scoring import nll as nll
from ood_toolkit.metrics.scoring import nll_from_log as nll_from_log
from ood_toolkit.metrics.scoring import nll_rows as nll_rows
from ood_toolkit.metrics.scoring import top_k_accuracy as top_k_accuracy
from ood_toolkit.metrics.scoring import top_k_correct as top_k_correct
from ood_toolkit.metrics.selective import RiskCoverageCurve as RiskCoverageCurve
from ood_toolkit.metrics.selective import augrc as augrc
from ood_toolkit.metrics.selective import aurc as aurc
from ood_toolkit.metrics.selective import aurra as aurra
from ood_toolkit.metrics.selective import coverage_at_risk as coverage_at_risk
from ood_toolkit.metrics.selective import ds_aurc as ds_aurc
from ood_toolkit.metrics.selective import e_augrc as e_augrc
from ood_toolkit.metrics.selective import e_aurc as e_aurc
from ood_toolkit.metrics.selective import joint as joint
from ood_toolkit.metrics.selective import joint_augrc as joint_augrc
from ood_toolkit.metrics.selective import joint_aurc as joint_aurc
from ood_toolkit.metrics.selective import risk_at_coverage as risk_at_coverage
from ood_toolkit.metrics.selective import risk_coverage_curve as risk_coverage_curve
from ood_toolkit.metrics.selective import soft_f1 as soft_f1
from ood_toolkit.metrics.smooth import kernel_ece as kernel_ece
from ood_toolkit.metrics.smooth import ks_error as ks_error
from ood_toolkit.metrics.smooth import smooth_ece as smooth_ece
