"""From the user's choices to a finished run: everything is checked before the long part starts."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.digits import digits_classifier, digits_suite
from ood_toolkit.benchmarks.folders import Folders
from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.imagenet_suites import (
    OPENOOD,
    canonical_name,
    default_suite,
    imagenet_suite,
    imagenet_suites,
    reference_lines,
    require_imagenet_classes,
)
from ood_toolkit.benchmarks.loading import known_dtype, load_models, usable_device
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import Method, parse_calibrators, parse_detectors
from ood_toolkit.benchmarks.openood import near_far
from ood_toolkit.benchmarks.results import RunFolder, require_writable
from ood_toolkit.benchmarks.robustness import ROBUSTNESS_FILE, as_json, robustness
from ood_toolkit.benchmarks.runner import Runner, Settings
from ood_toolkit.benchmarks.suite import Part, Suite
from ood_toolkit.calibrators import EnsemblePool
from ood_toolkit.datasets import FolderImages
from ood_toolkit.datasets.locate import data_root
from ood_toolkit.extract import Extractor, Progress, silent
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.registry import build_ensemble, ensemble_classes, split_specs
from ood_toolkit.store import replace_text

SUITES = ("digits", "folders", *imagenet_suites())
_DIGITS_MEMBERS = 3


def run(choices: Choices, *, say: Callable[[str], None] = lambda text: None, progress: Progress = silent) -> RunFolder:
    """Runs what was chosen and returns the folder with the results; the tables are the caller's to render.

    Raises:
        ValueError: in one line, whatever is wrong with the choices or the data.
    """
    name, hint = _suite_name(choices)
    methods = [_absent(method, choices.absent_classes) for method in parse_detectors(choices.detectors)]
    tuning = _tuning(choices.tune_on, methods)
    calibrators = parse_calibrators(choices.calibrators)
    pools = _pools(choices.ensemble)
    device = usable_device(choices.device)
    extractor = Extractor(
        cache=choices.cache,
        batch_size=choices.batch_size,
        workers=_workers(choices.workers, device),
        dtype=known_dtype(choices.dtype, "--dtype"),
        strict=choices.strict,
        progress=progress,
    )
    require_writable(choices.cache, "--cache")
    require_writable(choices.out, "--out")
    taps = tuple(sorted({tap for method in methods for tap in method.detector.taps}))
    make = {"digits": _digits, "folders": _folders}.get(name, _imagenet)
    suite, models, members = make(choices, name, device, taps)
    if tuning:
        suite = replace(suite, tuning=tuning)
    facts = {
        "suite": suite.name,
        "protocol": suite.protocol,
        "caption": suite.caption,
        "notes": list(suite.notes),
        "choices": asdict(choices),
        "device": device,
        "parts": {part.name: part.description for part in suite.parts},
        "models": {
            model.spec: {"weights": model.classifier.fingerprint(), "preprocessing": model.preprocessing}
            for model in (*models, *members)
        },
        "tasks": [
            {"kind": task.kind, "dataset": task.dataset, "id": task.id.name, "ood": task.ood.name if task.ood else ""}
            for task in suite.tasks
        ],
        "class_names": list(models[0].class_names or (suite.views.names if suite.views else ())),
        "masks": {task.mask.description: task.mask.classes.tolist() for task in suite.tasks if task.mask},
        "papers": {
            method.spec: method.paper
            for method in (*(m.detector for m in methods), *calibrators, *pools)
            if method.paper
        },
        "detectors": {method.spec: repr(method.detector) for method in methods},
        "calibrators": {calibrator.spec: repr(calibrator) for calibrator in calibrators},
    }
    folder = RunFolder(choices.out, facts)
    settings = Settings(
        models=models,
        members=members,
        methods=methods,
        calibrators=calibrators,
        pools=pools,
        extractor=extractor,
        bootstrap=Bootstrap(resamples=choices.resamples, seed=choices.seed),
        seed=choices.seed,
        device=device,
        say=say,
    )
    if hint:
        say(hint)
    with folder.stage("total"):
        Runner(suite, settings, folder).run()
    views = robustness(suite, folder.scores, [m.spec for m in models], level=0.95 if choices.resamples else None)
    if views:
        replace_text(folder.path / ROBUSTNESS_FILE, as_json(views))
    if name not in ("digits", "folders"):
        _compare(folder, models, say)
    return folder


def _suite_name(choices: Choices) -> tuple[str, str]:
    """The suite's name, and a line to say about it, or ""."""
    if choices.suite in ("digits", "folders"):
        return choices.suite, ""
    if choices.suite:
        if choices.suite.lower() not in SUITES and difflib.get_close_matches(choices.suite, SUITES[:2], n=1):
            close = difflib.get_close_matches(choices.suite, SUITES[:2], n=1)[0]
            raise ValueError(f"no suite is named {choices.suite!r}; did you mean {close!r}? Known: {', '.join(SUITES)}")
        return canonical_name(choices.suite), ""
    if choices.folders:
        return "folders", ""
    name, hint = default_suite(data_root(choices.data_root))
    if name == "digits" and choices.models:
        raise ValueError("--model needs images to score: --id DIR with yours, or ImageNet sets under --data-root DIR")
    return name, hint


