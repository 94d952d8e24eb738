import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ood_toolkit import store as store_module
from ood_toolkit.datasets import ArrayImages, FolderImages
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_ROWS", 8)


class Counting(nn.Module):
    """A small network that counts the images it sees, and may stop after some."""

    def __init__(self, stop_after: int | None = None, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.seen = 0
        self.stop_after = stop_after

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        if self.stop_after is not None and self.seen > self.stop_after:
            raise KeyboardInterrupt
        return self.head(self.body(images).relu().mean(dim=(2, 3)))


def pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def images(count: int = 21, seed: int = 0) -> ArrayImages:
    noise = np.random.default_rng(seed).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    return ArrayImages(noise, name="noise", labels=[row % 4 for row in range(count)])


def checked(model: nn.Module) -> Classifier:
    """The classifier after its own probing, so that only extraction counts from here on."""
    classifier = Classifier(model)
    classifier.check(torch.zeros(2, 3, 6, 6))
    if isinstance(model, Counting):
        model.seen = 0
    return classifier


def run(extractor: Extractor, model: nn.Module, data: Any, live: Sequence[LiveDetector] = ()):
    return extractor.extract(checked(model), pixels, "as they are", data, live)


def test_the_store_holds_what_the_model_gives_row_by_row(tmp_path: Path):
    model, data = Counting(), images()
    done = run(Extractor(tmp_path, batch_size=5), model, data)
    for row in range(len(data)):
        features = model.body(pixels(data.open(row))[None].float() / 255).relu().mean(dim=(2, 3))
        assert torch.allclose(done.outputs.features[row], features[0], atol=1e-6)
        assert torch.allclose(done.outputs.logits[row], model.head(features)[0], atol=1e-5)
    assert torch.equal(done.outputs.labels, data.labels)


def test_a_second_run_runs_no_forward_pass(tmp_path: Path):
    first = run(Extractor(tmp_path, batch_size=5), Counting(), images())
    model = Counting()
    second = run(Extractor(tmp_path, batch_size=3), model, images())
    assert (first.computed, second.computed, model.seen) == (21, 0, 0)
    assert torch.equal(first.outputs.logits, second.outputs.logits)


def test_other_weights_images_or_precision_are_another_store(tmp_path: Path):
    extractor = Extractor(tmp_path)
    assert run(extractor, Counting(), images()).computed == 21
    assert run(extractor, Counting(seed=1), images()).computed == 21
    assert run(extractor, Counting(), images(seed=1)).computed == 21
    assert run(Extractor(tmp_path, dtype=torch.float16), Counting(), images()).computed == 21
    assert extractor.extract(checked(Counting()), pixels, "another transform", images()).computed == 21


def test_a_run_that_was_cut_off_resumes_at_the_last_whole_shard_with_identical_rows(tmp_path: Path):
    whole = run(Extractor(tmp_path / "whole", batch_size=4), Counting(), images())
    extractor = Extractor(tmp_path / "cut", batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        run(extractor, Counting(stop_after=17), images())
    again = run(extractor, Counting(), images())
    assert again.computed == 21 - 16
    assert torch.equal(again.outputs.logits, whole.outputs.logits)
    assert torch.equal(again.outputs.features, whole.outputs.features)


def test_a_cut_off_run_does_not_trust_a_damaged_shard(tmp_path: Path):
    extractor = Extractor(tmp_path, batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        run(extractor, Counting(stop_after=17), images())
    (file,) = tmp_path.glob("*/logits.bin")
    with file.open("r+b") as handle:
        handle.write(b"\xff\xff")
    again = run(extractor, Counting(), images())
    assert again.computed == 21 - 8
    assert torch.equal(
        again.outputs.logits, run(Extractor(tmp_path / "o", batch_size=4), Counting(), images()).outputs.logits
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_batch_size_do_not_change_a_row(tmp_path: Path, workers: int):
    base = run(Extractor(tmp_path / "a", batch_size=21), Counting(), images())
    other = run(Extractor(tmp_path / "b", batch_size=2, workers=workers), Counting(), images())
    assert torch.allclose(base.outputs.logits, other.outputs.logits, atol=1e-6)


class Brightness(LiveDetector):
    name = "brightness"

    def score(self, classifier: Any, images: Tensor) -> Tensor:
        return images.mean(dim=(1, 2, 3)).double()


def test_live_scores_share_the_pass_and_are_kept(tmp_path: Path):
    data, model = images(), Counting()
    done = run(Extractor(tmp_path, batch_size=5), model, data, [Brightness()])
    expected = [float((pixels(data.open(row)).float() / 255).mean()) for row in range(len(data))]
    assert done.live["brightness"].tolist() == pytest.approx(expected, abs=1e-6)
    assert model.seen == len(data)
    again = run(Extractor(tmp_path), Counting(), data, [Brightness()])
    assert again.computed == 0
    assert torch.equal(again.live["brightness"], done.live["brightness"])


def test_a_live_detector_that_comes_later_runs_alone(tmp_path: Path):
    run(Extractor(tmp_path), Counting(), images())
    model = Counting()
    later = run(Extractor(tmp_path), model, images(), [Brightness()])
    assert (later.computed, model.seen) == (21, 0)


def test_other_taps_are_computed_alone_and_those_there_are_kept(tmp_path: Path):
    extractor, data = Extractor(tmp_path, batch_size=5), images()

    def tapped(*taps: str):
        return extractor.extract(Classifier(Counting(), taps=taps, head="head"), pixels, "t", data)

    plain = tapped()
    both = tapped("stage_means(layers=('body',))", "member_logits")
    assert both.computed == 21
    assert torch.equal(both.outputs.logits, plain.outputs.logits)
    means = both.outputs.taps["stage_means(layers=('body',))"]
    expected = torch.stack(
        [Counting().body(pixels(data.open(r))[None].float() / 255).mean(dim=(2, 3))[0] for r in range(21)]
    )
    assert torch.allclose(means, expected, atol=1e-5)
    assert set(both.gaps) == {"member_logits"}
    again = tapped("stage_means(layers=('body',))", "member_logits")
    assert (again.computed, set(again.gaps)) == (0, {"member_logits"})
    assert tapped().computed == 0


def test_live_detectors_do_not_pay_for_taps(tmp_path: Path):
    class Watching(LiveDetector):
        name = "watching"

        def score(self, classifier: Any, images: Tensor) -> Tensor:
            assert not classifier(images).taps
            return torch.zeros(len(images))

    model = Counting()
    classifier = Classifier(model, taps=("stage_means(layers=('body',))",), head="head")
    done = Extractor(tmp_path).extract(classifier, pixels, "t", images(), [Watching()])
    assert set(done.outputs.taps) == {"stage_means(layers=('body',))"}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(10):
        noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / f"{number}.jpg")
    data = (root / "3.jpg").read_bytes()
    (root / "3.jpg").write_bytes(data[: len(data) // 2])
    (root / "7.jpg").write_bytes(b"this is no image")
    return root


def test_a_truncated_image_is_named_skipped_and_counted(broken: Path, tmp_path: Path):
    data = FolderImages(broken, labels={f"{n}.jpg": n % 4 for n in range(10)})
    done = run(Extractor(tmp_path / "cache", batch_size=4), Counting(), data)
    assert set(done.unreadable) == {"3.jpg", "7.jpg"}
    assert "truncated" in done.unreadable["3.jpg"]
    assert done.rows.tolist() == [0, 1, 2, 4, 5, 6, 8, 9]
    assert done.outputs.labels.tolist() == [row % 4 for row in done.rows.tolist()]
    alone = Counting()
    last = alone(pixels(data.open(9))[None].float() / 255)
    assert torch.allclose(done.outputs.logits[-1], last[0], atol=1e-5)
    again = run(Extractor(tmp_path / "cache"), Counting(), data)
    assert (again.computed, set(again.unreadable)) == (0, {"3.jpg", "7.jpg"})


def test_strict_makes_an_unreadable_image_an_error(broken: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"image '3.jpg' cannot be read: .*truncated"):
        run(Extractor(tmp_path / "cache", strict=True), Counting(), FolderImages(broken))


def test_a_set_without_a_readable_image_is_an_error(tmp_path: Path):
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(9):
        (root / f"{number}.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="none of the 9 images of 'photos' can be read"):
        run(Extractor(tmp_path / "cache"), Counting(), FolderImages(root))


def test_images_with_nan_logits_are_named(tmp_path: Path):
    model = Counting()
    data = images()
    dark = data.pixels.copy()
    dark[10] = 0

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.head = model.head

        def forward(self, x: Tensor) -> Tensor:
            features = self.inner.body(x).relu().mean(dim=(2, 3))
            return self.head(features / (x.amax(dim=(1, 2, 3)) > 0)[:, None].float() * 1.0)

    classifier = Classifier(Fragile())
    classifier.check(torch.rand(2, 3, 6, 6))
    with pytest.raises(ValueError, match=r"the model gives NaN .* for 1 images of 'dark', first \['dark/00010'\]"):
        Extractor(tmp_path).extract(classifier, pixels, "t", ArrayImages(dark, name="dark"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_stores_are_read_in_float32_batches(tmp_path: Path, dtype: torch.dtype, tolerance: float):
    full = run(Extractor(tmp_path), Counting(), images()).outputs
    half = run(Extractor(tmp_path, dtype=dtype), Counting(), images()).outputs
    assert half.features.dtype == dtype
    (batch,) = half.batches()
    assert batch.features.dtype == torch.float32
    assert torch.allclose(batch.features, full.features, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_killed_process_leaves_a_store_that_resumes(tmp_path: Path):
    import subprocess
    import sys
    import time

    script = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_extract as t
t.store_module.SHARD_ROWS = 8
place = Path({str(tmp_path)!r})
class Waiting(t.Counting):
    def forward(self, images):
        if list(place.glob("*/done/*.json")):
            time.sleep(600)
        return super().forward(images)
Waiting.__name__ = Waiting.__qualname__ = "Counting"
t.run(t.Extractor(place, batch_size=4), Waiting(), t.images(60))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    while process.poll() is None and not list(tmp_path.glob("*/done/*.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(tmp_path.glob("*/done/*.json"))) == 1
    again = run(Extractor(tmp_path, batch_size=4), Counting(), images(60))
    assert again.computed == 60 - 8
    fresh = run(Extractor(tmp_path / "fresh", batch_size=4), Counting(), images(60))
    assert torch.equal(again.outputs.logits, fresh.outputs.logits)
