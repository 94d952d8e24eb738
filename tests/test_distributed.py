"""Several ranks give what one gives; a rank that fails or dies ends the run in words and costs only its own part."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from ranks_program import noise
from test_docs_examples import FENCE, parsed
from torch import Tensor

from ood_toolkit import stats
from ood_toolkit.benchmarks import crew
from ood_toolkit.benchmarks.crew import Crew, Origin
from ood_toolkit.detectors import Detector
from ood_toolkit.distributed import ALONE, Sums, World, joined, launched, packed, sharing, summed, unpacked
from ood_toolkit.outputs import UNKNOWN, Outputs
from ood_toolkit.records import read_records
from ood_toolkit.registry import build_detector, detector_classes
from ood_toolkit.scorefile import ScoreFile
from ood_toolkit.stats import moments
from ood_toolkit.testing.synthetic import synthetic_outputs

HERE = Path(__file__).parent
PROGRAM = HERE / "ranks_program.py"


class Launch(NamedTuple):
    code: int
    out: str
    err: str


def launch(ranks: int, *arguments: object, **env: str) -> Launch:
    """Runs the program beside this file, alone or under torchrun, with shards of 8 rows, and everything shared."""
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*words, str(PROGRAM), *map(str, arguments)],
        env=surroundings(**env),
        capture_output=True,
        text=True,
        timeout=900,
    )
    return Launch(done.returncode, done.stdout, done.stderr)


def surroundings(**env: str) -> dict[str, str]:
    """The environment of a launch: nothing of an outer one."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OOD_", "TORCHELASTIC_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **env}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """known/{a..d}/*.png (one of them broken) and strange/*.png."""
    root = tmp_path_factory.mktemp("photos")
    known = [(f"known/{c}/{n}.png", 60 + 30 * k) for k, c in enumerate("abcd") for n in range(25)]
    places, brightness = zip(*known, *((f"strange/{n}.png", 200) for n in range(20)), strict=True)
    for place, pixels in zip(places, noise(brightness), strict=True):
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    (root / "known/b/7.png").write_bytes(b"no image at all")
    return root


def choices(photos: Path, place: Path, detectors: str) -> list[object]:
    words = ["--suite", "folders", "--model", "ranks_program:network", "--detectors", detectors]
    words += ["--id", photos / "known", "--ood", f"strange={photos / 'strange'}", "--fit-fraction", "0.5"]
    words += ["--calibrators", "temperature", "--ensemble", "none", "--resamples", 20, "--workers", 0]
    return [*words, "--out", place / "run", "--cache", place / "cache"]


def bench(photos: Path, place: Path, detectors: str, ranks: int, *more: str, **env: str) -> Launch:
    return launch(ranks, "bench", *choices(photos, place, detectors), *more, **env)


def same(one: Path, other: Path) -> None:
    """Records of two run folders and per-image scores, to 1e-6."""
    facts = [[{**vars(r), "run": ""} for r in read_records(place / "records.jsonl")] for place in (one, other)]
    numbers = [[(r.pop("value"), r.pop("low"), r.pop("high")) for r in records] for records in facts]
    assert facts[0] == facts[1]
    assert _table(numbers[0]).allclose(_table(numbers[1]), rtol=0, atol=1e-6, equal_nan=True)
    scores = [ScoreFile.load(place / "scores.safetensors") for place in (one, other)]
    assert scores[0].ids == scores[1].ids
    assert set(scores[0].columns) == set(scores[1].columns)
    for column, values in scores[0].columns.items():
        gap = (values.double() - scores[1].columns[column].double()).abs() / values.double().abs().clamp_min(1.0)
        assert float(gap.max()) <= 1e-6, column


def _table(numbers: list[tuple[float | None, ...]]) -> Tensor:
    return torch.tensor([[torch.nan if n is None else n for n in row] for row in numbers], dtype=torch.float64)


DETECTORS = "msp,mahalanobis,rmds,vim,neco,pca,corp,knn(k=5),react,odin,odin_mahalanobis,tempscale,temperature+msp"


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launch]:
    """The run of one process: its folder, and what it printed."""
    place = tmp_path_factory.mktemp("alone")
    done = bench(photos, place, DETECTORS, 1)
    assert done.code == 0, done.err
    return place / "run", done


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_give_the_records_and_scores_of_one_process(
    photos: Path, tmp_path: Path, alone: tuple[Path, Launch], ranks: int
):
    done = bench(photos, tmp_path, DETECTORS, ranks)
    assert done.code == 0, done.err
    same(alone[0], tmp_path / "run")
    assert done.out == alone[1].out  # printed once
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert facts["ranks"] == ranks
    rates = re.findall(r"in ([\d.]+) s \((\d+) images/s\)", done.err)
    assert rates
    assert all(int(rate) < 1e6 for _, rate in rates)  # the time is that of the rank that had the work
    assert list(facts["unreadable"]["id"]) == ["b/7.png"]
    assert {file.name for file in tmp_path.iterdir()} == {"run", "cache"}  # no other rank left a folder


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out to whoever asks for any."""
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as candidate:
            if candidate.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise OSError("every port from 20000 to 32767 is in use")


@pytest.mark.slow
def test_two_machines_that_share_a_folder_give_what_one_gives(photos: Path, tmp_path: Path, alone: tuple[Path, Launch]):
    machine = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    machine += ["--master-port", free_port()]
    words = [PROGRAM, "bench", *choices(photos, tmp_path, DETECTORS)]
    started = [
        subprocess.Popen(
            [*map(str, machine), f"--node-rank={node}", *map(str, words)],
            env=surroundings(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    (out, err), (silence, _) = (machine.communicate(timeout=900) for machine in started)
    assert [machine.returncode for machine in started] == [0, 0], err
    assert out == alone[1].out
    assert not silence
    same(alone[0], tmp_path / "run")


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one_under_a_class_mask(tmp_path: Path):
    for ranks in (1, 2):
        done = launch(ranks, "masked", tmp_path / str(ranks))
        assert done.code == 0, done.err
    same(tmp_path / "1/run", tmp_path / "2/run")


@pytest.mark.slow
def test_an_unreadable_image_under_strict_ends_all_ranks_in_one_line(photos: Path, tmp_path: Path):
    done = bench(photos, tmp_path, "msp", 2, "--strict")
    assert done.code != 0
    lines = [line for line in done.err.splitlines() if "ood-bench:" in line]
    assert len(lines) == 1
    assert "image 'b/7.png' cannot be read" in lines[0]


@pytest.mark.slow
def test_wrong_choices_end_all_ranks_in_one_line(photos: Path, tmp_path: Path):
    done = bench(photos, tmp_path, "enrgy", 3)
    assert done.code != 0
    lines = [line for line in done.err.splitlines() if "ood-bench:" in line]
    assert len(lines) == 1
    assert "did you mean 'energy'" in lines[0]


@pytest.mark.slow
def test_a_rank_with_other_weights_is_found_before_the_pass(photos: Path, tmp_path: Path):
    done = bench(photos, tmp_path, "msp", 2, ODD_RANK="1")
    assert done.code != 0
    lines = [line for line in done.err.splitlines() if "ood-bench:" in line]
    assert len(lines) == 1
    assert "rank 1 has another model, transform or copy of 'id' than rank 0" in lines[0]
    assert not list(tmp_path.glob("cache/*/*.bin"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_in_words(photos: Path, tmp_path: Path, victim: int):
    done = bench(photos, tmp_path, "msp", 2, KILL=f"{victim}:3")
    assert done.code != 0
    lines = [line for line in done.err.splitlines() if "ood-bench:" in line]
    assert len(lines) == 1
    assert "rank" in lines[0]
    assert "run the same command again" in lines[0]


