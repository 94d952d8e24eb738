"""One pass for several models and sets: what it shares, and what it survives."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ood_toolkit import store as store_module
from ood_toolkit.batch_size import BatchSize
from ood_toolkit.batches import Loading, Stretch
from ood_toolkit.datasets import ArrayImages, FolderImages
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier
from ood_toolkit.one_pass import Job

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_ROWS", 8)


class Small(nn.Module):
    """A small network; raises `error()` for batches above `limit`, and notes the batch sizes that went through."""

    def __init__(self, seed: int = 0, limit: int = 10**9, error: Callable[[], Exception] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.limit = limit
        self.error = error
        self.sizes: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > self.limit and self.error:
            raise self.error()
        self.sizes.append(len(images))
        return self.head(self.body(images).relu().mean(dim=(2, 3)))


class CountedImages(ArrayImages):
    """Counts how often each image is decoded."""

    def __init__(self, count: int = 21, seed: int = 0, name: str = "noise") -> None:
        noise = np.random.default_rng(seed).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
        super().__init__(noise, name=name, labels=[row % 4 for row in range(count)])
        self.opened: Counter[int] = Counter()

    def open(self, row: int) -> Any:
        self.opened[row] += 1
        return super().open(row)


def pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def mirrored(image: Any) -> Tensor:
    return pixels(image).flip(2)


def checked(model: nn.Module) -> Classifier:
    classifier = Classifier(model)
    classifier.check(torch.zeros(1, 3, 6, 6))
    if isinstance(model, Small):
        model.sizes.clear()
    return classifier


def by_hand(model: Small, images: ArrayImages, transform: Any = pixels) -> Tensor:
    batch = torch.stack([transform(images.open(row)) for row in range(len(images))]).float() / 255
    return model.head(model.body(batch).relu().mean(dim=(2, 3))).detach()  # not through `forward`, which has a limit


class Brightness(LiveDetector):
    """Runs the model once more."""

    name = "brightness"

    def score(self, classifier: Any, images: Tensor) -> Tensor:
        return classifier(images).logits.sum(dim=1).double()


def test_several_models_and_live_detectors_decode_each_image_once(tmp_path: Path):
    images, models = CountedImages(), [Small(seed) for seed in range(3)]
    jobs = [Job(checked(model), pixels, "as they are", [Brightness()]) for model in models]
    jobs.append(Job(checked(Small(9)), mirrored, "mirrored"))
    extractor = Extractor(tmp_path, batch_size=5)
    assert [filled.computed for filled in extractor.fill(jobs, [images])] == [21] * 4
    assert set(images.opened.values()) == {1}
    for job in jobs:
        done = extractor.extract(job.classifier, job.transform, job.transform_name, images, job.live)
        assert done.computed == 0
        expected = by_hand(job.classifier.model, images, job.transform)  # pyright: ignore[reportArgumentType]
        assert torch.allclose(done.outputs.logits, expected, atol=1e-5)


def test_a_transform_that_writes_into_its_image_does_not_spoil_the_others(tmp_path: Path):
    def blackening(image: Any) -> Tensor:
        image.paste((0, 0, 0), (0, 0, 6, 6))
        return pixels(image)

    images, first, second = CountedImages(), Small(0), Small(1)
    extractor = Extractor(tmp_path)
    jobs = [Job(checked(first), blackening, "black"), Job(checked(second), pixels, "as they are")]
    extractor.fill(jobs, [images])
    done = extractor.extract(jobs[1].classifier, pixels, "as they are", images)
    assert torch.allclose(done.outputs.logits, by_hand(second, images), atol=1e-5)
    dark = extractor.extract(jobs[0].classifier, blackening, "black", images)
    assert torch.equal(dark.outputs.logits, dark.outputs.logits[:1].expand(21, 4))


def test_a_model_whose_store_is_full_does_not_run_beside_one_whose_is_not(tmp_path: Path):
    images, old, new = CountedImages(), Small(0), Small(1)
    extractor = Extractor(tmp_path)
    extractor.fill([Job(checked(old), pixels, "t")], [images])
    jobs = [Job(checked(old), pixels, "t"), Job(checked(new), pixels, "t")]
    assert [filled.computed for filled in extractor.fill(jobs, [images])] == [0, 21]
    assert (sum(old.sizes), sum(new.sizes)) == (0, 21)


def test_a_compiled_model_has_a_store_of_its_own(tmp_path: Path):
    images, extractor = CountedImages(), Extractor(tmp_path)
    plain = checked(Small())
    extractor.extract(plain, pixels, "t", images)
    compiled = Classifier(plain.model, compiled=True, head="head")
    assert [filled.computed for filled in extractor.fill([Job(plain, pixels, "t")], [images])] == [0]
    lacking = extractor.lacking(Job(compiled, pixels, "t"), images)
    assert sum(len(shard.rows) for shard in lacking) == 21


def test_all_sets_go_through_one_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []
    loader = torch.utils.data.DataLoader
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda *a, **k: made.append(1) or loader(*a, **k))
    sets = [CountedImages(count, seed, f"set{seed}") for seed, count in enumerate((21, 3, 8))]
    model = Small()
    extractor = Extractor(tmp_path, batch_size=5, workers=2)
    filled = extractor.fill([Job(checked(model), pixels, "t")], sets)
    assert [one.computed for one in filled] == [21, 3, 8]
    assert all(one.seconds > 0 for one in filled)
    assert len(made) == 1
    for images in sets:
        done = extractor.extract(checked(model), pixels, "t", images)
        assert torch.allclose(done.outputs.logits, by_hand(model, images), atol=1e-5)


def out_of_cuda_memory() -> Exception:
    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def out_of_cpu_memory() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [out_of_cuda_memory, out_of_cpu_memory])
def test_a_batch_that_is_too_large_for_memory_is_done_again_in_halves(tmp_path: Path, error: Any):
    images, model = CountedImages(), Small(limit=3, error=error)
    done = Extractor(tmp_path, batch_size=8).extract(checked(model), pixels, "t", images, [Brightness()])
    assert set(images.opened.values()) == {1}
    assert max(model.sizes) == 2  # 8 and 4 fail, 2 fits
    assert sum(model.sizes) == 2 * 21
    expected = by_hand(model, images)
    assert torch.allclose(done.outputs.logits, expected, atol=1e-5)
    assert torch.allclose(done.live["brightness"], expected.sum(dim=1).double(), atol=1e-5)


def test_memory_that_does_not_hold_one_image_is_an_error_with_a_remedy(tmp_path: Path):
    classifier = Classifier(Small(limit=0, error=out_of_cpu_memory), head="head")
    classifier._checked = True
    with pytest.raises(ValueError, match=r"memory ran out on a single image; .*--amp"):
        Extractor(tmp_path).extract(classifier, pixels, "t", CountedImages())


def test_an_error_that_is_not_about_memory_is_not_retried(tmp_path: Path):
    model = Small(limit=3, error=lambda: RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Extractor(tmp_path, batch_size=8).extract(checked(model), pixels, "t", CountedImages())
    assert model.sizes == []


def rates(size: BatchSize, seconds_per_image: Callable[[int], float], batches: int = 60) -> list[int]:
    seen = []
    for _ in range(batches):
        seen.append(size.size)
        size.took(size.size, size.size * seconds_per_image(size.size))
    return seen


def test_a_batch_grows_on_a_gpu_while_that_pays_and_settles_one_step_back():
    gpu = torch.device("cuda")
    # a fixed cost per batch beside one per image: doubling pays less and less
    assert rates(BatchSize(0, gpu), lambda n: 1.0 + 40 / n)[-1] == 512
    assert rates(BatchSize(0, gpu), lambda n: 1.0 + 10 / n)[-1] == 128
    assert set(rates(BatchSize(0, gpu), lambda n: 1.0)) == {64, 128}
    assert rates(BatchSize(0, gpu), lambda n: 1.0)[-1] == 64
    assert set(rates(BatchSize(48, gpu), lambda n: 1 / n)) == {48}


def test_a_batch_on_a_cpu_has_a_fixed_number_of_pixels():
    for side, expected in ((224, 16), (448, 16), (112, 64), (28, 256)):
        size = BatchSize(0, CPU)
        size.saw(side, side)
        assert set(rates(size, lambda n: 1 / n)) == {expected}


def test_a_batch_does_not_grow_again_after_memory_ran_out():
    size = BatchSize(0, torch.device("cuda"))
    rates(size, lambda n: 1 / n, batches=4)
    assert size.size == 128
    size.too_big(128)
    assert set(rates(size, lambda n: 1 / n)) == {64}
    with pytest.raises(ValueError, match="at least 1, or 0 to have it found; got -1"):
        BatchSize(-1, CPU)


def test_a_batch_that_is_begun_after_a_change_has_the_new_size():
    size = BatchSize(4, CPU)
    images = CountedImages(11)
    stretches = [Stretch(0, range(8), (0,)), Stretch(0, range(8, 11), (0,))]
    batches = Loading(4).batches([images], [pixels], stretches, CPU, size)
    first = next(batches)
    size.too_big(4)
    assert [first.rows, *(batch.rows for batch in batches)] == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9], [10]]


class Killing(CountedImages):
    """Kills the process that decodes row 17."""

    lethal = True

    def open(self, row: int) -> Any:
        if row == 17 and self.lethal:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(row)


def test_a_killed_worker_names_the_remedy_and_what_was_computed_is_kept(tmp_path: Path):
    images, model = Killing(), Small()
    extractor = Extractor(tmp_path, batch_size=2, workers=1)
    with pytest.raises(ValueError, match=r"decodes images died .*fewer than 1 --workers, or 0 .*is kept"):
        extractor.extract(checked(model), pixels, "t", images)
    assert signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, None)  # torch's own is back
    images.lethal = False
    again = Extractor(tmp_path, batch_size=2).extract(checked(model), pixels, "t", images)
    assert again.computed <= 13  # at least one of the shards before row 16 was whole
    assert torch.allclose(again.outputs.logits, by_hand(model, images), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_copied_ahead_reach_the_gpu_whole(workers: int):
    images, gpu = CountedImages(64, name="many"), torch.device("cuda")
    stretches = [Stretch(0, range(start, start + 8), (0, 1)) for start in range(0, 64, 8)]
    loading = Loading(8, workers)
    for batch in loading.batches([images], [pixels, mirrored], stretches, gpu, BatchSize(8, gpu)):
        torch.cuda._sleep(1_000_000)  # the copies run ahead of the computing stream
        for number, transform in ((0, pixels), (1, mirrored)):
            expected = torch.stack([transform(images.open(row)) for row in batch.rows])
            assert batch.pixels[number].device.type == "cuda"
            assert torch.equal((batch.pixels[number] * 1).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives(tmp_path: Path):
    images, model = CountedImages(40), Small()
    on_cpu = Extractor(tmp_path / "cpu", batch_size=8).extract(checked(model), pixels, "t", images)
    there = checked(Small().to("cuda"))
    on_gpu = Extractor(tmp_path / "gpu", batch_size=0, workers=2).extract(there, pixels, "t", images)
    assert torch.allclose(on_cpu.outputs.logits, on_gpu.outputs.logits, atol=1e-2)  # TF32 convolutions


def test_a_large_jpeg_is_decoded_whole_because_draft_mode_changes_pixels(tmp_path: Path):
    from PIL import Image

    small = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    file = tmp_path / "large.jpg"
    Image.fromarray(small).resize((1280, 960), Image.Resampling.BICUBIC).save(file, quality=92)
    with Image.open(file) as image:
        whole = np.asarray(image.convert("RGB"))
    with Image.open(file) as image:
        image.draft("RGB", (256, 256))
        draft = image.convert("RGB")
    assert draft.size != (1280, 960)
    reduced = np.asarray(Image.fromarray(whole).resize((256, 192), Image.Resampling.BICUBIC)).astype(int)
    assert abs(np.asarray(draft.resize((256, 192), Image.Resampling.BICUBIC)).astype(int) - reduced).max() > 2
    assert np.array_equal(np.asarray(FolderImages(tmp_path).open(0)), whole)
