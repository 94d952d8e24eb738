import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from ood_toolkit import lease
from ood_toolkit import store as store_module
from ood_toolkit.cli import app
from ood_toolkit.datasets import ArrayImages
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier
from ood_toolkit.models.text_cache import cached_tensor

DAY = 24 * 3600
Command = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_ROWS", 8)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["cache", words[0], "--cache", str(tmp_path), *words[1:]])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


class Small(nn.Module):
    """A network that counts the images it sees."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body, self.head = nn.Conv2d(3, 5, 3), nn.Linear(5, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return self.head(self.body(images).relu().mean(dim=(2, 3)))


def pixels(image: object) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def made_up(name: str, count: int) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)


def extract(cache: Path, name: str, seed: int = 0, count: int = 21) -> int:
    """Fills the store of a set; returns how many images went through the model."""
    model = Small(seed)
    classifier = Classifier(model)
    classifier.check(torch.zeros(2, 3, 6, 6))
    model.seen = 0
    images = ArrayImages(made_up(name, count), name=name)
    Extractor(cache).extract(classifier, pixels, "as they are", images, name=f"made:{seed}")
    return model.seen


def stores(cache: Path) -> dict[str, Path]:
    """Folders by name of the image set."""
    return {json.loads(file.read_text())["images"]: file.parent for file in cache.glob("*/about.json")}


def unused_for(path: Path, seconds: float) -> None:
    os.utime(path / "lease", (time.time() - seconds, time.time() - seconds))


def test_ls_says_what_every_store_is_of(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    extract(tmp_path, "clouds", seed=1, count=40)
    cached_tensor(tmp_path / "texts", ("a", "b"), lambda: torch.ones(3))
    code, text = command("ls", "--json")
    facts = {entry["images"]: entry for entry in map(json.loads, text.splitlines())}
    assert code == 0
    assert facts["birds"]["model"] == "made:0"
    assert facts["clouds"]["rows"] == 40
    assert facts["clouds"]["groups"] == {"outputs": {"whole": 5, "shards": 5}}
    assert facts["clouds"]["identity_dtype"] == "torch.float32"
    assert facts["clouds"]["identity_transform"] == "as they are"
    assert facts[""]["key"] == "texts"
    assert abs(facts["birds"]["last_use"] - time.time()) < 60
    lines = command("ls")[1].splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*sorted(s.name[:12] for s in stores(tmp_path).values()), "texts"]
    assert "older layout" not in command("ls")[1]


def test_ls_does_not_count_as_use(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    (store,) = stores(tmp_path).values()
    unused_for(store, 5 * DAY)
    command("ls")
    command("verify")
    assert abs(time.time() - (store / "lease").stat().st_mtime - 5 * DAY) < 60


def test_holes_of_a_file_that_is_not_full_take_no_disk(tmp_path: Path, command: Command):
    store = store_module.Store(tmp_path / ("a" * 24), 100_000, {"images": "f" * 16, "weights": "w" * 16})
    store.write("outputs", store.shards[0], {"logits": torch.ones(8, 1000)}, {})
    (entry,) = [json.loads(line) for line in command("ls", "--json")[1].splitlines()]
    assert 8 * 1000 * 4 <= entry["bytes"]["outputs"] < 100_000
    assert (entry["images"], entry["model"]) == ("f" * 8, "w" * 8)
    assert not entry["complete"]
    assert "outputs 1/12500 shards" in command("ls")[1]


def test_du_sums_by_model_set_and_group(tmp_path: Path, command: Command):
    for name, seed in (("birds", 0), ("birds", 1), ("clouds", 0)):
        extract(tmp_path, name, seed)
    sums = json.loads(command("du", "--json")[1])
    sizes = [sum(json.loads(line)["bytes"].values()) for line in command("ls", "--json")[1].splitlines()]
    assert sums["total"] == sum(sizes)
    assert sum(sums["model"].values()) == sum(sums["images"].values()) == sum(sums["group"].values()) == sums["total"]
    assert sums["images"]["birds"] > sums["images"]["clouds"]
    assert set(sums["model"]) == {"made:0", "made:1"}
    assert "outputs" in sums["group"]
    assert "in all" in command("du")[1]


def test_verify_names_a_damaged_shard_and_the_next_run_computes_it_alone(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    extract(tmp_path, "clouds", count=30)
    assert command("verify")[0] == 0
    file = stores(tmp_path)["clouds"] / "features.bin"
    whole = file.read_bytes()
    with file.open("r+b") as handle:
        handle.seek(5 * 4 * 9)  # row 9 lies in shard 1
        handle.write(b"\xff")
    code, text = command("verify")
    assert code == 1
    (line,) = [line for line in text.splitlines() if "not as written" in line]
    assert "clouds (30), made:0  outputs shards 1: not as written, forgotten" in line
    assert not command("verify")[0]  # what is wrong was forgotten
    assert extract(tmp_path, "clouds", count=30) == 8
    assert file.read_bytes() == whole
    assert extract(tmp_path, "birds") == 0


def test_a_run_computes_a_shard_again_that_was_damaged_after_the_last_one(tmp_path: Path):
    extract(tmp_path, "birds")
    (store,) = stores(tmp_path).values()
    whole = (store / "logits.bin").read_bytes()
    with (store / "logits.bin").open("r+b") as handle:
        handle.seek(-3, os.SEEK_END)
        handle.write(b"abc")
    assert extract(tmp_path, "birds") == 21 - 16
    assert (store / "logits.bin").read_bytes() == whole


def test_verify_removes_a_text_file_that_was_cut_off(tmp_path: Path, command: Command):
    cached_tensor(tmp_path / "texts", "one", lambda: torch.ones(3))
    cached_tensor(tmp_path / "texts", "two", lambda: torch.ones(3))
    bad, good = sorted((tmp_path / "texts").iterdir())
    os.truncate(bad, 20)
    code, text = command("verify")
    assert code == 1
    assert bad.name in text
    assert sorted((tmp_path / "texts").iterdir()) == [good]


def test_prune_wants_to_be_told_what(command: Command):
    with pytest.raises(ValueError, match="say what to remove"):
        command("prune", "--yes")
    with pytest.raises(ValueError, match="cannot read --older-than 'month'"):
        command("prune", "--older-than", "month")
    with pytest.raises(ValueError, match="cannot read --max-size 'big'"):
        command("prune", "--max-size", "big")


def test_prune_by_age_removes_what_was_not_used(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    extract(tmp_path, "clouds")
    unused_for(stores(tmp_path)["clouds"], 31 * DAY)
    assert "1 stores, " in command("prune", "--older-than", "30d", "--dry-run")[1]
    assert set(stores(tmp_path)) == {"birds", "clouds"}
    assert command("prune", "--older-than", "30d", "--yes")[0] == 0
    assert set(stores(tmp_path)) == {"birds"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [stores(tmp_path)["birds"].name]
    assert extract(tmp_path, "clouds") == 21


def test_prune_asks_first(tmp_path: Path):
    extract(tmp_path, "birds")
    words = ["cache", "prune", "--cache", str(tmp_path), "--older-than", "0m"]
    assert CliRunner().invoke(app, words, input="n\n").exit_code == 1
    assert set(stores(tmp_path)) == {"birds"}
    assert CliRunner().invoke(app, words, input="y\n").exit_code == 0
    assert not stores(tmp_path)


def test_prune_by_size_removes_the_longest_unused_first(tmp_path: Path, command: Command):
    for age, name in enumerate(["new", "older", "oldest"]):
        extract(tmp_path, name)
        unused_for(stores(tmp_path)[name], age * DAY)
    total = json.loads(command("du", "--json")[1])["total"]
    command("prune", "--max-size", f"{total - 1}B", "--yes")
    assert set(stores(tmp_path)) == {"new", "older"}
    command("prune", "--max-size", "0B", "--older-than", "12h", "--yes")
    assert set(stores(tmp_path)) == {"new"}


def test_prune_by_key_and_incompleteness(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    extract(tmp_path, "clouds")
    found = stores(tmp_path)
    assert command("prune", "--incomplete", "--yes")[1] == "nothing to remove\n"
    (found["clouds"] / "done" / "outputs-000001.json").unlink()
    command("prune", "--incomplete", "--key", found["birds"].name[:6], "--yes")
    assert set(stores(tmp_path)) == {"birds", "clouds"}
    command("prune", "--incomplete", "--yes")
    assert set(stores(tmp_path)) == {"birds"}
    command("prune", "--key", found["birds"].name[:6], "--yes")
    assert not stores(tmp_path)


def test_a_store_of_an_older_layout_is_listed_and_can_be_pruned(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    (store,) = stores(tmp_path).values()
    header = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**header, "version": 2, "columns": {}, "sealed": ["outputs"]}))
    assert "older layout" in command("ls")[1]
    assert command("verify")[0] == 0
    command("prune", "--incomplete", "--yes")
    assert not stores(tmp_path)


def test_what_is_no_store_is_never_touched(tmp_path: Path, command: Command):
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    extract(elsewhere, "linked")
    (linked,) = stores(elsewhere).values()
    (tmp_path / ("b" * 24)).symlink_to(linked)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "store.json").write_text('{"rows": 3, "identity": {}}')
    (tmp_path / ("c" * 24)).mkdir()
    (tmp_path / ("c" * 24) / "notes.txt").write_text("mine")
    extract(tmp_path, "birds")
    extract(tmp_path, "clouds")
    (birds, clouds) = (stores(tmp_path)[name] for name in ("birds", "clouds"))
    (birds / "thesis.docx").write_text("mine")
    (clouds / "done" / "link.json").symlink_to(linked / "store.json")
    result = CliRunner().invoke(app, ["cache", "prune", "--cache", str(tmp_path), "--older-than", "0m", "--yes"])
    assert "holds thesis.docx" in result.output
    assert "holds done/link.json" in result.output
    assert len(list(tmp_path.iterdir())) == 5
    assert birds.is_dir()
    assert clouds.is_dir()
    assert len(list(linked.rglob("*"))) == len(list(birds.rglob("*"))) - 1
    shutil.rmtree(elsewhere)


HOLD = """
import json, sys
from pathlib import Path
from ood_toolkit.store import Store
store = Store.found(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_store_that_a_process_uses_stays(tmp_path: Path, command: Command):
    extract(tmp_path, "birds")
    (store,) = stores(tmp_path).values()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(store)], **pipes) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "open\n"
        unused_for(store, 90 * DAY)
        text = command("prune", "--older-than", "30d", "--yes")[1]
        assert "is in use" in text
        assert store.is_dir()
        user.communicate("done\n")
    command("prune", "--older-than", "30d", "--yes")
    assert not store.exists()


