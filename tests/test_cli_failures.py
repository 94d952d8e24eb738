"""A method that was named and cannot learn from the data: the run's other numbers, the reason, exit code 2."""

import json
from pathlib import Path

from ood_toolkit.records import read_records
from tests.command_line import Bench

DIGITS = ("--ensemble", "none", "--resamples", 0)
NO_TEMPERATURE = "temperature(bounds=(50.0, 60.0))"


def test_named_detectors_and_calibrators_that_cannot_be_fitted_are_missing_cells_with_a_reason_and_exit_code_2(
    bench: Bench, tmp_path: Path
):
    result = bench(*DIGITS, "--detectors", "msp,pca(dim=5000)", "--calibrators", NO_TEMPERATURE)
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith("ood-bench: ")
    assert "pca(dim=5000) has no numbers: dim must lie between 1 and" in last
    assert f"{NO_TEMPERATURE} has no numbers: the best temperature is below the bounds" in last
    assert "dim must lie between 1 and" in result.out  # the footnote
    assert "best temperature is below the bounds" in result.out
    records = read_records(tmp_path / "run" / "records.jsonl")
    values = {r.method: r.value for r in records if r.metric in ("auroc", "nll")}
    assert values["msp"] is not None
    assert values["none"] is not None
    assert values["pca(dim=5000)"] is None
    assert values[NO_TEMPERATURE] is None
    assert set(json.loads((tmp_path / "run" / "run.json").read_text())["failed"]) == {"pca(dim=5000)", NO_TEMPERATURE}
    assert (tmp_path / "run" / "table.md").exists()
