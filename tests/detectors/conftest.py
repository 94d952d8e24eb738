from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ood_toolkit.models import Classifier
from ood_toolkit.outputs import Head, Outputs


@pytest.fixture(scope="session")
def outputs_like() -> Callable[..., Outputs]:
    """`outputs_like(rows, seed=…)`: float64 outputs of 4 overlapping, correlated classes with 8 features."""

    def outputs(rows: int, *, seed: int = 0) -> Outputs:
        fixed = torch.Generator().manual_seed(99)
        means = 1.5 * torch.randn(4, 8, generator=fixed, dtype=torch.float64)
        mix = torch.randn(8, 8, generator=fixed, dtype=torch.float64) / 2 + torch.eye(8, dtype=torch.float64)
        head = Head(
            torch.randn(4, 8, generator=fixed, dtype=torch.float64),
            torch.randn(4, generator=fixed, dtype=torch.float64),
        )
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(4, (rows,), generator=generator)
        features = means[labels] + torch.randn(rows, 8, generator=generator, dtype=torch.float64) @ mix + 0.7
        return Outputs(logits=head(features), features=features, labels=labels, head=head)

    return outputs


@pytest.fixture
def golden_classifier(golden) -> Callable[..., Classifier]:
    """`golden_classifier(taps, std=…)`: the golden values' own network, images normalised by `std`."""

    def classifier(*taps: str, std: float = 1.0) -> Classifier:
        network = torch.nn.Sequential()
        for name, module in (
            ("conv1", torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)),
            ("relu1", torch.nn.ReLU()),
            ("conv2", torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)),
            ("relu2", torch.nn.ReLU()),
            ("pool", torch.nn.AdaptiveAvgPool2d(1)),
            ("flatten", torch.nn.Flatten()),
            ("fc", torch.nn.Linear(32, 10)),
        ):
            network.add_module(name, module)
        network.load_state_dict(
            {
                f"{layer}.{part}": golden.images[f"{layer}_{part[0]}"]
                for layer in ("conv1", "conv2", "fc")
                for part in ("weight", "bias")
            }
        )
        return Classifier(network, std=(std,) * 3, taps=taps)

    return classifier


@pytest.fixture
def golden_images(golden) -> Callable[..., Outputs]:
    """`golden_images(classifier, "fit")`: labelled outputs of the golden images, "fit", "id" or "ood"."""

    def outputs(classifier: Classifier, split: str) -> Outputs:
        seen = classifier(golden.images[f"images_{split}"])
        labels = golden.images.get(f"images_{split}_labels")
        return seen if labels is None else replace(seen, labels=labels)

    return outputs
