import math

import numpy as np
import pytest
import torch

from ood_toolkit.detectors.cfood import CFOODDetector, neighbourhood_sizes
from ood_toolkit.testing import check_detector, synthetic_outputs


@pytest.mark.parametrize(("rows", "fraction"), [(60, 0.05), (300, 0.01), (300, 0.5)])
def test_it_is_the_smallest_neighbourhood_that_enough_rows_count_the_query_in(rows, fraction):
    data = synthetic_outputs(fit_rows=rows).to(torch.float64)
    detector = CFOODDetector(fraction=fraction, alpha=1.0).fit(data.train)
    reference = data.train.features / data.train.features.norm(dim=1, keepdim=True)
    near = torch.cdist(reference, reference).sort(dim=1).values
    sizes = neighbourhood_sizes().tolist()
    for query in (data.id.features[0], data.id.features[5], data.ood.features[0]):
        distances = (reference - query / query.norm()).norm(dim=1)
        expected = 1.0
        for size in sizes:
            neighbour = int(size * rows - 1) + 1  # position 0 is the row itself
            counted = int((near[:, neighbour] >= distances).sum())
            if counted >= math.ceil(fraction * rows):
                expected = size
                break
        outputs = data.id.rows([0])
        score = detector(type(outputs).from_logits(query.unsqueeze(0)))
        assert float(score) == pytest.approx(expected)


def test_the_sizes_are_the_authors_grid():
    grid = np.concatenate([np.linspace(0.001, 0.1, 100), np.linspace(0.105, 0.5, 81), np.linspace(0.51, 0.99, 49)])
    np.testing.assert_allclose(neighbourhood_sizes().numpy(), grid)


def test_other_hyperparameters_keep_the_laws():
    check_detector(CFOODDetector(fraction=0.05, alpha=0.5, seed=1))
