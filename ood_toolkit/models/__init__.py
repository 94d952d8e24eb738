"""Third-party models as `Classifier`: images in, `Outputs` out."""

from ood_toolkit.models.classifier import Classifier as Classifier
from ood_toolkit.models.load import LoadedClassifier as LoadedClassifier
from ood_toolkit.models.load import load_classifier as load_classifier
