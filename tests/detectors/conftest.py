from collections.abc import Callable

import pytest
import torch

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
