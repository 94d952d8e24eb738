import pytest
import torch

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


def test_a_sparser_graph_keeps_the_laws():
    check_detector(RelationDetector(power=2.0, alpha=0.5))
