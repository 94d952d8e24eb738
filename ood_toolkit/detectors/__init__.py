"""Every detector. A line here is the registration: the public API, `--detectors all`, docs and law tests follow it."""

from ood_toolkit.detectors.base import Detector as Detector
from ood_toolkit.detectors.base import LiveDetector as LiveDetector
from ood_toolkit.detectors.cosine import MaxCosineDetector as MaxCosineDetector
from ood_toolkit.detectors.cosine import RelativeCosineDetector as RelativeCosineDetector
from ood_toolkit.detectors.energy import EnergyDetector as EnergyDetector
from ood_toolkit.detectors.gmm import GMMDetector as GMMDetector
from ood_toolkit.detectors.knn import KNNDetector as KNNDetector
from ood_toolkit.detectors.mahalanobis import MahalanobisDetector as MahalanobisDetector
from ood_toolkit.detectors.mahalanobis import MahalanobisPPDetector as MahalanobisPPDetector
from ood_toolkit.detectors.mahalanobis import RMDSDetector as RMDSDetector
from ood_toolkit.detectors.mahalanobis import RMDSPPDetector as RMDSPPDetector
from ood_toolkit.detectors.msp import MSPDetector as MSPDetector
from ood_toolkit.detectors.neco import NECODetector as NECODetector
from ood_toolkit.detectors.pca import CoPDetector as CoPDetector
from ood_toolkit.detectors.pca import CoRPDetector as CoRPDetector
from ood_toolkit.detectors.pca import PCADetector as PCADetector
from ood_toolkit.detectors.ssd import SSDDetector as SSDDetector
from ood_toolkit.detectors.vim import ResidualDetector as ResidualDetector
from ood_toolkit.detectors.vim import ViMDetector as ViMDetector
from ood_toolkit.detectors.wdiscood import WDiscOODDetector as WDiscOODDetector
