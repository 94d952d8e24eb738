import pytest

from ood_toolkit.corruptions import (
    ALEXNET_CLEAN,
    ALEXNET_ERRORS,
    ALEXNET_FLIPS,
    AVERAGED,
    PERTURBATIONS,
    compares_with_first,
    corruption_error,
    mean_over,
    relative_corruption_error,
)

AVERAGES = (0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572, 0.819324,
            0.564592, 0.853204, 0.646056, 0.717840, 0.606500)  # fmt: skip
"""AlexNet's mean errors over severities as other toolkits carry them (AugMix), in the order of the paper."""
RESNET50 = {
    "gaussian_noise": (29.29, 79.77),
    "impulse_noise": (23.81, 82.58),
    "defocus_blur": (38.75, 74.71),
    "glass_blur": (26.79, 88.61),
    "frost": (38.14, 74.84),
    "fog": (45.83, 66.11),
    "brightness": (68.02, 56.64),
    "contrast": (39.06, 71.43),
    "elastic_transform": (45.25, 84.75),
}
"""Corruption → top-1 accuracy over all severities, and the CE that another evaluation printed beside it, in percent."""


def test_alexnets_errors_average_to_those_that_other_toolkits_divide_by():
    assert len(AVERAGED) == 15
    for corruption, average in zip(AVERAGED, AVERAGES, strict=True):
        assert sum(ALEXNET_ERRORS[corruption]) / 5 == pytest.approx(average, abs=5e-7)


@pytest.mark.parametrize("corruption", RESNET50)
def test_the_corruption_error_of_resnet50_is_the_one_that_another_evaluation_prints(corruption: str):
    accuracy, published = RESNET50[corruption]
    found = corruption_error(corruption, [1 - accuracy / 100] * 5)
    assert 100 * found == pytest.approx(published, abs=0.02)  # both are printed with two digits


def test_errors_are_summed_over_severities_before_the_ratio():
    """Literally as in section 4.1, which is not the mean of five ratios."""
    errors = [0.2, 0.35, 0.5, 0.61, 0.8]
    above = below = above_clean = below_clean = 0.0
    for error, alexnet in zip(errors, (0.67474, 0.76050, 0.84378, 0.87260, 0.94500), strict=True):
        above += error
        below += alexnet
        above_clean += error - 0.15
        below_clean += alexnet - 0.4345
    assert corruption_error("fog", errors) == pytest.approx(above / below, rel=1e-12)
    assert relative_corruption_error("fog", errors, 0.15) == pytest.approx(above_clean / below_clean, rel=1e-12)


def test_alexnet_is_one_by_either_measure():
    for corruption in ALEXNET_ERRORS:
        assert corruption_error(corruption, ALEXNET_ERRORS[corruption]) == pytest.approx(1)
        assert relative_corruption_error(corruption, ALEXNET_ERRORS[corruption], ALEXNET_CLEAN) == pytest.approx(1)


def test_a_missing_severity_gives_no_corruption_error_and_a_missing_corruption_no_mean():
    with pytest.raises(ValueError, match=r"over severities.*got 4 errors"):
        corruption_error("fog", [0.1] * 4)
    assert mean_over(("fog", "snow"), {"fog": 0.2, "snow": 0.4}) == pytest.approx(0.3)
    assert mean_over(("fog", "snow"), {"fog": 0.2, "snow": None}) is mean_over(("fog", "snow"), {"fog": 0.2}) is None


def test_noise_alone_is_compared_with_the_first_frame():
    assert [name for name in PERTURBATIONS if compares_with_first(name)] == ["gaussian_noise", "shot_noise"]
    assert set(PERTURBATIONS) < set(ALEXNET_FLIPS)
