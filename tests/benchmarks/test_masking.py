"""A class mask is the model that never had the other classes: head, logits, taps and gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.benchmarks.masking import masked, tap_under, taps_under
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import parse_calibrators, parse_detectors
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.runner import Runner, Settings
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite, Task
from ood_toolkit.datasets import ArrayImages
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier, LoadedClassifier
from ood_toolkit.models.transforms import ImageTransform
from ood_toolkit.outputs import UNKNOWN, Outputs
from ood_toolkit.registry import build_ensemble

KEPT = torch.tensor([4, 1, 3])
MASK = ClassMask("three", KEPT)
ROWS = 90


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 6))
    with torch.no_grad():  # classes outside the mask must win, or it would not matter
        model[9].weight.mul_(30)  # pyright: ignore
        model[9].bias.copy_(torch.tensor([3.0, 0.0, 3.0, 0.0, 0.0, 3.0]))  # pyright: ignore
    return model


def cut() -> nn.Sequential:
    """The same network, trained with three classes one might say."""
    model = network()
    whole, model[9] = model[9], nn.Linear(12, 3)
    with torch.no_grad():
        model[9].weight.copy_(whole.weight[KEPT])  # pyright: ignore
        model[9].bias.copy_(whole.bias[KEPT])  # pyright: ignore
    return model


def scores(model: nn.Module, labels: Tensor, mask: ClassMask | None, folder: Path) -> dict[str, Tensor]:
    """Of every detector on the last third of the images, by its spec; of the pooled passes likewise."""
    taps = taps_under(sorted({t for m in METHODS for t in m.detector.taps}), [mask])
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (ROWS, 12, 12, 3), dtype=torch.uint8, generator=generator)
    images = ArrayImages(pixels.numpy(), name="noise", labels=labels.tolist())
    fit, calibration, test = (
        Part(name, images, torch.arange(start, start + 30)) for name, start in (("fit", 0), ("cal", 30), ("id", 60))
    )
    tasks = [Task("misclassification", "id", test, None, mask), Task("calibration", "id", test, None, mask)]
    suite = Suite("noise", "", tasks, fit, calibration)
    transform = ImageTransform(_pixels, "as they are", (0.0,) * 3, (1.0,) * 3, (3, 12, 12))
    loaded = LoadedClassifier(Classifier(model.eval(), taps=taps), "network", transform, None)
    settings = Settings(
        models=[loaded],
        methods=METHODS,
        calibrators=parse_calibrators("none"),
        pools=[build_ensemble("mean_probability")],
        extractor=Extractor(folder / "cache"),
        bootstrap=Bootstrap(resamples=0, seed=0),
    )
    run = RunFolder(folder / "run", {})
    Runner(suite, settings, run).run()
    kinds = ("score", "confidence")
    return {f"{c.kind} {c.method}": values for c, values in run.scores.columns.items() if c.kind in kinds}


def _pixels(image: object) -> Tensor:
    from torchvision.transforms.functional import pil_to_tensor

    return pil_to_tensor(image)  # pyright: ignore[reportArgumentType]


METHODS = parse_detectors("all")


@pytest.mark.slow
def test_every_method_under_a_mask_scores_like_a_model_of_these_classes_alone(tmp_path: Path):
    labels = torch.arange(ROWS) % 6
    position = torch.full((6,), UNKNOWN)
    position[KEPT] = torch.arange(3)
    under = scores(network(), labels, MASK, tmp_path / "masked")
    alone = scores(cut(), position[labels], None, tmp_path / "cut")
    assert under.keys() == alone.keys()
    assert {"score mc_dropout", "score tta", "score adascale_a", "score odin"} <= under.keys()
    assert {"confidence mean_probability[dropout_logits]"} <= under.keys()
    for name, expected in alone.items():
        torch.testing.assert_close(
            under[name], expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_tap_that_looks_at_all_classes_never_reaches_a_mask():
    outputs = Outputs.from_logits(torch.randn(5, 6)).with_taps(
        {
            "local_mcm": torch.zeros(5),
            "local_mcm(tokens='output', classes=(4, 1, 3))": torch.ones(5),
            "negative_cosines(classes=(0, 1))": torch.ones(5, 2),
            "stage_means": torch.ones(5, 2),
            "dropout_logits(samples=2)": torch.arange(60.0).view(5, 2, 6),
        }
    )
    seen = masked(outputs, MASK).taps
    assert set(seen) == {"local_mcm(tokens='output')", "stage_means", "dropout_logits(samples=2)"}
    assert seen["dropout_logits(samples=2)"][0, 1].tolist() == [10.0, 7.0, 9.0]
    assert masked(outputs, None) is outputs


def test_a_mask_asks_the_model_for_taps_of_its_classes():
    assert tap_under("local_mcm(temperature=0.5)", MASK) == "local_mcm(temperature=0.5, classes=(4, 1, 3))"
    assert taps_under(["local_mcm", "stage_gram"], [None, MASK]) == (
        "local_mcm",
        "local_mcm(classes=(4, 1, 3))",
        "stage_gram",
    )


def test_features_are_nudged_along_the_predicted_class_of_the_mask():
    images = torch.rand(20, 3, 12, 12)
    tap = tap_under("nudged_features(pixels=0.5, epsilon=0.5)", MASK)
    under = Classifier(network().eval(), taps=(tap,))(images).taps[tap]
    plain = "nudged_features(pixels=0.5, epsilon=0.5)"
    alone = Classifier(cut().eval(), taps=(plain,))(images).taps[plain]
    every = Classifier(network().eval(), taps=(plain,))(images).taps[plain]
    torch.testing.assert_close(under, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(under, every, rtol=1e-2)
