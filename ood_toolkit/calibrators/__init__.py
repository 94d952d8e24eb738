"""Every calibrator. A line here is the registration: the public API, `--calibrators all`, docs and laws follow it."""

from ood_toolkit.calibrators.base import Calibrator as Calibrator
from ood_toolkit.calibrators.base import EnsemblePool as EnsemblePool
from ood_toolkit.calibrators.base import Identity as Identity
