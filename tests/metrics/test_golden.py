"""The golden values kept beside this repository: peers' own code and the ImageNet-A/O authors' code."""

import numpy as np
import pytest
from metric_cases import reference_arrays, reference_json, softmax

from ood_toolkit import metrics as m

DETECTION = [
    ("openood", "AUROC", m.auroc),
    ("openood", "AUPR_in", m.aupr_id_trapezoid),
    ("openood", "AUPR_out", m.aupr_trapezoid),
    ("openood", "FPR95_oodpos", m.fpr_at_tpr),
    ("openood", "FPR95_idpos", m.fpr_at_tpr_id_positive),
    ("pytorch-ood", "AUROC", m.auroc),
    ("pytorch-ood", "AUPR_in", m.aupr_id_trapezoid),
    ("pytorch-ood", "AUPR_out", m.aupr_trapezoid),
    ("pytorch-ood", "FPR95_oodpos", m.fpr_at_tpr),
    ("pytorch-ood", "AUTC", m.autc),
    ("detectors", "AUROC", m.auroc),
    ("detectors", "AUPR_in", m.aupr_id_trapezoid),
    ("detectors", "FPR95_idpos", m.fpr_at_tpr_id_positive),
    ("ninco", "AUROC", m.auroc),
    ("ninco", "FPR95_idpos", m.fpr_at_tpr_id_positive),
    ("hendrycks", "AUROC", m.auroc),
    ("hendrycks", "AUPR_in", m.aupr_id),
    ("hendrycks", "AUPR_out", m.aupr),
    ("hendrycks", "FPR95_oodpos", m.fpr_at_tpr_official),
    ("hendrycks", "FPR95_idpos", lambda id_scores, ood_scores: m.fpr_at_tpr_official(-ood_scores, -id_scores)),
    ("mcm", "FPR95_oodpos", m.fpr_at_tpr_official),
    ("sklearn", "AP_in", m.aupr_id),
    ("sklearn", "AP_out", m.aupr),
    ("sklearn", "AUPR_in_trapezoid", m.aupr_id_trapezoid),
    ("sklearn", "AUPR_out_trapezoid", m.aupr_trapezoid),
    ("sklearn", "FPR95_idpos", m.fpr_at_tpr_id_positive),
    ("sklearn", "FPR95_oodpos", m.fpr_at_tpr),
    ("torch-uncertainty", "AUROC", m.auroc),
    ("torch-uncertainty", "AP_out", m.aupr),
    ("torch-uncertainty", "FPR95_oodpos", m.fpr_at_tpr),
]


