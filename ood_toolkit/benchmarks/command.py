"""From the user's choices to a finished run: everything is checked before the long part starts."""

import difflib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.crew import Crew, Follower
from ood_toolkit.benchmarks.digits import digits_classifier, digits_suite
from ood_toolkit.benchmarks.folders import Folders
from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.imagenet_suites import (
    canonical_name,
    default_suite,
    imagenet_suite,
    imagenet_suites,
    reference_lines,
    require_classes,
)
from ood_toolkit.benchmarks.loading import known_dtype, load_models, load_second_opinion, require_taps, usable_device
from ood_toolkit.benchmarks.masking import masks_of
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import Method, parse_calibrators, parse_detectors
from ood_toolkit.benchmarks.openood import near_far
from ood_toolkit.benchmarks.plan import Plan, make_plan, require_usable
from ood_toolkit.benchmarks.results import RunFolder, require_writable
from ood_toolkit.benchmarks.robustness import ROBUSTNESS_FILE, as_json, robustness
from ood_toolkit.benchmarks.runner import Runner, Settings
from ood_toolkit.benchmarks.suite import Part, Suite
from ood_toolkit.benchmarks.zero_shot import (
    clip_prompts,
    is_zero_shot,
    named_classes,
    require_zero_shot,
    said,
    uses_zero_shot,
)
from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.datasets import FolderImages
from ood_toolkit.datasets.locate import data_root
from ood_toolkit.distributed import ALONE, World, own_device
from ood_toolkit.extract import Extractor, Progress, silent
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.registry import build_calibrator, build_ensemble, ensemble_classes, split_specs
from ood_toolkit.store import replace_text

SUITES = ("digits", "folders", *imagenet_suites())
_DIGITS_MEMBERS = 3


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The user's choices, checked and looked up."""

    name: str
    hint: str
    methods: Sequence[Method]
    calibrators: Sequence[Calibrator]
    pools: Sequence[EnsemblePool]
    device: str
    extractor: Extractor
    suite: Suite
    models: Sequence[LoadedClassifier]
    members: Sequence[LoadedClassifier]
    second: LoadedClassifier | None


def run(
    choices: Choices,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
    world: World = ALONE,
) -> RunFolder:
    """Runs what was chosen and returns the folder with the results; the tables are the caller's to render.

    Args:
        choices: what to run.
        say: told what happens, line by line.
        progress: told how far a pass is.
        world: the ranks of the launch, of which this is rank 0; the others call `follow`.

    Raises:
        ValueError: in one line, whatever is wrong with the choices or the data.
    """
    plan = world.first(lambda: _planned(choices, progress, world))
    with Crew(world) as crew:
        return _run(choices, plan, crew, say)


def follow(choices: Choices, world: World) -> None:
    """Does this rank's share of what rank 0 runs; writes and prints nothing."""
    plan = world.first(lambda: _planned(choices, silent, world))
    models = (*plan.models, *plan.members, *([plan.second] if plan.second else []))
    Follower(plan.suite, models, plan.extractor, plan.device).serve()


def plan(choices: Choices, *, progress: Progress = silent) -> Plan:
    """What `run` would do, with an estimate of time and space. Writes nothing to the store or the run folder.

    Raises:
        ValueError: what `run` would say before its long part.
    """
    for folder, option in ((choices.cache, "--cache"), (choices.out, "--out")):
        require_usable(folder, option)
    with tempfile.TemporaryDirectory(prefix="ood-plan-") as scratch:
        texts = choices.cache / "texts"
        if texts.is_dir():
            shutil.copytree(texts, Path(scratch) / "texts")  # embeddings that are kept need not be computed again
        asked = replace(choices, cache=Path(scratch))
        looked_up = _planned(replace(asked, out=Path(scratch) / "run"), progress, ALONE)
        extractor = replace(looked_up.extractor, cache=choices.cache)
        settings = _settings(choices, replace(looked_up, extractor=extractor), Crew(), lambda text: None)
        return make_plan(looked_up.suite, settings, choices.cache, choices.out)


def _planned(choices: Choices, progress: Progress, world: World) -> _Plan:
    torch.manual_seed(choices.seed)  # weights that are drawn (--no-pretrained) are the same on all ranks, and next time
    name, hint = _suite_name(choices)
    require_zero_shot(choices)
    methods = [_absent(method, choices.absent_classes) for method in parse_detectors(choices.detectors)]
    tuning = _tuning(choices.tune_on, methods)
    calibrators = parse_calibrators(choices.calibrators)
    pools = _pools(choices.ensemble)
    device = own_device(world, usable_device(choices.device))
    extractor = Extractor(
        cache=choices.cache,
        batch_size=choices.batch_size,
        workers=_workers(choices.workers, device),
        dtype=known_dtype(choices.dtype, "--dtype"),
        strict=choices.strict,
        progress=progress,
        world=world,
    )
    require_writable(choices.cache, "--cache")
    if world.main:
        require_writable(choices.out, "--out")
    taps = tuple(sorted({tap for method in methods for tap in method.detector.taps}))
    make = {"digits": _digits, "folders": _folders}.get(name, _imagenet)
    suite, models, members = make(choices, name, device, taps)
    require_taps(methods, models, masks_of(suite))
    second = load_second_opinion(choices, suite.name, models, device)
    if tuning:
        suite = replace(suite, tuning=tuning)
    return _Plan(
        name=name,
        hint=hint,
        methods=methods,
        calibrators=calibrators,
        pools=pools,
        device=device,
        extractor=extractor,
        suite=suite,
        models=models,
        members=members,
        second=second,
    )


