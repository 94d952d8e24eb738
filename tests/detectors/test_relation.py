from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from ood_toolkit.detectors.relation import RelationDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


def test_it_equals_openood(golden):
    detector = RelationDetector(power=1).fit(golden.outputs("fit"))
    golden.check("openood/Relation/pow=1", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize(("power", "threshold"), [(1, 0.03), (4, 0.03), (0.5, 0.3)])
def test_it_is_the_sum_of_edges_one_by_one(power, threshold):
    data = synthetic_outputs(fit_rows=40).to(torch.float64)
    detector = RelationDetector(power=power, threshold=threshold).fit(data.train)
    for row in range(6):
        f, p, total = data.id.features[row], data.id.logits[row].softmax(0), 0.0
        for other, logits in zip(data.train.features, data.train.logits, strict=True):
            edge = max(0.0, float(f @ other / f.norm() / other.norm())) * float(p @ logits.softmax(0))
            total += edge**power if edge > threshold else 0.0
        assert float(detector(data.id.rows([row]))) == pytest.approx(-total, rel=1e-9)


@pytest.mark.parametrize("confidence", [0.1, 1.0, 6.0])
def test_leaving_out_blocks_without_an_edge_changes_no_sum(confidence, monkeypatch):
    monkeypatch.setattr("ood_toolkit.detectors.relation._BANK", 16)
    data = synthetic_outputs(fit_rows=200).to(torch.float64)
    train = replace(data.train, logits=confidence * data.train.logits)
    rows = replace(data.id, logits=confidence * data.id.logits)
    cosines = (normalize(rows.features) @ normalize(train.features).T).relu()
    edges = cosines * (rows.logits.softmax(dim=1) @ train.logits.softmax(dim=1).T)
    expected = -torch.where(edges > 0.03, edges, 0).sum(dim=1)
    torch.testing.assert_close(RelationDetector().fit(train)(rows), expected)


def test_a_sparser_graph_keeps_the_laws():
    check_detector(RelationDetector(power=2.0, alpha=0.5))
