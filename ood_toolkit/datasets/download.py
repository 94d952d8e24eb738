"""Downloads a file with resume and checksum. Only https, and http on this machine."""

import hashlib
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes to do or 0 where unknown, file name)."""

_BLOCK = 1 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Cut(Exception):
    """The connection ended early; what came is kept."""


def silent(done: int, total: int, name: str) -> None:
    """A progress callback that says nothing."""


def allowed(url: str) -> bool:
    """The address is https, or http on the loopback interface."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)


def fetch(
    url: str,
    target: Path,
    *,
    size: int | None = None,
    md5: str | None = None,
    sha256: str | None = None,
    progress: Progress = silent,
    attempts: int = 3,
    timeout: float = 60,
) -> Path:
    """Downloads `url` to `target`, which appears only when it is complete and its checksum is right.

    What has come so far lies beside it as `<name>.part`; a later call resumes there.

    Args:
        url: https, or http on this machine.
        target: the file; its folder is made.
        size: bytes it must have.
        md5: digest it must have, hexadecimal.
        sha256: likewise.
        progress: told after every block.
        attempts: connections to try before giving up; one that brought new bytes does not count.
        timeout: seconds without a byte after which a connection counts as cut.

    Raises:
        ValueError: the address is not allowed, the server refuses, the connection stays cut, or size or checksum is
            wrong (the file is deleted then).
    """
    if not allowed(url):
        raise ValueError(f"{url!r} is not https; download it yourself and check its checksum")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    failures = 0
    while True:
        before = _length(part)
        try:
            _stream(url, part, size, progress, timeout)
            break
        except _Cut as cut:
            failures = 1 if _length(part) > before else failures + 1
            if failures >= attempts:
                raise ValueError(
                    f"the download of {target.name} was cut after {_length(part):,} bytes ({cut}); "
                    "run the same command again to resume"
                ) from None
    verify(part, name=target.name, size=size, md5=md5, sha256=sha256, delete=True)
    _validator(part).unlink(missing_ok=True)
    part.replace(target)
    return target


def verify(
    path: Path,
    *,
    name: str = "",
    size: int | None = None,
    md5: str | None = None,
    sha256: str | None = None,
    delete: bool = False,
) -> None:
    """Raises ValueError where a file's size or a digest is not what it should be; None is not compared.

    Args:
        path: the file.
        name: what the error calls it.
        size: in bytes.
        md5: hexadecimal.
        sha256: hexadecimal.
        delete: remove a file that is wrong, so that the next download starts afresh.
    """
    problem = f"has {_length(path):,} bytes instead of {size:,}" if size not in (None, _length(path)) else ""
    for algorithm, expected in (("md5", md5), ("sha256", sha256)):
        if expected is not None and not problem:
            with path.open("rb") as file:
                got = hashlib.file_digest(file, lambda a=algorithm: hashlib.new(a, usedforsecurity=False)).hexdigest()
            if got != expected.lower():
                problem = f"has the wrong checksum: {algorithm} {got} instead of {expected}"
    if problem:
        if delete:
            path.unlink()
            _validator(path).unlink(missing_ok=True)
        raise ValueError(
            f"{name or path.name} {problem}; "
            + ("it was deleted, nothing was installed" if delete else "it is damaged, or another revision")
        )


def _stream(url: str, part: Path, size: int | None, progress: Progress, timeout: float) -> None:
    start = _length(part)
    if size is not None and start == size:
        return
    headers = {"Accept-Encoding": "identity", "User-Agent": "ood-toolkit"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if _validator(part).is_file():
            headers["If-Range"] = _validator(part).read_text(encoding="latin-1")
    try:
        with _opener(url).open(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            _receive(response, part, start, size, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:
            _out_of_range(error, part, start)
        elif error.code < 500:
            raise ValueError(f"the server refuses {url!r}: {error.code} {error.reason}") from None
        else:
            raise _Cut(f"server error {error.code}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _Cut(str(getattr(error, "reason", error)) or type(error).__name__) from None


def _receive(response: Any, part: Path, start: int, size: int | None, progress: Progress) -> None:
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    resumed = response.status == 206 and span is not None and int(span[1]) == start
    if response.status == 206 and not resumed:
        part.unlink()
        raise _Cut("the server resumed at another place")
    length = response.headers.get("Content-Length")
    start = start if resumed else 0
    total = start + int(length) if length is not None else size
    if size is not None and total != size:
        raise ValueError(f"the server offers {total:,} bytes for {part.stem} where {size:,} are expected")
    tag = response.headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        _validator(part).write_text(tag, encoding="latin-1")
    done = start
    with part.open("ab" if resumed else "wb") as file:
        progress(done, total or 0, part.stem)
        while block := response.read(_BLOCK):
            file.write(block)
            done += len(block)
            progress(done, total or 0, part.stem)
    if total is not None and done < total:
        raise _Cut(f"{done:,} of {total:,} bytes came")


def _out_of_range(error: urllib.error.HTTPError, part: Path, start: int) -> None:
    """The server has no byte from `start` on: all is here already, or what is here is too long."""
    if error.headers.get("Content-Range", "") == f"bytes */{start}":
        return
    part.unlink()
    raise _Cut("what was there did not fit; starting afresh")


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not allowed(newurl):
            raise ValueError(f"{req.full_url!r} leads to {newurl!r}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(url: str) -> urllib.request.OpenerDirector:
    local = urllib.parse.urlsplit(url).hostname in _LOOPBACK
    proxies = [urllib.request.ProxyHandler({})] if local else []
    return urllib.request.build_opener(_SafeRedirects, *proxies)


def _validator(part: Path) -> Path:
    """Holds the server's entity tag of what is in the part file."""
    return part.with_name(part.name + ".etag")


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
