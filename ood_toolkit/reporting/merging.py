"""Records of several runs as one set of measurements, or a refusal that names what differs.

The rules. Two records meet in one table only if they were measured under the same settings:

- protocol, class mask and the numbers of scored rows agree for each (task, data set) and, for the numbers, each seed;
- the fit set and the calibration set agree for each seed (a seeded split differs between seeds by design);
- the transform agrees for each model (between models each may have its own; the caption says so);
- intervals have one coverage.

A difference is refused, or, if its field is in `allow`, kept in a row of its own with a footnote. Records that differ
in nothing but the seed become their mean; equal records become one; records that agree in everything but the value
are refused.
"""

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ood_toolkit.records import Record

SETTINGS = ("protocol", "mask", "rows", "fit_set", "calibration_set", "transform", "level")
"""What must agree, and may be named in `allow`."""

_WORDS = {
    "rows": "the number of scored rows",
    "fit_set": "the fit set",
    "calibration_set": "the calibration set",
    "level": "the intervals' coverage",
    "mask": "the class mask",
}
_TOLERANCE = 1e-6
"""Two machines' values of one cell may differ by this much, in unit scale."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What makes a row of its own.

    Args:
        model: model spec.
        method: detector or calibrator spec; a calibrated detector as "calibrator+detector".
        family: the method's family.
        tuned_on: the OOD set that chose its hyper-parameters, or "".
        variant: (field, value) of settings in `allow` in which this row differs from the first record's.
    """

    model: str
    method: str
    family: str = ""
    tuned_on: str = ""
    variant: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Column:
    """What makes a column of its own."""

    task: str
    dataset: str
    metric: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One cell: a record, or the mean over seeds.

    Args:
        value: in unit scale; None where any seed has none.
        low: lower end of the interval of a single record.
        high: upper end.
        deviation: sample standard deviation over seeds; None for one seed.
        seeds: the seeds it was measured with.
        reason: why `value` is None.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    seeds: tuple[int, ...] = ()
    reason: str = ""


def merge(records: Iterable[Record], *, allow: Collection[str] = ()) -> dict[tuple[Row, Column], Measurement]:
    """Every cell of every row, in order of first appearance.

    Args:
        records: of one suite.
        allow: settings (see `SETTINGS`) whose differences make rows of their own instead of an error.

    Raises:
        ValueError: when settings differ, or one cell has two values; the message names both.
    """
    records = list(records)
    unknown = sorted(set(allow) - set(SETTINGS))
    if unknown:
        raise ValueError(f"cannot allow a difference in {unknown}; known settings: {', '.join(SETTINGS)}")
    first: dict[tuple[object, ...], Record] = {}
    cells: dict[tuple[Row, Column], list[Record]] = {}
    for record in records:
        variant = tuple(_differences(record, first, allow))
        row = Row(
            model=record.model,
            method=method_of(record),
            family=record.family,
            tuned_on=record.tuned_on,
            variant=variant,
        )
        column = Column(task=record.task, dataset=record.dataset, metric=record.metric)
        cells.setdefault((row, column), []).append(record)
    return {key: _combine(group) for key, group in cells.items()}


def method_of(record: Record) -> str:
    """The method's spec, with the calibrator that was applied before it: "temperature+msp"."""
    # an ensemble's pool stands in the spec already, unless the detector reads the members whatever pools them
    named = record.method.startswith(record.calibrator + "+") or record.model.startswith("ensemble[")
    if not record.calibrator or named:
        return record.method
    return f"{record.calibrator}+{record.method}"


def setting(record: Record, name: str) -> str:
    """A field of `SETTINGS`, or any other, as text; "" where the record does not say."""
    if name == "rows":
        if record.value is None:
            return ""
        if record.task == "anomaly":
            return f"{record.positives} positive and {record.negatives} negative"
        return str(record.positives + record.negatives)  # how many are wrong is the model's doing
    if name == "level":
        return "" if record.level is None else f"{record.level:g}"
    return str(getattr(record, name))


def _scope(record: Record, name: str) -> tuple[object, ...]:
    """Where the setting must agree."""
    scopes: dict[str, tuple[object, ...]] = {
        "protocol": (record.task, record.dataset),
        "mask": (record.task, record.dataset),
        "rows": (record.task, record.dataset, record.seed),
        "fit_set": (record.seed,),
        "calibration_set": (record.seed,),
        "transform": (record.model,),
        "level": (),
    }
    return (name, *scopes[name])


def _differences(
    record: Record, first: dict[tuple[object, ...], Record], allow: Collection[str]
) -> Iterable[tuple[str, str]]:
    for name in SETTINGS:
        found = setting(record, name)
        # a missing mask means all classes; any other empty setting means that it does not apply
        if not found and name not in ("mask", "protocol"):
            continue
        known = first.setdefault(_scope(record, name), record)
        if setting(known, name) == found:
            continue
        if name not in allow:
            raise ValueError(_refusal(known, record, name))
        yield name, found


def _refusal(known: Record, record: Record, name: str) -> str:
    return (
        f"these records cannot share a table: {_WORDS.get(name, 'the ' + name)} differs: "
        f"{setting(known, name)!r} for {_place(known)}, but {setting(record, name)!r} for {_place(record)}; "
        f"render them apart, or allow the difference in {name!r} to keep it with a footnote"
    )


def _place(record: Record) -> str:
    run = f", run {record.run}" if record.run else ""
    return f"{method_of(record)} on {record.dataset} ({record.model}{run})"


def _combine(group: list[Record]) -> Measurement:
    by_seed: dict[int, Record] = {}
    for record in group:
        known = by_seed.setdefault(record.seed, record)
        if not _agree(known.value, record.value):
            raise ValueError(
                f"two values for one cell: {known.metric} of {_place(known)} is {known.value}, but of {_place(record)} "
                f"it is {record.value}, with the same seed {record.seed} and settings; leave one run out"
            )
    seeds = tuple(sorted(by_seed))
    kept = [by_seed[seed] for seed in seeds]
    lacking = [record for record in kept if record.value is None]
    if lacking:
        reason = lacking[0].reason if len(lacking) == len(kept) else f"seed {lacking[0].seed}: {lacking[0].reason}"
        return Measurement(value=None, seeds=seeds, reason=reason)
    if len(kept) == 1:
        return Measurement(value=kept[0].value, low=kept[0].low, high=kept[0].high, seeds=seeds)
    values = [record.value for record in kept if record.value is not None]
    return Measurement(value=statistics.fmean(values), deviation=statistics.stdev(values), seeds=seeds)


def _agree(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _TOLERANCE
