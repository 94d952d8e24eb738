import pytest
import torch

from ood_toolkit import registry
from ood_toolkit.testing.calibrators import check_calibrator
from tests.calibrators.data import drawn

EXEMPT = {
    "none": {"helps_overconfident_logits": "it is the uncalibrated softmax"},
}
SLOW = ("bbq", "enir")
"""Fitted by netcal, in seconds: their maps have tests of their own."""


def marked(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", marked(registry.calibrator_classes()))
def test_every_calibrator_keeps_every_law(name):
    check_calibrator(registry.calibrator_classes()[name], exempt=EXEMPT.get(name))


@pytest.mark.parametrize("name", [n for n, kind in registry.calibrator_classes().items() if kind.preserves_argmax])
@pytest.mark.parametrize("temperature", [0.3, 5.0])
def test_the_prediction_stays_where_a_calibrator_says_so(name, temperature):
    logits, labels = drawn(500, 30, temperature=temperature)
    for dtype in (torch.float32, torch.float64):
        if name in SLOW and dtype == torch.float64:
            continue
        fitted = registry.build_calibrator(name).fit(logits.to(dtype), labels)
        fresh = drawn(2000, 30, temperature=temperature, seed=1)[0].to(dtype)
        assert torch.equal(fitted(fresh).argmax(1), fresh.argmax(1))


@pytest.mark.parametrize("name", registry.calibrator_classes())
def test_every_calibrator_names_its_paper_and_its_entry_in_the_bibliography(name):
    from importlib.resources import files

    kind = registry.calibrator_classes()[name]
    if name == "none":
        return
    assert kind.paper
    assert f"{{{kind.cite}," in (files("ood_toolkit") / "references.bib").read_text()


@pytest.mark.parametrize("name", [n for n in registry.calibrator_classes() if n not in SLOW])
def test_every_calibrator_exports_with_any_number_of_rows(name):
    logits, labels = drawn(400, 5)
    fitted = registry.build_calibrator(name).fit(logits.float(), labels)
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(fitted, (logits[:64].float(),), dynamic_shapes=({0: rows},)).module()
    torch.testing.assert_close(exported(logits[:33].float()), fitted(logits[:33].float()), rtol=0, atol=1e-6)
