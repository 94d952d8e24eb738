"""`ood-bench cache …`."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ood_toolkit.cache import Entry

cache = typer.Typer(help="The store of outputs: what it holds, checking, removing.", rich_markup_mode=None)
_CACHE = Annotated[Path | None, typer.Option("--cache", help="Store of outputs; $OOD_CACHE or ~/.cache/ood-toolkit.")]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]


@cache.command("ls")
def cache_ls(cache: _CACHE = None, json_: _JSON = False) -> None:
    """Lists every store: images, model, precision, what is whole, size on disk, last use."""
    found = _entries(cache)
    if json_:
        for entry in found:
            typer.echo(json.dumps(_facts(entry)))
        return
    header = ("key", "images", "rows", "model", "weights", "transform", "kept as", "groups", "on disk", "last use")
    _table([header, *(_row(entry) for entry in found)])


@cache.command("du")
def cache_du(cache: _CACHE = None, json_: _JSON = False) -> None:
    """Sums bytes on disk by model, by image set and by group of columns."""
    found = _entries(cache)
    totals: dict[str, Counter[str]] = {"model": Counter(), "images": Counter(), "group": Counter()}
    for entry in found:
        totals["model"][entry.model or "(texts)"] += entry.size
        totals["images"][entry.images or "(texts)"] += entry.size
        for group, size in entry.sizes.items():
            totals["group"][_kind(group) or "(journals)"] += size
    if json_:
        typer.echo(json.dumps({**totals, "total": sum(entry.size for entry in found)}))
        return
    for what, sizes in totals.items():
        _table([(what, "on disk"), *((name, _bytes(size)) for name, size in sizes.most_common())])
        typer.echo()
    typer.echo(f"{_bytes(sum(entry.size for entry in found))} in all")


@cache.command("prune")
def cache_prune(
    cache: _CACHE = None,
    older_than: Annotated[str, typer.Option(help="Unused for longer than this: 30d, 12h, 2w.")] = "",
    max_size: Annotated[str, typer.Option(help="Longest unused first, until the cache is this small: 20GB.")] = "",
    key: Annotated[list[str] | None, typer.Option(help="Beginning of a store's key, or texts; repeatable.")] = None,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Only stores that lack rows, or of an older layout.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
) -> None:
    """Removes the stores that meet all conditions; stores in use, links and foreign folders stay.

    A store is in use while a process holds a lock on its lease, which ends with the process. Where the file system has
    no locks, a store counts as used for a day after it was opened.
    """
    from ood_toolkit.cache import chosen, remove

    if not (older_than or max_size or key or incomplete):
        raise ValueError("say what to remove: --older-than, --max-size, --key or --incomplete")
    doomed = chosen(
        _entries(cache),
        older_than=_seconds(older_than) if older_than else None,
        max_size=_size(max_size) if max_size else None,
        keys=tuple(key or ()),
        incomplete=incomplete,
    )
    if not doomed:
        typer.echo("nothing to remove")
        return
    total = _bytes(sum(entry.size for entry in doomed))
    for entry in doomed:
        typer.echo(f"{entry.path.name}  {_name(entry)}  {_bytes(entry.size)}  {_when(entry.used)}")
    if dry_run:
        typer.echo(f"{len(doomed)} stores, {total}, would be removed")
        return
    if not yes:
        typer.confirm(f"Remove {len(doomed)} stores, {total}?", abort=True, err=True)
    removed = 0
    for entry in doomed:
        reason = remove(entry)
        removed += not reason
        if reason:
            typer.echo(f"{entry.path.name} stays: {reason}", err=True)
    typer.echo(f"{removed} stores removed")


@cache.command("verify")
def cache_verify(cache: _CACHE = None) -> None:
    """Reads every store and compares checksums; exit code 1 if something is not as it was written.

    Shards that are not are forgotten: the next run that needs them computes them again, and no others.
    """
    from ood_toolkit.cache import verify

    found, wrong = _entries(cache), 0
    for entry in found:
        if entry.outdated:
            typer.echo(f"{entry.path.name}  of an older layout, not read (prune --incomplete removes it)")
            continue
        faults = verify(entry)
        wrong += len(faults)
        for fault in faults:
            which = f" shards {', '.join(map(str, fault.shards))}" if fault.shards else ""
            typer.echo(f"{entry.path.name}  {_name(entry)}  {fault.group}{which}: not as written, forgotten")
        if not faults:
            typer.echo(f"{entry.path.name}  {_name(entry)}  {'good' if entry.complete else 'good, not complete'}")
    if wrong:
        raise typer.Exit(1)


def _entries(cache: Path | None) -> list["Entry"]:
    from ood_toolkit.benchmarks.choices import default_cache
    from ood_toolkit.cache import entries

    folder = cache or default_cache()
    if cache is not None and not cache.is_dir():
        raise ValueError(f"there is no folder {str(cache)!r}")
    return entries(folder)


def _facts(entry: "Entry") -> dict[str, object]:
    return {
        "key": entry.path.name,
        "images": entry.images,
        "rows": entry.rows,
        "model": entry.model,
        **{f"identity_{name}": value for name, value in entry.identity.items()},
        "groups": {name: {"whole": done, "shards": shards} for name, (done, shards) in entry.groups.items()},
        "bytes": dict(entry.sizes),
        "complete": entry.complete,
        "outdated": entry.outdated,
        "last_use": entry.used,
    }


def _row(entry: "Entry") -> tuple[str, ...]:
    identity = entry.identity
    kept = identity.get("dtype", "").removeprefix("torch.")
    amp = identity.get("amp", "None").removeprefix("torch.")
    return (
        entry.path.name[:12],
        entry.images,
        str(entry.rows),
        entry.model,
        identity.get("weights", "")[:8],
        _short(identity.get("transform", ""), 36),
        kept if amp in ("None", "") else f"{kept} (amp {amp})",
        "older layout" if entry.outdated else _groups(entry),
        _bytes(entry.size),
        _when(entry.used),
    )


def _groups(entry: "Entry") -> str:
    """`outputs, 3 taps, 1 of 2 live`."""
    every, whole = Counter(map(_kind, entry.groups)), Counter[str]()
    for group, (done, shards) in entry.groups.items():
        whole[_kind(group)] += done == shards
    parts = []
    for kind, count in every.items():
        if kind in entry.groups:
            done, shards = entry.groups[kind]
            parts.append(kind if done == shards else f"{kind} {done}/{shards} shards")
        else:
            parts.append(f"{count} {kind}" if whole[kind] == count else f"{whole[kind]} of {count} {kind}")
    return ", ".join(parts)


def _kind(group: str) -> str:
    return {"tap": "taps", "live": "live"}.get(group.partition("_")[0], group)


def _name(entry: "Entry") -> str:
    return f"{entry.images} ({entry.rows}), {entry.model}" if entry.images else f"{entry.rows} files"


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _when(seconds: float) -> str:
    from datetime import datetime

    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
    if not found:
        raise ValueError(f"cannot read --older-than {text!r}; write a number and m, h, d or w, such as 30d")
    return float(found[1]) * {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[found[2]]


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text.strip())
    if not found:
        raise ValueError(f"cannot read --max-size {text!r}; write a number and B, kB, MB, GB or TB, such as 20GB")
    return int(float(found[1]) * 1000 ** " kMGT".index(found[2] or " "))