def test_outputs_keep_their_store_from_being_removed(tmp_path: Path, command: Command):
    noise = np.zeros((9, 6, 6, 3), dtype=np.uint8)
    done = Extractor(tmp_path).extract(Classifier(Small(0)), pixels, "t", ArrayImages(noise, name="birds"))
    part = done.outputs.rows([1, 3])
    del done
    assert "is in use" in command("prune", "--older-than", "0m", "--yes")[1]
    assert part.logits.isfinite().all()
    del part
    assert "1 stores removed" in command("prune", "--older-than", "0m", "--yes")[1]


EXTRACT = """
import sys
from pathlib import Path
import torch
from ood_toolkit import store
from ood_toolkit.datasets import ArrayImages
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier
sys.path.insert(0, sys.argv[2])
from test_cli_cache import Small, made_up, pixels
store.SHARD_ROWS = 16
print("ready", flush=True)
sys.stdin.readline()
# batches of other sizes round otherwise: mixed shards would show in the checksums
extractor = Extractor(Path(sys.argv[1]), batch_size=int(sys.argv[3]))
done = extractor.extract(Classifier(Small(0)), pixels, "as they are", ArrayImages(made_up("birds", 500), name="birds"))
assert len(done.outputs) == 500
"""


def test_two_processes_that_extract_one_set_at_once_leave_one_right_store(tmp_path: Path, command: Command):
    users = [
        subprocess.Popen(
            [sys.executable, "-c", EXTRACT, str(tmp_path), str(Path(__file__).parent), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for size in (5, 7)
    ]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
    for user in users:
        assert user.stdin is not None
        user.stdin.write("go\n")
        user.stdin.flush()
    for user in users:
        user.communicate()
    assert [user.returncode for user in users] == [0, 0]
    assert command("verify")[0] == 0
    (entry,) = [json.loads(line) for line in command("ls", "--json")[1].splitlines()]
    assert entry["groups"] == {"outputs": {"whole": 32, "shards": 32}}
    done = Extractor(tmp_path).extract(
        Classifier(Small(0)), pixels, "as they are", ArrayImages(made_up("birds", 500), name="birds")
    )
    assert done.computed == 0
    images = torch.stack([pixels(image) for image in made_up("birds", 500)])
    assert torch.allclose(done.outputs.logits, Small(0)(images.float() / 255), atol=1e-5)


def test_without_locks_a_store_counts_as_used_for_a_day(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    extract(tmp_path, "birds")
    (store,) = stores(tmp_path).values()
    monkeypatch.setattr(lease, "_locks", lambda handle, alone: None)
    unused_for(store, 0.9 * DAY)
    assert "is in use" in command("prune", "--older-than", "0m", "--yes")[1]
    unused_for(store, 1.1 * DAY)
    assert "1 stores removed" in command("prune", "--older-than", "0m", "--yes")[1]
