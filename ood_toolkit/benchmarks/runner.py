"""Runs a suite: one forward pass per model and image, then every detector and calibrator on what it left behind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ood_toolkit.benchmarks.masking import masked, seen_through
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import MEMBER_TAP, PASS_TAPS, Method, scores_log_probabilities
from ood_toolkit.benchmarks.recording import Recorder, Row
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.robustness import keep_answers
from ood_toolkit.benchmarks.suite import ClassMask, Suite
from ood_toolkit.benchmarks.tuning import tune
from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.datasets import ImageSet
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.extract import Extracted, Extractor
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.outputs import UNKNOWN, Outputs

Parts = Mapping[str, Outputs]
Scores = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run on a suite.

    Args:
        models: scored one by one, in the order of the tables.
        members: further models that are only members of the ensemble.
        methods: detectors.
        calibrators: the plain softmax among them.
        pools: ways to pool models and members into an ensemble; detectors see the first one.
        extractor: how images go through the models.
        bootstrap: resamples, level and seed of the intervals.
        seed: of the run.
        device: where detectors compute.
        say: told what happens, line by line.
    """

    models: Sequence[LoadedClassifier]
    methods: Sequence[Method]
    calibrators: Sequence[Calibrator]
    extractor: Extractor
    bootstrap: Bootstrap
    members: Sequence[LoadedClassifier] = ()
    pools: Sequence[EnsemblePool] = ()
    seed: int = 0
    device: str = "cpu"
    say: Callable[[str], None] = lambda text: None