def _run(choices: Choices, plan: _Plan, crew: Crew, say: Callable[[str], None]) -> RunFolder:
    folder = RunFolder(choices.out, _facts(choices, plan))
    settings = _settings(choices, plan, crew, say)
    if plan.hint:
        say(plan.hint)
    if drawn := _drawn(choices):
        say(f"--no-pretrained: the weights of {', '.join(drawn)} are drawn at random, none are published ones")
    with folder.stage("total"):
        Runner(plan.suite, settings, folder).run()
    views = robustness(
        plan.suite,
        folder.scores,
        {model.spec: model.preprocessing for model in plan.models},
        ensembles={r.model: r.transform for r in folder.records if r.model.startswith("ensemble[")},
        level=0.95 if choices.resamples else None,
    )
    if views:
        replace_text(folder.path / ROBUSTNESS_FILE, as_json(views))
    if plan.name not in ("digits", "folders"):
        _compare(folder, plan.models, _drawn(choices), say)
    return folder


def _settings(choices: Choices, plan: _Plan, crew: Crew, say: Callable[[str], None]) -> Settings:
    return Settings(
        models=plan.models,
        members=plan.members,
        second=plan.second,
        methods=plan.methods,
        calibrators=plan.calibrators,
        pools=plan.pools,
        named=_named(choices, plan),
        extractor=plan.extractor,
        bootstrap=Bootstrap(resamples=choices.resamples, seed=choices.seed),
        seed=choices.seed,
        device=plan.device,
        say=say,
        crew=crew,
    )


def _named(choices: Choices, plan: _Plan) -> frozenset[str]:
    """Specs of calibrators, and of pools that have something to pool, that did not come with "all"."""
    found = {build_calibrator(text).spec for text in split_specs(choices.calibrators) if text != "all"}
    if choices.ensemble != "all" and len(plan.models) + len(plan.members) > 1:
        found |= {pool.spec for pool in plan.pools}
    return frozenset(found)


def _identity(model: LoadedClassifier) -> dict[str, str]:
    told = {"told": model.told()} if model.texts else {}
    return {"weights": model.classifier.fingerprint(), "preprocessing": model.preprocessing, **told}


def _facts(choices: Choices, plan: _Plan) -> dict[str, Any]:
    """What run.json says of the run before it starts."""
    suite, models, members, methods = plan.suite, plan.models, plan.members, plan.methods
    return {
        "suite": suite.name,
        "protocol": suite.protocol,
        "caption": suite.caption,
        "notes": list(suite.notes),
        "choices": asdict(choices),
        "data_root": str(data_root(choices.data_root) or ""),
        "device": plan.device,
        "ranks": plan.extractor.world.size,
        "parts": {part.name: part.description for part in suite.parts},
        "models": {model.spec: _identity(model) for model in (*models, *members)},
        "tasks": [
            {"kind": task.kind, "dataset": task.dataset, "id": task.id.name, "ood": task.ood.name if task.ood else ""}
            for task in suite.tasks
        ],
        "class_names": list(models[0].class_names or (suite.views.names if suite.views else ())),
        "masks": {task.mask.description: task.mask.classes.tolist() for task in suite.tasks if task.mask},
        "papers": {
            method.spec: method.paper
            for method in (*(m.detector for m in methods), *plan.calibrators, *plan.pools)
            if method.paper
        },
        **({"zero_shot": said(clip_prompts(choices))} if uses_zero_shot(choices) else {}),
        **({"second_opinion": {"spec": plan.second.spec, **_identity(plan.second)}} if plan.second else {}),
        "detectors": {method.spec: repr(method.detector) for method in methods},
        "calibrators": {calibrator.spec: repr(calibrator) for calibrator in plan.calibrators},
    }


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


def _drawn(choices: Choices) -> list[str]:
    """Models whose published weights were not asked for, nor any others given."""
    if choices.pretrained or choices.checkpoints:
        return []
    known = ("timm:", "torchvision:", "transformers:", "open_clip:")
    return [spec for spec in (*choices.models, *choices.members) if spec.startswith(known)]


def _compare(
    folder: RunFolder, models: Sequence[LoadedClassifier], drawn: Sequence[str], say: Callable[[str], None]
) -> None:
    """Says what others report of the same weights, and adds the means over sets that OpenOOD prints."""
    folder.add(near_far(folder.records))
    sizes = {model.spec: model.input_size[1] for model in models}
    lines, warnings = reference_lines((r for r in folder.records if r.model not in drawn), sizes)
    folder.facts["references"] = lines
    for line in (*lines, *(f"warning: {warning}" for warning in warnings)):
        say(line)


Loaded = tuple[Suite, list[LoadedClassifier], list[LoadedClassifier]]
"""The suite, the models that are scored, and those that only join the ensemble."""


def _digits(choices: Choices, name: str, device: str, taps: Sequence[str]) -> Loaded:
    brought = choices.models, choices.members, choices.checkpoints, choices.snapshots, choices.second_opinion
    if any((*brought, choices.folders, choices.ood)):
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
        hint = "; zero-shot models take theirs from --class-names FILE" if uses_zero_shot(choices) else ""
        raise ValueError(f"the models must know the same classes, but have {classes}{hint}")
    names = models[0].class_names or named_classes(choices.class_names) or None
    try:
        suite = folders.suite(classes[models[0].spec], names)
    except ValueError as error:
        if choices.class_names or not any(map(is_zero_shot, choices.models)):
            raise
        raise ValueError(f"{error}; other classes than ImageNet's are named with --class-names FILE") from error
    return suite, models, members


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
    models, members = load_models(choices, name, device, taps, masks_of(suite))
    for model in (*models, *members):
        require_classes(suite.name, model.spec, model.classifier.head.weight.shape[0])
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
