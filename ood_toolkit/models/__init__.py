"""Third-party models as `Classifier`: images in, `Outputs` out."""

from ood_toolkit.models.classifier import Classifier as Classifier
from ood_toolkit.models.clip import ClipPrompts as ClipPrompts
from ood_toolkit.models.load import LoadedClassifier as LoadedClassifier
from ood_toolkit.models.load import load_classifier as load_classifier
from ood_toolkit.models.negatives import NegativeLabels as NegativeLabels
from ood_toolkit.models.negatives import Vocabulary as Vocabulary
from ood_toolkit.models.negatives import read_vocabulary as read_vocabulary
from ood_toolkit.models.negatives import wordnet_vocabulary as wordnet_vocabulary
