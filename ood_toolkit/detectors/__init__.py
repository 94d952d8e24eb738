"""Every detector. A line here is the registration: the public API, `--detectors all`, docs and law tests follow it."""

from ood_toolkit.detectors.base import Detector as Detector
from ood_toolkit.detectors.base import LiveDetector as LiveDetector
from ood_toolkit.detectors.energy import EnergyDetector as EnergyDetector
from ood_toolkit.detectors.msp import MSPDetector as MSPDetector