@pytest.mark.slow
def test_after_a_killed_rank_only_the_shards_that_nobody_wrote_are_computed(
    photos: Path, tmp_path: Path, alone: tuple[Path, Launch]
):
    done = bench(photos, tmp_path, DETECTORS, 2, KILL="1:5")
    assert done.code != 0
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cache/*/done/*.json")}
    groups = {file.name.rpartition("-")[0] for file in kept}
    assert len(kept) >= 5
    again = bench(photos, tmp_path, DETECTORS, 3)
    assert again.code == 0, again.err
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    whole = len(groups) * (13 + 3)  # shards of 100 and of 20 images
    assert len(kept) < whole
    same(alone[0], tmp_path / "run")
    # the signal that ended the others was not taken for a broken image
    assert list(json.loads((tmp_path / "run/run.json").read_text())["unreadable"]["id"]) == ["b/7.png"]


@pytest.mark.slow
def test_ranks_speak_to_each_other_and_fail_together(tmp_path: Path):
    done = launch(3, "exchanges", tmp_path)
    assert done.code == 0, done.err
    saw = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    cores = len(os.sched_getaffinity(0))
    for rank, seen in enumerate(saw):
        assert seen["ranks"] == [rank, 3, rank, 3]
        assert seen["threads"] == [max(1, cores // 3), max(1, cores // 3) if rank else cores]
        assert seen["gathered"] == ["rank 0", "rank 1", "rank 2"]
        assert seen["told"] == "from 0"
        assert seen["sums"] == [pytest.approx([3 / 7] * 3, rel=1e-15), [3, 3 * 2**53]]
        assert seen["first"] == rank
        assert seen["after"][0] < min(seen["after"][1:])
        assert seen["afterwards"] == rank
        assert seen["waited"] < 50  # of the 60 s that the others would have taken
    assert [seen["told_error"] for seen in saw] == [
        "IndexError: list index out of range",
        *["FailedElsewhere: list index out of range"] * 2,
    ]
    assert [seen["each_error"] for seen in saw] == [
        "ValueError: rank 1 sees a broken image",
        *["FailedElsewhere: rank 1 sees a broken image"] * 2,
    ]
    assert saw[0]["own_error"] == "ValueError: rank 0 sees a broken image"
    assert saw[0]["early_error"] == "RuntimeError: rank 2: KeyError: 'lost'"


def test_a_process_that_nobody_launched_is_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")  # some schedulers set it for their own purposes
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not launched()
    with joined() as world:
        assert world is ALONE
    assert ALONE.gather(5) == [5]
    assert ALONE.each(lambda: 6) == 6
    assert ALONE.first(lambda: 7) == 7
    assert ALONE.sum([torch.ones(2)])[0].tolist() == [1, 1]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 10, 1001])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_shares_of_all_ranks_are_all_rows_once_and_nearly_even(rows: int, size: int):
    shares = [World(rank, size).share(rows) for rank in range(size)]
    assert [row for share in shares for row in range(rows)[share]] == list(range(rows))
    lengths = [len(range(rows)[share]) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1001])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_shares_cut_into_steps_are_all_rows_once_and_whole_steps_but_the_last(rows: int, size: int):
    shares = [World(rank, size).share(rows, 64) for rank in range(size)]
    assert [row for share in shares for row in range(rows)[share]] == list(range(rows))
    assert all(share.start % 64 == 0 or share.start == rows for share in shares)
    steps = [-(-len(range(rows)[share]) // 64) for share in shares]
    assert max(steps) - min(steps) <= 1


def in_shares(rows: Outputs, size: int, asked: list[object]) -> Callable[[Sums], list[Tensor]]:
    """What `size` ranks would add up, each with a copy of the sums that has been through a message."""

    def total(sums: Sums) -> list[Tensor]:
        asked.append(sums)
        data = packed(sums)
        assert data is not None
        parts = [
            unpacked(data, "cpu")(rows.rows(World(rank, size).share(len(rows))).batches(100)) for rank in range(size)
        ]
        return [torch.stack(values).sum(dim=0) for values in zip(*parts, strict=True)]

    return total


@pytest.mark.parametrize("size", [1, 2, 5])
def test_moments_in_shares_are_those_of_numpy_over_all_rows(size: int):
    train = synthetic_outputs(fit_rows=600).train
    train = train.with_labels(torch.where(torch.arange(len(train)) % 7 == 0, UNKNOWN, train.labels))
    asked: list[object] = []
    with sharing(train, in_shares(train, size, asked)):
        found = moments(train)
    assert len(asked) == 1
    known = (train.labels >= 0).numpy()
    rows, labels = train.features.double().numpy()[known], train.labels.numpy()[known]
    means = np.stack([rows[labels == c].mean(axis=0) for c in range(train.classes)])
    np.testing.assert_array_equal(found.counts.numpy(), np.bincount(labels, minlength=train.classes))
    np.testing.assert_allclose(found.class_means.numpy(), means, atol=1e-12)
    np.testing.assert_allclose(found.mean.numpy(), rows.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(found.total.numpy(), np.cov(rows.T, bias=True), atol=1e-12)
    np.testing.assert_allclose(found.within.numpy(), np.cov((rows - means[labels]).T, bias=True), atol=1e-12)


@pytest.mark.parametrize(
    "spec", ["mahalanobis", "rmds", "mahalanobis_pp", "vim", "neco", "pca", "gmm", "wdiscood", "ssd"]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_a_detector_fitted_in_shares_scores_as_one_fitted_alone(spec: str, dtype: torch.dtype, tolerance: float):
    if spec not in detector_classes():
        pytest.skip(f"{spec} is not registered")
    alone, together = build_detector(spec), build_detector(spec)
    assert isinstance(alone, Detector)
    assert isinstance(together, Detector)
    splits = synthetic_outputs(alone.taps, fit_rows=600).to(dtype)
    alone.fit(splits.train)
    asked: list[object] = []
    with sharing(splits.train, in_shares(splits.train, 3, asked)):
        together.fit(splits.train)
    assert asked, f"{spec} has shared nothing"
    torch.testing.assert_close(together(splits.ood), alone(splits.ood), rtol=tolerance, atol=tolerance)


class _Following(World):
    """Rank 0 of two, of which the other scores the second share; notes what was said."""

    rows: Outputs
    orders: list[Any]

    def __init__(self, rows: Outputs) -> None:
        super().__init__(0, 2)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "orders", [])

    def told(self, make: Any = None) -> Any:
        self.orders.append(make())

    def gather(self, value: Any) -> list[Any]:
        order = self.orders[-1]
        return [value, unpacked(order.detector, "cpu")(self.rows.rows(World(1, 2).share(len(self.rows), order.step)))]


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_heavy_detector_is_sent_only_where_the_rows_weigh_more(small: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crew, "_ROWS_WORTH_SHARING", 1)
    monkeypatch.setattr(crew, "_SMALL_STATE", small)
    monkeypatch.setattr(stats, "_BLOCK_NUMBERS", 1)  # blocks of 64 rows
    splits = synthetic_outputs(fit_rows=300)
    detector = build_detector("mahalanobis").fit(splits.train)
    assert isinstance(detector, Detector)
    state = sum(value.numel() * value.element_size() for value in detector.state_dict().values())
    row = 4 * (splits.train.classes + splits.train.width)
    few, many = splits.train.rows(slice(0, 65)), splits.train
    assert 65 * row < state < len(many) * row
    for rows, sent in ((few, small > 0), (many, True)):
        world = _Following(rows)
        scores = Crew(world).scores(detector, rows, Origin("model"))
        assert len(world.orders) == sent
        assert torch.equal(scores, detector(rows))


def test_only_the_rows_that_all_ranks_can_find_are_shared():
    train = synthetic_outputs(fit_rows=100).train
    other = train.rows(slice(0, 50))

    def never(sums: Sums) -> list[Tensor]:
        raise AssertionError("these rows are not the shared ones")

    with sharing(train, never):
        assert int(summed(_Count(), other)[0]) == 50
    assert int(summed(_Count(), train)[0]) == 100


def test_what_cannot_be_sent_is_summed_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crew, "_ROWS_WORTH_SHARING", 1)
    train = synthetic_outputs(fit_rows=100).train
    shift = 1.0
    with Crew(World(0, 2)).sharing_sums(train, Origin("model")):  # had it shared, half of the rows would be missing
        found = moments(train, transform=lambda rows: rows + shift)
    torch.testing.assert_close(found.mean, (train.features + shift).double().mean(dim=0), rtol=1e-12, atol=1e-12)


class _Count:
    def __call__(self, batches: Iterator[Outputs]) -> list[Tensor]:
        return [torch.tensor(sum(len(batch) for batch in batches))]


def test_the_launches_that_the_documentation_shows_parse():
    page = (HERE.parent / "docs" / "scale.md").read_text(encoding="utf-8")
    text = "\n".join(body for _, body in FENCE.findall(page)).replace("\\\n", " ")
    lines = re.findall(r"-m ood_toolkit (.*)", text)
    assert len(lines) == 5
    for line in lines:
        assert parsed(f"ood-bench {line}")["cache"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sums_go_from_gpu_to_gpu_where_every_rank_has_one(tmp_path: Path):
    ranks = torch.cuda.device_count()
    done = launch(ranks, "gpu_sums", tmp_path)
    assert done.code == 0, done.err
    for rank in range(ranks):
        saw = json.loads((tmp_path / f"{rank}.json").read_text())
        assert saw == {"nccl": True, "total": [ranks * (ranks + 1) / 2] * 5, "device": f"cuda:{rank}"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_that_share_a_gpu_add_up_in_memory(tmp_path: Path):
    ranks = torch.cuda.device_count() + 1
    done = launch(ranks, "exchanges", tmp_path)
    assert done.code == 0, done.err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_the_records_and_scores_of_one(photos: Path, tmp_path: Path):
    for ranks in (1, 2):
        done = bench(photos, tmp_path / str(ranks), DETECTORS, ranks, "--device", "cuda", "--amp", "off")
        assert done.code == 0, done.err
    same(tmp_path / "1/run", tmp_path / "2/run")
