from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.grood import GROODDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


def literal_gradients(features, classes, ood):
    """By autograd: cross-entropy of the nearest-prototype classifier towards the class it predicts."""
    for row in features:
        prototype = ood.clone().requires_grad_()
        distances = (torch.cat([classes, prototype.unsqueeze(0)]) - row).norm(dim=1)
        loss = torch.nn.functional.cross_entropy(-distances.unsqueeze(0), distances[:-1].argmin().unsqueeze(0))
        yield torch.autograd.grad(loss, prototype)[0]


@pytest.mark.parametrize("prototype", ["mixup", "mean"])
def test_it_is_the_distance_to_the_nearest_backward_pass(prototype):
    data = synthetic_outputs(fit_rows=90).to(torch.float64)
    train = data.train
    detector = GROODDetector(prototype=prototype).fit(train)
    classes = torch.stack([train.features[train.labels == c].mean(dim=0) for c in range(train.classes)])
    if prototype == "mean":
        ood = classes.mean(dim=0)
    else:
        mixed = [(f + classes[int(z.argsort()[-2])]) / 2 for f, z in zip(train.features, train.logits, strict=True)]
        ood = torch.stack(mixed).mean(dim=0)
    bank = torch.stack(list(literal_gradients(train.features[train.correct], classes, ood)))
    queries = torch.stack(list(literal_gradients(data.ood.features[:8], classes, ood)))
    torch.testing.assert_close(detector(data.ood.rows(range(8))), torch.cdist(queries, bank).amin(dim=1))


def test_a_class_without_rows_is_refused_or_left_out():
    train = synthetic_outputs().train
    without = replace(train.rows(train.labels != 3))
    with pytest.raises(ValueError, match="3"):
        GROODDetector().fit(without)
    assert len(GROODDetector(absent="skip").fit(without).class_prototypes) == train.classes - 1


@pytest.mark.parametrize("detector", [GROODDetector(prototype="mean"), GROODDetector(rows=100, seed=2)])
def test_other_hyperparameters_keep_the_laws(detector):
    check_detector(detector)
