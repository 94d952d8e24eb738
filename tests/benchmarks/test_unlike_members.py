"""Members of an ensemble that see images of different sizes through transforms of their own."""

from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import parse_calibrators, parse_detectors
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.runner import Runner, Settings
from ood_toolkit.benchmarks.suite import Part, Suite, Task
from ood_toolkit.datasets import ArrayImages
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier, LoadedClassifier
from ood_toolkit.models.transforms import ImageTransform
from ood_toolkit.registry import build_ensemble
from ood_toolkit.scorefile import Column

ROWS = 24
PIXELS = torch.randint(256, (ROWS, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def small(image: Image) -> Tensor:
    return pil_to_tensor(image.crop((4, 4, 12, 12)))


def large(image: Image) -> Tensor:
    return pil_to_tensor(image).flip(2)


def fixed_size(side: int, seed: int) -> nn.Sequential:
    """A network that reads only images of one size."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * side**2, 10), nn.ReLU(), nn.Linear(10, 4)).eval()
    with torch.no_grad():
        model[3].weight.mul_(10)  # pyright: ignore
    model.pretrained_cfg = {"input_size": (3, side, side)}  # pyright: ignore
    return model


def test_members_of_unlike_sizes_and_transforms_are_pooled_row_by_row(tmp_path: Path):
    images = ArrayImages(PIXELS.numpy(), name="noise", labels=(np.arange(ROWS) % 4).tolist())
    part = Part("id", images)
    suite = Suite("noise", "", [Task("misclassification", "id", part), Task("calibration", "id", part)])
    members = [(small, fixed_size(8, 0), 8, (0.5,) * 3), (large, fixed_size(16, 1), 16, (0.2,) * 3)]
    loaded = [
        LoadedClassifier(
            Classifier(network, mean=mean, std=(0.3,) * 3),
            f"size {side}",
            ImageTransform(pixels, f"{side} pixels", mean, (0.3,) * 3, (3, side, side)),
            None,
        )
        for pixels, network, side, mean in members
    ]
    settings = Settings(
        models=loaded,
        methods=parse_detectors("msp"),
        calibrators=parse_calibrators("none"),
        pools=[build_ensemble("mean_probability")],
        extractor=Extractor(tmp_path / "cache"),
        bootstrap=Bootstrap(resamples=0),
    )
    run = RunFolder(tmp_path / "run", {})
    Runner(suite, settings, run).run()
    softmaxes = []
    for pixels, network, _, mean in members:
        inputs = torch.stack([pixels(fromarray(one.numpy())) for one in PIXELS]).float() / 255
        with torch.no_grad():
            softmaxes.append(network((inputs - torch.tensor(mean)[:, None, None]) / 0.3).softmax(1))
    pooled = torch.stack(softmaxes).mean(0)
    name = "ensemble[size 8, size 16]"
    confidence = run.scores.columns[Column("confidence", name, "mean_probability", "id")]
    torch.testing.assert_close(confidence.float(), pooled.amax(1), atol=1e-5, rtol=0)
    (score,) = [v for c, v in run.scores.columns.items() if c.kind == "score" and name in c.model]
    torch.testing.assert_close(score.float(), 1 - pooled.amax(1), atol=1e-5, rtol=0)
    assert float((softmaxes[0].amax(1) - softmaxes[1].amax(1)).abs().max()) > 0.1
    (transform,) = {record.transform for record in run.records if name in record.model}
    assert "8 pixels" in transform
    assert "16 pixels" in transform