def _compare(folder: RunFolder, models: Sequence[LoadedClassifier], say: Callable[[str], None]) -> None:
    """Says what others report of the same models, and adds the means that OpenOOD prints."""
    if folder.facts["suite"] == OPENOOD:
        folder.add(near_far(folder.records))
    sizes = {model.spec: model.input_size[1] for model in models}
    lines, warnings = reference_lines(folder.records, sizes)
    folder.facts["references"] = lines
    for line in (*lines, *(f"warning: {warning}" for warning in warnings)):
        say(line)


Loaded = tuple[Suite, list[LoadedClassifier], list[LoadedClassifier]]
"""The suite, the models that are scored, and those that only join the ensemble."""


def _digits(choices: Choices, name: str, device: str, taps: Sequence[str]) -> Loaded:
    if choices.models or choices.members or choices.checkpoints or choices.folders or choices.ood:
        raise ValueError("the digits suite brings its own images and networks; for yours, use --suite folders")
    count = _DIGITS_MEMBERS if _pools(choices.ensemble) else 1
    networks = [digits_classifier(choices.seed + number, taps if number == 0 else ()) for number in range(count)]
    for network in networks:
        network.classifier.to(device)
    return digits_suite(), networks[:1], networks[1:]


def _folders(choices: Choices, name: str, device: str, taps: Sequence[str]) -> Loaded:
    if "id" not in choices.folders:
        raise ValueError("the folders suite needs --id DIR with in-distribution images")
    folders = Folders(
        id=choices.folders["id"],
        ood=_named_folders(choices.ood),
        fit=choices.folders.get("fit"),
        calibrate=choices.folders.get("calibrate"),
        labels=choices.folders.get("labels"),
        fit_fraction=choices.fit_fraction,
        calibrate_fraction=choices.calibrate_fraction,
        seed=choices.seed,
    )
    folders.require()
    models, members = load_models(choices, name, device, taps)
    classes = {model.spec: model.classifier.head.weight.shape[0] for model in (*models, *members)}
    if len(set(classes.values())) > 1:
        raise ValueError(f"the models must know the same classes, but have {classes}")
    return folders.suite(classes[models[0].spec], models[0].class_names), models, members


def _imagenet(choices: Choices, name: str, device: str, taps: Sequence[str]) -> Loaded:
    if choices.folders or choices.ood:
        raise ValueError(
            f"the suite {name!r} brings its own images; --id, --ood and the like belong to --suite folders"
        )
    learning = Learning(
        source=choices.learn,  # pyright: ignore[reportArgumentType]  # checked there
        per_class=choices.fit_per_class,
        seed=choices.seed,
    )
    root = data_root(choices.data_root)
    suite = imagenet_suite(name, root, protocol=choices.protocol, learning=learning)  # pyright: ignore
    models, members = load_models(choices, name, device, taps)
    for model in (*models, *members):
        require_imagenet_classes(model.spec, model.classifier.head.weight.shape[0])
    return suite, models, members


def _named_folders(texts: Sequence[str], option: str = "--ood") -> dict[str, Path]:
    named = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"cannot read {option} {text!r}; write NAME=DIR")
        if name in named:
            raise ValueError(f"{option} names {name!r} twice")
        named[name] = Path(path)
    return named


def _tuning(text: str, methods: Sequence[Method]) -> Part | None:
    """The OOD set on which hyper-parameters are chosen, or None where nothing asks for one."""
    wanted = [method.spec for method in methods if method.tuned]
    if not text and not wanted:
        return None
    if not text:
        raise ValueError(f"{wanted[0]} needs --tune-on NAME=DIR: out-of-distribution images that are not scored")
    if not wanted:
        raise ValueError(f"--tune-on {text} has nothing to tune; write tuned+NAME or tuned+all among the --detectors")
    ((name, folder),) = _named_folders([text], "--tune-on").items()
    return Part(name, FolderImages(folder, name=name), None, "for the choice of hyper-parameters, never scored")


def _absent(method: Method, absent: str) -> Method:
    """The method with the user's rule for classes that have no training row, where it has such a rule."""
    if absent not in ("error", "skip"):
        raise ValueError(f"--absent-classes must be error or skip, got {absent!r}")
    parameters = method.detector.hyperparameters
    if absent == "error" or parameters.get("absent") != "error":
        return method
    return replace(method, detector=type(method.detector)(**{**parameters, "absent": absent}))


def _pools(text: str) -> list[EnsemblePool]:
    if text == "none":
        return []
    names = list(ensemble_classes()) if text == "all" else split_specs(text)
    return [build_ensemble(name) for name in names]


def _workers(count: int, device: str) -> int:
    if count >= 0:
        return count
    cores = torch.get_num_threads()
    return min(16, 2 * cores) if device.startswith("cuda") else min(4, cores // 2)
