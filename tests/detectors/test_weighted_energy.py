import numpy as np
import pytest
import torch

from ood_toolkit.detectors import EnergyDetector, WeightedEnergyDetector
from ood_toolkit.testing import synthetic_outputs


def test_it_equals_pytorch_ood(golden):
    detector = WeightedEnergyDetector(weights=tuple(np.linspace(-0.5, 2, 20).tolist()))
    key = "pytorch-ood/WeightedEnergy/w=linspace(-0.5,2,20)"
    golden.check(key, detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_without_weights_it_is_the_energy():
    outputs = synthetic_outputs().id
    assert torch.allclose(WeightedEnergyDetector()(outputs), EnergyDetector()(outputs))


def test_weights_must_fit_the_classes_and_not_all_vanish():
    with pytest.raises(ValueError, match="2 weights for 6 classes"):
        WeightedEnergyDetector(weights=(1.0, 2.0))(synthetic_outputs().id)
    with pytest.raises(ValueError, match="above 0"):
        WeightedEnergyDetector(weights=(-1.0, 0.0))
