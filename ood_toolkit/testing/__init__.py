"""Laws that every detector and calibrator keeps, in one call each: `check_detector(MyDetector)`.

For a method of your own, registered or not; needs neither pytest nor a network. The message of the `AssertionError`
lists every broken law with the numbers that broke it.
"""

from ood_toolkit.testing.calibrators import CALIBRATOR_LAWS as CALIBRATOR_LAWS
from ood_toolkit.testing.calibrators import check_calibrator as check_calibrator
from ood_toolkit.testing.detectors import DETECTOR_LAWS as DETECTOR_LAWS
from ood_toolkit.testing.detectors import check_detector as check_detector
from ood_toolkit.testing.laws import BrokenLaw as BrokenLaw
from ood_toolkit.testing.live import LIVE_LAWS as LIVE_LAWS
from ood_toolkit.testing.synthetic import SYNTHETIC_TAPS as SYNTHETIC_TAPS
from ood_toolkit.testing.synthetic import Splits as Splits
from ood_toolkit.testing.synthetic import SyntheticClassifier as SyntheticClassifier
from ood_toolkit.testing.synthetic import synthetic_images as synthetic_images
from ood_toolkit.testing.synthetic import synthetic_outputs as synthetic_outputs
