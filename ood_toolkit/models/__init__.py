"""Third-party models as `Classifier`: images in, `Outputs` out."""

from ood_toolkit.models.classifier import Classifier as Classifier
