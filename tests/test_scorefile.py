from pathlib import Path

import pytest
import torch

from ood_toolkit.scorefile import Column, ScoreFile


def test_scores_come_back_with_what_they_are(tmp_path: Path):
    scores = ScoreFile(ids={"test": ["a/1.png", "b/ö.png"]}, roots={"test": "photos"})
    column = Column("score", "timm:x", "energy(temperature=2)", "test")
    scores.add(column, torch.tensor([0.25, 1e-300], dtype=torch.float64))
    scores.add(Column("correct", "timm:x", "none", "test"), torch.tensor([0, 1], dtype=torch.uint8))
    scores.save(tmp_path / "s.safetensors")
    again = ScoreFile.load(tmp_path / "s.safetensors")
    assert again.ids == scores.ids
    assert again.roots == scores.roots
    assert list(again.columns) == list(scores.columns)
    assert torch.equal(again.columns[column], scores.columns[column])
    assert [c.method for c, _ in again.select("score")] == ["energy(temperature=2)"]


def test_a_column_has_one_number_per_image():
    scores = ScoreFile(ids={"test": ["a", "b"]})
    with pytest.raises(ValueError, match="has 3 rows, its part 2"):
        scores.add(Column("score", "m", "msp", "test"), torch.zeros(3))


def test_another_file_is_refused(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"not a safetensors file at all")
    with pytest.raises(ValueError, match="is not a score file"):
        ScoreFile.load(tmp_path / "x")
