import pytest

from ood_toolkit.detectors.nci import NCIDetector
from ood_toolkit.testing import check_detector


@pytest.mark.parametrize(("tool", "alpha"), [("openood", 0.0001), ("pytorch-ood", 0.0001), ("pytorch-ood", 0.0)])
def test_it_equals_the_other_tools(golden, tool, alpha):
    detector = NCIDetector(alpha=alpha).fit(golden.outputs("fit"))
    golden.check(f"{tool}/NCI/alpha={alpha}", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_other_weights_of_the_norm_keep_the_laws(alpha):
    check_detector(NCIDetector(alpha=alpha))