@pytest.mark.parametrize("case", ["continuous", "ties_half", "separated"])
@pytest.mark.parametrize(("peer", "name", "metric"), DETECTION)
def test_a_detection_metric_equals_the_peer_of_its_convention(case, peer, name, metric):
    expected = reference_json("golden/metrics_open.json")["cases"][case][peer].get(name)
    if expected is None:
        pytest.skip(f"{peer} printed no {name} on {case}")
    arrays = reference_arrays("golden/metric_cases_open.npz")
    assert metric(-arrays[f"{case}/id"], -arrays[f"{case}/ood"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", ["continuous", "ties_half", "separated"])
def test_detection_error_weighted_by_sizes_is_that_of_detectors(case):
    expected = reference_json("golden/metrics_open.json")["cases"][case]["detectors"]["min_detection_error"]
    arrays = reference_arrays("golden/metric_cases_open.npz")
    scores = -arrays[f"{case}/id"], -arrays[f"{case}/ood"]
    assert m.detection_error(*scores, ood_prior=m.aupr_base_rate(*scores)) == pytest.approx(expected, abs=1e-9)


def test_misclassification_metrics_equal_the_peers_on_the_golden_classifier():
    arrays = reference_arrays("golden/metric_cases_open.npz")
    peers = reference_json("golden/metrics_open.json")["cases"]["cls_a"]
    confidence, correct = arrays["cls_a/confidence"], arrays["cls_a/correct"] == 1
    sides = -confidence[correct], -confidence[~correct]
    probabilities, labels = softmax(arrays["cls_a/logits"].astype(np.float64)), arrays["cls_a/labels"]
    shifts, official, uncertainty = peers["fd-shifts"], peers["hendrycks"], peers["torch-uncertainty"]
    pairs = {
        "fd-shifts aurc": (1000 * m.aurc(*sides), shifts["aurc"]),
        "fd-shifts e-aurc": (1000 * m.e_aurc(*sides), shifts["e-aurc"]),
        "fd-shifts augrc": (1000 * m.augrc(*sides), shifts["augrc"]),
        "fd-shifts e-augrc": (1000 * m.e_augrc(*sides), shifts["e-augrc"]),
        "fd-shifts ece": (m.ece(confidence, correct), shifts["ece"]),
        "fd-shifts mce": (m.mce(confidence, correct), shifts["mce"]),
        "fd-shifts failauc": (m.auroc(*sides), shifts["failauc"]),
        "fd-shifts failap_suc": (m.aupr_id(*sides), shifts["failap_suc"]),
        "fd-shifts failap_err": (m.aupr(*sides), shifts["failap_err"]),
        "hendrycks AURRA": (m.aurra(*sides), official["AURRA"]),
        "hendrycks soft_f1": (m.soft_f1(confidence, correct), official["soft_f1"]),
        "hendrycks RMS": (m.rms_calibration_error_official(confidence, correct), official["RMS_calib_err"]),
        "hendrycks l1": (m.rms_calibration_error_official(confidence, correct, norm="l1"), official["calib_err_l1"]),
        "hendrycks max": (m.rms_calibration_error_official(confidence, correct, norm="max"), official["calib_err_max"]),
        "pytorch-ood RMS": (m.rms_calibration_error(confidence, correct), peers["pytorch-ood"]["RMS_calib_err"]),
        "pytorch-ood l1": (
            m.rms_calibration_error(confidence, correct, norm="l1"),
            peers["pytorch-ood"]["calib_err_l1"],
        ),
        "gpleiss ECE": (m.ece(confidence, correct), peers["gpleiss"]["ECE15"]),
        "sklearn NLL": (m.nll(probabilities, labels), peers["sklearn"]["NLL"]),
        "NLL from logs": (m.nll_from_log(np.log(probabilities), labels), peers["sklearn"]["NLL"]),
        "Brier": (m.brier(probabilities, labels), peers["reference"]["Brier_sum"]),
        "accuracy": (m.accuracy(probabilities, labels), peers["reference"]["accuracy"]),
        "torch-uncertainty AURC": (m.aurc(*sides, convention="torch-uncertainty"), uncertainty["AURC"]),
        "torch-uncertainty AUGRC": (m.augrc(*sides, convention="torch-uncertainty"), uncertainty["AUGRC"]),
        "torch-uncertainty ACE": (m.ace(confidence, correct), uncertainty["ACE15"]),
        "torch-uncertainty ECE l2": (m.ece(confidence, correct, norm="l2"), uncertainty["ECE15_l2"]),
        "torch-uncertainty coverage": (m.coverage_at_risk(*sides), uncertainty["CovAt5Risk"]),
        "torch-uncertainty risk": (m.risk_at_coverage(*sides), uncertainty["RiskAt80Cov"]),
    }
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1], abs=1e-6)}
    assert not wrong


@pytest.mark.parametrize("index", range(4))
def test_calibration_metrics_equal_the_imagenet_a_authors_code(index):
    vector = reference_json("protocol/official_metric_vectors.json")["vectors"][index]
    rng = np.random.default_rng(vector["seed"])
    confidence = rng.beta(2, 1.5, vector["n"])
    correct = rng.random(vector["n"]) < confidence**2
    assert confidence[:3] == pytest.approx(vector["first3_conf"], abs=1e-12)
    assert m.rms_calibration_error_official(confidence, correct) == pytest.approx(
        vector["rms_official_drops_last_bin"], abs=1e-12
    )
    assert m.rms_calibration_error(confidence, correct) == pytest.approx(vector["rms_all_bins"], abs=1e-12)
    official = {norm: m.rms_calibration_error_official(confidence, correct, norm=norm) for norm in ("l1", "max")}
    assert official == pytest.approx({"l1": vector["l1_official"], "max": vector["max_official"]}, abs=1e-12)
    assert m.aurra(-confidence[correct], -confidence[~correct]) == pytest.approx(vector["aurra"], abs=1e-12)
    assert m.soft_f1(confidence, correct) == pytest.approx(vector["soft_f1"], abs=1e-12)


@pytest.mark.parametrize("index", [4, 5])
def test_detection_metrics_equal_the_imagenet_o_authors_code(index):
    vector = reference_json("protocol/official_metric_vectors.json")["vectors"][index]
    rng = np.random.default_rng(vector["seed"])
    id_scores, ood_scores = -rng.beta(5, 1.2, vector["ni"]), -rng.beta(4, 1.5, vector["no"])
    ours = {
        "auroc": m.auroc(id_scores, ood_scores),
        "aupr_official_average_precision": m.aupr(id_scores, ood_scores),
        "aupr_trapezoid_openood": m.aupr_trapezoid(id_scores, ood_scores),
        "aupr_in_trapezoid": m.aupr_id_trapezoid(id_scores, ood_scores),
        "fpr95_official": m.fpr_at_tpr_official(id_scores, ood_scores),
        "chance_aupr": m.aupr_base_rate(id_scores, ood_scores),
    }
    assert ours == pytest.approx({name: vector[name] for name in ours}, abs=1e-9)
