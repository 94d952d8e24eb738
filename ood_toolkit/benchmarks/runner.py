"""Runs a suite: one forward pass per model and image, then every detector and calibrator on what it left behind."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from ood_toolkit.benchmarks.answers import Answerer, keep_answers, keep_pooled_answers
from ood_toolkit.benchmarks.crew import Crew, Origin, labelled, outputs_of
from ood_toolkit.benchmarks.ensembles import fit_pool, pooled
from ood_toolkit.benchmarks.lacking import LeftOut, no_part, require_calibration_data, require_fit_data
from ood_toolkit.benchmarks.masking import masked, masks_of, seen_through, tap_under
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import MEMBER_TAP, PASS_TAPS, Method, scores_log_probabilities
from ood_toolkit.benchmarks.recording import Recorder, Row
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.second_opinion import beside, second_opinion
from ood_toolkit.benchmarks.shared_pass import Done, shared_pass
from ood_toolkit.benchmarks.suite import ClassMask, Suite
from ood_toolkit.benchmarks.tuning import tune
from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.datasets import ImageSet
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.extract import Extracted, Extractor, Filled
from ood_toolkit.fitted import NotFitted
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.outputs import Outputs

Parts = Mapping[str, Outputs]
Scores = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run on a suite.

    Args:
        models: scored one by one, in the order of the tables.
        members: further models that are only members of the ensemble.
        second: a zero-shot model whose MCM score stands beside the detectors of every model, or None.
        methods: detectors.
        calibrators: the plain softmax among them.
        pools: ways to pool models and members into an ensemble; detectors see the first one.
        named: specs of calibrators and pools that the user named: refused where they have no data to learn from.
        extractor: how images go through the models.
        bootstrap: resamples, level and seed of the intervals.
        seed: of the run.
        device: where detectors compute.
        say: told what happens, line by line.
        crew: the ranks that share the work.
    """

    models: Sequence[LoadedClassifier]
    methods: Sequence[Method]
    calibrators: Sequence[Calibrator]
    extractor: Extractor
    bootstrap: Bootstrap
    members: Sequence[LoadedClassifier] = ()
    second: LoadedClassifier | None = None
    pools: Sequence[EnsemblePool] = ()
    named: Collection[str] = ()
    seed: int = 0
    device: str = "cpu"
    say: Callable[[str], None] = lambda text: None
    crew: Crew = field(default_factory=Crew)


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
        self._lacking: dict[tuple[str, str], str] = {}
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._filled: Done = {}
        self._left_out = LeftOut(settings.say)
        self.recorder = Recorder(suite, folder, settings.bootstrap, settings.seed)

    def run(self) -> None:
        """Scores every model, then their ensembles.

        Methods that the user named and that cannot learn from the data are the folder's facts under "failed".

        Raises:
            ValueError: such a method, where the labels alone tell it: before the first image.
        """
        members = []
        opinion: Parts = {}
        classes = self.settings.models[0].classifier.head.weight.shape[0]
        self._lacking = require_fit_data(self.settings.methods, self.suite, self._masks(), classes)
        require_calibration_data((*self.settings.calibrators, *self.settings.pools), self.settings.named, self.suite)
        self._filled = shared_pass(self.suite, self.settings, self.folder)
        for model in self.settings.models:
            parts, live = self._see(model)
            members.append(parts)
            if self.settings.second and not opinion:
                opinion = self._pass(self.settings.second, ())[0]
            keep_answers(self.folder.scores, self.suite, model.spec, parts)
            for mask in self._masks():
                view = _masked(parts, mask)
                self._calibrate(model, view, mask)
                self._detect(model, view, mask, live)
                self._second_opinion(model, view, mask, opinion)
                self._pool_passes(model, view, mask)
        if self.settings.pools:
            members += [self._pass(model, ())[0] for model in self.settings.members]
        if len(members) > 1:
            for number, pool in enumerate(self.settings.pools):
                for mask in self._masks():
                    views = [_masked(parts, mask) for parts in members]
                    self._ensemble(pool, views, mask, with_detectors=number == 0)
                self._keep_pooled(pool, members)
        self.folder.facts["failed"] = dict(self._left_out.failed)
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
                problem = self._lacks(detector, mask) or self._fit(
                    fresh, _masked(parts, mask), _origin(model.spec, mask)
                )
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
                self.settings.crew.tell_pass(model.spec, fingerprint, live)
                done = self.settings.extractor.extract(
                    model.classifier, model.transform, model.preprocessing, images, live, name=model.spec
                )
            filled = self._filled.pop((model.spec, fingerprint), Filled(0, 0.0))
            self._report(model.spec, images, done if done.computed else replace(done, **asdict(filled)))
            self._gaps.setdefault(model.spec, {}).update(done.gaps)
            for part in self.suite.parts:
                if part.images.fingerprint != fingerprint:
                    continue
                parts[part.name], where = outputs_of(part, done)
                rows = done.rows[where]
                self._rows.setdefault(model.spec, {})[part.name] = rows
                ids = [part.images.ids[int(row)] for row in rows]
                self.folder.scores.ids.setdefault(part.name, ids)
                self.folder.scores.roots.setdefault(part.name, str(getattr(part.images, "root", "")))
                for spec, values in done.live.items():
                    scores[spec][part.name] = values[where]
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
                row = Row(model.spec, calibrator.spec, calibrator.family, model.preprocessing, texts=model.told())
                self.recorder.calibrator(row, result, parts, mask)

    def _fit_calibrator(self, calibrator: Calibrator, parts: Parts) -> str:
        """Why the calibrator cannot be fitted, or ""."""
        if calibrator.name == "none":
            return ""
        if self.suite.calibration is None:
            return no_part("calibration")
        train = labelled(parts[self.suite.calibration.name])
        try:
            calibrator.fit(train.logits, train.labels)
        except ValueError as error:
            return self._left_out(calibrator.spec, str(error), named=calibrator.spec in self.settings.named)
        return ""

    def _detect(
        self, model: LoadedClassifier, parts: Parts, mask: ClassMask | None, live: Mapping[str, Scores | str]
    ) -> None:
        available = frozenset(next(iter(parts.values())).taps)
        for method in self.settings.methods:
            lacking = [tap for tap in method.detector.taps if tap not in available and not _runs_the_model(method)]
            gaps = {tap: self._gaps[model.spec].get(tap_under(tap, mask), "not given") for tap in lacking}
            missing = ", ".join(f"{tap} ({why})" for tap, why in gaps.items())
            if missing and (not method.chosen or self._others_give(model, lacking, mask)):
                self.folder.facts["left_out"].setdefault(model.spec, {})[method.spec] = f"needs the tap {missing}"
                if method.chosen and MEMBER_TAP not in lacking:
                    self.settings.say(f"{model.spec}: {method.spec} left out: needs the tap {missing}")
                continue
            with self.folder.stage(f"detect {method.spec}"):
                if isinstance(method.detector, LiveDetector):
                    result = live[seen_through(method.detector, mask).spec]
                elif missing:
                    result = self._refuse(method, f"needs the tap {missing} of {model.spec}")
                elif self._lacks(method.detector, mask):
                    result = self._refuse(method, self._lacks(method.detector, mask))
                else:
                    origin = _origin(model.spec, mask)
                    result = self._scores(method, method.detector, parts, _place(model.spec, mask), origin)
                scored = result if isinstance(result, str) else {name: result[name] for name in self._scored(parts)}
                calibrator = method.calibrator.spec if method.calibrator else ""
                family = method.detector.family
                tuned_on = self._tuned_on(method)
                texts = model.told(method.detector.taps)
                row = Row(model.spec, method.spec, family, model.preprocessing, calibrator, tuned_on, texts)
                self.recorder.detector(row, scored, parts, mask)

    def _others_give(self, model: LoadedClassifier, taps: Sequence[str], mask: ClassMask | None) -> bool:
        """Whether the ensemble or another model of the run has these taps, so that the method is not in vain."""
        others = [other for other in self.settings.models if other is not model]
        several = bool(self.settings.pools) and len(self.settings.models) + len(self.settings.members) > 1
        return all(
            several if tap == MEMBER_TAP else any(tap_under(tap, mask) not in o.classifier.tap_gaps for o in others)
            for tap in taps
        )

    def _second_opinion(self, model: LoadedClassifier, parts: Parts, mask: ClassMask | None, opinion: Parts) -> None:
        second = self.settings.second
        if second is None or second.spec == model.spec:
            return
        spec = f"{second.spec}+mcm"
        with self.folder.stage(f"detect {spec}"):
            theirs, ours = self._rows[second.spec], self._rows[model.spec]
            found = second_opinion(self._scored(_masked(opinion, mask)))
            scores = {name: beside(values, theirs[name], ours[name]) for name, values in found.items()}
            texts = f"second opinion of {second.spec} ({second.preprocessing}), {second.told()}"
            row = Row(model.spec, spec, "vision-language", model.preprocessing, texts=texts)
            self.recorder.detector(row, scores, parts, mask)

    def _tuned_on(self, method: Method) -> str:
        return self.suite.tuning.name if method.tuned and self.suite.tuning else ""

    def _scores(
        self, method: Method, detector: Detector, parts: Parts, place: str, origin: Origin | None = None
    ) -> Scores | str:
        """Scores of every scored part, or why there are none.

        Args:
            method: the detector's.
            detector: unfitted.
            parts: what to score.
            place: whose scores they are, for run.json.
            origin: where other ranks find the parts, if they can.
        """
        if method.calibrator is not None:
            calibrator = method.calibrator
            problem = self._fit_calibrator(calibrator, parts)
            if problem:
                return self._refuse(method, problem)
            parts = {name: outputs.through(calibrator.log_probabilities) for name, outputs in parts.items()}
            origin = None
        if method.tuned:
            found = self._tune(method, detector, parts, place)
            if isinstance(found, str):
                return self._refuse(method, found)
            detector = found
        else:
            problem = self._fit(detector, parts, origin)
            if problem:
                return self._refuse(method, problem)
        with torch.no_grad():
            scores = {
                name: self.settings.crew.scores(detector, outputs.to(self.settings.device), _at(origin, name))
                for name, outputs in self._scored(parts).items()
            }
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

    def _fit(self, detector: Detector | LiveDetector, parts: Parts, origin: Origin | None) -> str:
        """Why the detector cannot be fitted, or ""."""
        train = self._training(detector, parts)
        if isinstance(train, str):
            return train
        learned = self.suite.calibration if detector.held_out else self.suite.fit
        origin = _at(origin, learned.name, labelled=True) if learned else None
        try:
            with torch.no_grad(), self.settings.crew.sharing_sums(train, origin):
                detector.fit(train)
        except ValueError as error:
            return str(error)
        return ""

    def _training(self, detector: Detector | LiveDetector, parts: Parts) -> Outputs | str:
        """What the detector is fitted on, or why there is nothing."""
        learned = self.suite.calibration if detector.held_out else self.suite.fit
        if learned is not None:
            train = labelled(parts[learned.name])
        elif detector.needs == "train":
            return f"needs {'calibration' if detector.held_out else 'fit'} data; see --fit and --calibrate"
        else:
            train = next(iter(parts.values())).rows(slice(0, 0))
        return train.to(self.settings.device)

    def _lacks(self, detector: Detector | LiveDetector, mask: ClassMask | None) -> str:
        return self._lacking.get((detector.spec, mask.description if mask else ""), "")

    def _refuse(self, method: Method, reason: str) -> str:
        """The reason: a row without numbers, and a failure of the run where the user asked for the detector by name."""
        return self._left_out(method.spec, reason, named=method.chosen)

    def _pool_passes(self, model: LoadedClassifier, parts: Parts, mask: ClassMask | None) -> None:
        """The ensemble of one model's own further passes: MC dropout, and test-time augmentation."""
        if not self.settings.pools:
            return
        pool = self.settings.pools[0]
        for tap in next(iter(parts.values())).taps:
            if not tap.startswith(PASS_TAPS):
                continue
            with self.folder.stage(f"ensemble {tap}"):
                members = {name: outputs.taps[tap].transpose(0, 1) for name, outputs in parts.items()}
                spec = f"{pool.spec}[{tap}]"
                row = Row(model.spec, spec, pool.family, model.preprocessing, texts=model.told())
                try:
                    fit_pool(pool, self.suite, parts, members)
                    result: Scores | str = {name: pool(members[name]) for name in self._scored(parts)}
                except ValueError as error:
                    result = str(error)
                self.recorder.calibrator(row, result, parts, mask)

    def _ensemble(
        self, pool: EnsemblePool, members: Sequence[Parts], mask: ClassMask | None, *, with_detectors: bool
    ) -> None:
        models, name = [*self.settings.models, *self.settings.members], self._ensemble_name
        transform = "; ".join(dict.fromkeys(model.preprocessing for model in models))
        row = Row(name, pool.spec, pool.family, transform)
        with self.folder.stage(f"ensemble {pool.name}"):
            try:
                parts = pooled(pool, self.suite, members, mask, self._rows[models[0].spec])
            except ValueError as error:
                reason = no_part("calibration") if isinstance(error, NotFitted) else str(error)
                problem = self._left_out(pool.spec, reason, named=pool.spec in self.settings.named)
                self.recorder.calibrator(row, problem, members[0], mask)
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

    def _keep_pooled(self, pool: EnsemblePool, members: Sequence[Parts]) -> None:
        """The ensemble's answers in every view; a pool that failed before has none."""
        rows = self._rows[self.settings.models[0].spec]

        def under(mask: ClassMask | None) -> Parts:
            return pooled(pool, self.suite, [_masked(parts, mask) for parts in members], mask, rows)

        with self.folder.stage(f"ensemble {pool.name}"):
            try:
                keep_pooled_answers(self.folder.scores, self.suite, Answerer(self._ensemble_name, pool.spec), under)
            except ValueError as error:
                self._left_out(pool.spec, no_part("calibration") if isinstance(error, NotFitted) else str(error))

    @property
    def _ensemble_name(self) -> str:
        return f"ensemble[{', '.join(m.spec for m in (*self.settings.models, *self.settings.members))}]"

    def _masks(self) -> list[ClassMask | None]:
        return masks_of(self.suite)

    def _scored(self, parts: Parts) -> Parts:
        names = {part.name for part in self.suite.scored}
        return {name: outputs for name, outputs in parts.items() if name in names}


def _runs_the_model(method: Method) -> bool:
    return isinstance(method.detector, LiveDetector)


def _origin(model: str, mask: ClassMask | None) -> Origin:
    return Origin(model, mask.name if mask else "")


def _at(origin: Origin | None, part: str, *, labelled: bool = False) -> Origin | None:
    return replace(origin, part=part, labelled=labelled) if origin else None


def _place(model: str, mask: ClassMask | None) -> str:
    return f"{model} [{mask.description}]" if mask else model


def _masked(parts: Parts, mask: ClassMask | None) -> Parts:
    return {name: masked(outputs, mask) for name, outputs in parts.items()}
