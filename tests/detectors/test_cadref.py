from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.cadref import CADRefDetector, CARefDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


def class_means(train):
    predictions = train.logits.argmax(dim=1)
    return torch.stack([train.features[predictions == c].mean(dim=0) for c in range(train.classes)])


def test_caref_is_the_relative_l1_error_to_the_predicted_class():
    data = synthetic_outputs().to(torch.float64)
    detector, means = CARefDetector().fit(data.train), class_means(data.train)
    for row in range(10):
        f, y = data.id.features[row], int(data.id.logits[row].argmax())
        assert float(detector(data.id.rows([row]))) == pytest.approx(float((f - means[y]).norm(p=1) / f.norm(p=1)))


@pytest.mark.parametrize("confidence", ["energy", "gen", "maxlogit", "msp"])
def test_cadref_judges_what_raises_the_logit_by_the_row_s_own_confidence(confidence):
    data = synthetic_outputs().to(torch.float64)
    detector, means = CADRefDetector(confidence=confidence).fit(data.train), class_means(data.train)

    def sure(logits):
        z, p = logits, logits.softmax(0)
        gen = 1 / ((p * (1 - p)) ** 0.1).sum()  # 6 classes: all of them
        return float({"energy": z.logsumexp(0), "gen": gen, "maxlogit": z.max(), "msp": p.max()}[confidence])

    typical = sum(sure(z) for z in data.train.logits) / len(data.train)
    for row in range(10):
        f, z = data.id.features[row], data.id.logits[row]
        y, up, down = int(z.argmax()), 0.0, 0.0
        for d in range(len(f)):
            step, weight = float(f[d] - means[y, d]), float(data.id.head.weight[y, d])
            up += abs(step) if step * weight > 0 else 0.0
            down += abs(step) if step * weight < 0 else 0.0
        size = float(f.norm(p=1))
        expected = up / size / sure(z) + down / size / typical
        assert float(detector(data.id.rows([row]))) == pytest.approx(expected)


@pytest.mark.parametrize(("classes", "counted"), [(40, 10), (250, 25)])
def test_gen_reads_a_tenth_of_the_classes_but_at_least_ten(classes, counted):
    logits = torch.randn(3, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(dim=1).sort(dim=1).values[:, -counted:]
    expected = 1 / ((p * (1 - p)) ** 0.1).sum(dim=1)
    torch.testing.assert_close(CADRefDetector(confidence="gen")._confidence(logits), expected)


def test_both_parts_add_up_to_the_whole():
    data = synthetic_outputs()
    decoupled = CADRefDetector().fit(data.train)
    decoupled.mean_confidence = torch.ones(())
    plain = replace(data.id, logits=data.id.logits - data.id.logits.logsumexp(dim=1, keepdim=True) + 1)
    torch.testing.assert_close(decoupled(plain), CARefDetector().fit(data.train)(plain))


def test_a_class_never_predicted_can_be_refused():
    train = synthetic_outputs().train
    with pytest.raises(ValueError, match=r"classes \[4\] have none"):
        CARefDetector(absent="error").fit(train.rows(train.predictions != 4))


def test_other_confidences_keep_the_laws():
    check_detector(CADRefDetector(confidence="msp"))
    check_detector(CADRefDetector(confidence="gen"))
    reason = "the easy OOD rows have largest logits about 0, and the method divides by them"
    check_detector(CADRefDetector(confidence="maxlogit"), exempt={"ranks_ood_above_id": reason})
