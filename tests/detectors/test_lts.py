from dataclasses import replace

import pytest

from ood_toolkit.detectors.lts import LTSDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


@pytest.mark.parametrize(("percentile", "power"), [(95, 2), (65, 2), (90, -2), (90, 1)])
def test_it_is_the_energy_of_logits_scaled_one_row_at_a_time(percentile, power):
    data = synthetic_outputs()
    detector = LTSDetector(percentile=percentile, power=power)
    for row in range(12):
        features = [max(0.0, float(f)) for f in data.ood.features[row]]
        kept = max(1, len(features) - round(len(features) * percentile / 100))
        factor = (sum(features) / sum(sorted(features, reverse=True)[:kept])) ** power
        expected = -float((data.ood.logits[row].double() * factor).logsumexp(0))
        assert float(detector(data.ood.rows([row]))) == pytest.approx(expected, rel=1e-5)


def test_negative_features_count_as_0_in_both_sums():
    rows = synthetic_outputs().ood
    signed = rows.features - 0.5
    assert bool((signed < 0).any(dim=1).all())
    scores = LTSDetector(percentile=65)(replace(rows, features=signed))
    assert scores.equal(LTSDetector(percentile=65)(replace(rows, features=signed.clamp(min=0))))


def test_predictions_stay_as_they_are():
    data = synthetic_outputs()
    assert LTSDetector().rectified_logits(data.id).argmax(dim=1).equal(data.id.predictions)


def test_other_percentiles_keep_the_laws():
    check_detector(LTSDetector(percentile=50))
