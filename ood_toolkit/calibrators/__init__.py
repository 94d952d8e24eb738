"""Every calibrator. A line here is the registration: the public API, `--calibrators all`, docs and laws follow it."""

from ood_toolkit.calibrators.base import Calibrator as Calibrator
from ood_toolkit.calibrators.base import EnsemblePool as EnsemblePool
from ood_toolkit.calibrators.base import Identity as Identity
from ood_toolkit.calibrators.ensemble import GeometricMeanEnsemble as GeometricMeanEnsemble
from ood_toolkit.calibrators.ensemble import MajorityVoteEnsemble as MajorityVoteEnsemble
from ood_toolkit.calibrators.ensemble import MeanLogitEnsemble as MeanLogitEnsemble
from ood_toolkit.calibrators.ensemble import MeanProbabilityEnsemble as MeanProbabilityEnsemble
from ood_toolkit.calibrators.pooled_temperature import PooledTemperatureEnsemble as PooledTemperatureEnsemble
from ood_toolkit.calibrators.temperature import TemperatureCalibrator as TemperatureCalibrator