class Runner:
    """One run of one suite.

    Args:
        suite: what to score.
        settings: with what.
        folder: where the results go, as they come.
    """

    def __init__(self, suite: Suite, settings: Settings, folder: RunFolder) -> None:
        self.suite = suite
        self.settings = settings
        self.folder = folder
        self._gaps: dict[str, dict[str, str]] = {}
        self.recorder = Recorder(suite, folder, settings.bootstrap, settings.seed)

    def run(self) -> None:
        """Scores every model, then their ensembles.

        Raises:
            ValueError: a method that the user named cannot be run; what was computed before it is kept.
        """
        members = []
        for model in self.settings.models:
            parts, live = self._see(model)
            members.append(parts)
            keep_answers(self.folder.scores, self.suite, model.spec, parts)
            for mask in self._masks():
                view = _masked(parts, mask)
                self._calibrate(model, view, mask)
                self._detect(model, view, mask, live)
                self._pool_passes(model, view, mask)
        if self.settings.pools:
            members += [self._pass(model, ())[0] for model in self.settings.members]
        if len(members) > 1:
            for number, pool in enumerate(self.settings.pools):
                for mask in self._masks():
                    views = [_masked(parts, mask) for parts in members]
                    self._ensemble(pool, views, mask, with_detectors=number == 0)
        self.folder.save_scores()

    def _see(self, model: LoadedClassifier) -> tuple[Parts, dict[str, Scores | str]]:
        """Outputs of every part, and scores of live detectors by part, or why there are none.

        Live detectors that need no fitting share the one pass; the others need its outputs first.
        """
        live = [
            (method, method.detector, mask)
            for method in self.settings.methods
            for mask in self._masks()
            if isinstance(method.detector, LiveDetector)
        ]
        ready = [seen_through(detector, mask) for _, detector, mask in live if detector.needs == "nothing"]
        parts, scores = self._pass(model, ready)
        results: dict[str, Scores | str] = {**scores}
        fitted = []
        for method, detector, mask in live:
            if detector.needs != "nothing":
                fresh = detector.clone()
                problem = self._fit(fresh, _masked(parts, mask))
                if problem:
                    results[seen_through(detector, mask).spec] = self._refuse(method, problem)
                else:
                    fitted.append(seen_through(fresh, mask))
        if fitted:
            results |= self._pass(model, fitted)[1]
        return parts, results

    def _pass(self, model: LoadedClassifier, live: Sequence[LiveDetector]) -> tuple[Parts, dict[str, Scores]]:
        parts: dict[str, Outputs] = {}
        scores: dict[str, Scores] = {detector.spec: {} for detector in live}
        sets = {part.images.fingerprint: part.images for part in self.suite.parts}
        for fingerprint, images in sets.items():
            with self.folder.stage(f"extract {model.spec}"):
                done = self.settings.extractor.extract(
                    model.classifier, model.transform, model.preprocessing, images, live
                )
            self._report(model.spec, images, done)
            self._gaps.setdefault(model.spec, {}).update(done.gaps)
            position = torch.full((len(images),), -1, dtype=torch.int64)
            position[done.rows] = torch.arange(len(done.rows))
            for part in self.suite.parts:
                if part.images.fingerprint != fingerprint:
                    continue
                rows = part.indices[position[part.indices] >= 0]
                whole = part.rows is None or len(rows) == len(done.outputs)
                # a whole set stays memory-mapped
                seen = done.outputs if whole else done.outputs.rows(position[rows])
                parts[part.name] = seen.with_labels(part.images.labels[rows])
                self.folder.scores.ids.setdefault(part.name, [part.images.ids[int(row)] for row in rows])
                self.folder.scores.roots.setdefault(part.name, str(getattr(part.images, "root", "")))
                for spec, values in done.live.items():
                    scores[spec][part.name] = values[position[rows]]
        return parts, scores

    def _report(self, model: str, images: ImageSet, done: Extracted) -> None:
        if done.computed:
            rate = done.computed / max(done.seconds, 1e-9)
            text = f"{done.computed} images of {images.name} in {done.seconds:.1f} s ({rate:.0f} images/s)"
        else:
            text = f"{len(images)} images of {images.name} read from the store, no forward pass"
        self.settings.say(f"{model}: {text}")
        if done.unreadable:
            self.folder.facts["unreadable"][images.name] = dict(done.unreadable)
            name, why = next(iter(done.unreadable.items()))
            self.settings.say(f"skipped {len(done.unreadable)} unreadable images of {images.name}, first {name}: {why}")

    def _calibrate(self, model: LoadedClassifier, parts: Parts, mask: ClassMask | None) -> None:
        for calibrator in self.settings.calibrators:
            with self.folder.stage(f"calibrate {calibrator.name}"):
                problem = self._fit_calibrator(calibrator, parts)
                result: Scores | str = problem or {
                    name: calibrator.log_probabilities(outputs.logits) for name, outputs in self._scored(parts).items()
                }
                row = Row(model.spec, calibrator.spec, calibrator.family, model.preprocessing)
                self.recorder.calibrator(row, result, parts, mask)

    def _fit_calibrator(self, calibrator: Calibrator, parts: Parts) -> str:
        """Why the calibrator cannot be fitted, or ""."""
        if calibrator.name == "none":
            return ""
        if self.suite.calibration is None:
            return "needs calibration data; give --calibrate or --calibrate-fraction"
        train = parts[self.suite.calibration.name]
        known = train.labels != UNKNOWN
        try:
            calibrator.fit(train.logits[known], train.labels[known])
        except ValueError as error:
            self.settings.say(f"{calibrator.spec} left out: {error}")
            return str(error)
        return ""

    def _detect(
        self, model: LoadedClassifier, parts: Parts, mask: ClassMask | None, live: Mapping[str, Scores | str]
    ) -> None:
        available = frozenset(next(iter(parts.values())).taps)
        for method in self.settings.methods:
            gaps = [f"{tap} ({self._gaps[model.spec].get(tap, 'not given')})" for tap in method.detector.taps]
            missing = ", ".join(
                gap for tap, gap in zip(method.detector.taps, gaps, strict=True) if tap not in available
            )
            if missing and not method.chosen and not isinstance(method.detector, LiveDetector):
                self.folder.facts["left_out"].setdefault(model.spec, {})[method.spec] = f"needs the tap {missing}"
                continue
            with self.folder.stage(f"detect {method.spec}"):
                if isinstance(method.detector, LiveDetector):
                    result = live[seen_through(method.detector, mask).spec]
                elif missing:
                    result = self._refuse(method, f"needs the tap {missing} of {model.spec}")
                else:
                    result = self._scores(method, method.detector, parts, _place(model.spec, mask))
                scored = result if isinstance(result, str) else {name: result[name] for name in self._scored(parts)}
                calibrator = method.calibrator.spec if method.calibrator else ""
                family = method.detector.family
                tuned_on = self._tuned_on(method)
                row = Row(model.spec, method.spec, family, model.preprocessing, calibrator, tuned_on)
                self.recorder.detector(row, scored, parts, mask)

    def _tuned_on(self, method: Method) -> str:
        return self.suite.tuning.name if method.tuned and self.suite.tuning else ""

    def _scores(self, method: Method, detector: Detector, parts: Parts, place: str) -> Scores | str:
        """Scores of every scored part, or why there are none. `place` says whose they are, for run.json."""
        if method.calibrator is not None:
            calibrator = method.calibrator
            problem = self._fit_calibrator(calibrator, parts)
            if problem:
                return self._refuse(method, problem)
            parts = {n: Outputs.from_logits(calibrator.log_probabilities(o.logits), o.labels) for n, o in parts.items()}
        if method.tuned:
            found = self._tune(method, detector, parts, place)
            if isinstance(found, str):
                return self._refuse(method, found)
            detector = found
        else:
            problem = self._fit(detector, parts)
            if problem:
                return self._refuse(method, problem)
        with torch.no_grad():
            scores = {n: detector(outputs.to(self.settings.device)).cpu() for n, outputs in self._scored(parts).items()}
        bad = sum(int((~values.isfinite()).sum()) for values in scores.values())
        return self._refuse(method, f"{bad} of its scores are NaN or infinite") if bad else scores

    def _tune(self, method: Method, detector: Detector, parts: Parts, place: str) -> Detector | str:
        """The fitted detector with the hyper-parameters that the tuning set chose, or why there is none."""
        train = self._training(detector, parts)
        if isinstance(train, str):
            return train
        if self.suite.calibration is None or self.suite.tuning is None:
            return "tuning needs calibration data as its in-distribution side; see --calibrate"
        known, unknown = (
            parts[part.name].to(self.settings.device) for part in (self.suite.calibration, self.suite.tuning)
        )
        try:
            best, trials = tune(detector, train, known, unknown)
        except ValueError as error:
            return str(error)
        found = self.folder.facts.setdefault("tuned", {}).setdefault(place, {})
        found[method.spec] = {"chosen": repr(best), "trials": [asdict(trial) for trial in trials]}
        return best

    def _fit(self, detector: Detector | LiveDetector, parts: Parts) -> str:
        """Why the detector cannot be fitted, or ""."""
        train = self._training(detector, parts)
        if isinstance(train, str):
            return train
        try:
            with torch.no_grad():
                detector.fit(train)
        except ValueError as error:
            return str(error)
        return ""

    def _training(self, detector: Detector | LiveDetector, parts: Parts) -> Outputs | str:
        """What the detector is fitted on, or why there is nothing."""
        learned = self.suite.calibration if detector.held_out else self.suite.fit
        if learned is not None:
            train = parts[learned.name]
            known = train.labels != UNKNOWN
            train = train if bool(known.all()) else train.rows(known)
        elif detector.needs == "train":
            return f"needs {'calibration' if detector.held_out else 'fit'} data; see --fit and --calibrate"
        else:
            train = next(iter(parts.values())).rows(slice(0, 0))
        return train.to(self.settings.device)

    def _refuse(self, method: Method, reason: str) -> str:
        """An error where the user asked for this detector by name; a row without numbers where it came with "all"."""
        if method.chosen:
            raise ValueError(f"{method.spec}: {reason}")
        self.settings.say(f"{method.spec} left out: {reason}")
        return reason

    def _pool_passes(self, model: LoadedClassifier, parts: Parts, mask: ClassMask | None) -> None:
        """The ensemble of one model's own further passes: MC dropout, and test-time augmentation."""
        if not self.settings.pools or mask is not None:
            return  # further passes are kept with all classes
        pool = self.settings.pools[0]
        for tap in next(iter(parts.values())).taps:
            if not tap.startswith(PASS_TAPS):
                continue
            with self.folder.stage(f"ensemble {tap}"):
                members = {name: outputs.taps[tap].transpose(0, 1) for name, outputs in parts.items()}
                row = Row(model.spec, f"{pool.spec}[{tap}]", pool.family, model.preprocessing)
                try:
                    self._fit_pool(pool, parts, members)
                    result: Scores | str = {name: pool(members[name]) for name in self._scored(parts)}
                except ValueError as error:
                    result = str(error)
                self.recorder.calibrator(row, result, parts, mask)

    def _fit_pool(self, pool: EnsemblePool, parts: Parts, members: Mapping[str, Tensor]) -> None:
        if self.suite.calibration is not None:
            name = self.suite.calibration.name
            known = parts[name].labels != UNKNOWN
            pool.fit(members[name][:, known], parts[name].labels[known])

    def _ensemble(
        self, pool: EnsemblePool, members: Sequence[Parts], mask: ClassMask | None, *, with_detectors: bool
    ) -> None:
        models = [*self.settings.models, *self.settings.members]
        name = f"ensemble[{', '.join(model.spec for model in models)}]"
        transform = "; ".join(dict.fromkeys(model.preprocessing for model in models))
        row = Row(name, pool.spec, pool.family, transform)
        with self.folder.stage(f"ensemble {pool.name}"):
            try:
                parts = self._pooled(pool, members)
            except ValueError as error:
                self.settings.say(f"{pool.spec} left out: {error}")
                self.recorder.calibrator(row, str(error), members[0], mask)
                return
            result: Scores | str = {n: outputs.logits for n, outputs in self._scored(parts).items()}
            self.recorder.calibrator(row, result, parts, mask)
        for method in self.settings.methods if with_detectors else ():
            detector = method.detector
            if isinstance(detector, Detector) and scores_log_probabilities(detector, frozenset({MEMBER_TAP})):
                with self.folder.stage(f"detect {method.spec}"):
                    scores = self._scores(method, detector, parts, _place(name, mask))
                    # what reads the members does not depend on how they are pooled
                    spec = method.spec if MEMBER_TAP in detector.taps else f"{pool.spec}+{method.spec}"
                    row = Row(name, spec, detector.family, transform, pool.spec, self._tuned_on(method))
                    self.recorder.detector(row, scores, parts, mask)

    def _pooled(self, pool: EnsemblePool, members: Sequence[Parts]) -> Parts:
        """The ensemble's outputs: its log-probabilities as logits, its members as a tap."""
        for part in self.suite.parts:
            if len({len(view[part.name]) for view in members}) > 1:
                raise ValueError(f"the members could read different numbers of images of {part.name!r}")
        stacked = {part.name: torch.stack([view[part.name].logits for view in members]) for part in self.suite.parts}
        self._fit_pool(pool, members[0], stacked)
        pooled = {}
        for part in self.suite.parts:
            logits = stacked[part.name]
            plain = Outputs.from_logits(pool(logits), members[0][part.name].labels)
            pooled[part.name] = plain.with_taps({MEMBER_TAP: logits.transpose(0, 1)})
        return pooled

    def _masks(self) -> list[ClassMask | None]:
        return list({task.mask.name if task.mask else "": task.mask for task in self.suite.tasks}.values())

    def _scored(self, parts: Parts) -> Parts:
        names = {part.name for part in self.suite.scored}
        return {name: outputs for name, outputs in parts.items() if name in names}


def _place(model: str, mask: ClassMask | None) -> str:
    return f"{model} [{mask.description}]" if mask else model


def _masked(parts: Parts, mask: ClassMask | None) -> Parts:
    return {name: masked(outputs, mask) for name, outputs in parts.items()}
