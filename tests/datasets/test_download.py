import hashlib
from pathlib import Path

import pytest

from ood_toolkit.datasets.download import allowed, fetch
from tests.datasets.conftest import Server

BODY = bytes(range(256)) * 12000  # 3 MB: several blocks
MD5, SHA256 = hashlib.md5(BODY).hexdigest(), hashlib.sha256(BODY).hexdigest()


def test_a_file_arrives_whole_with_progress(server: Server, data: Path):
    server.files["set.tar"] = BODY
    seen: list[tuple[int, int, str]] = []
    fetch(
        server.url("set.tar"),
        data / "set.tar",
        size=len(BODY),
        md5=MD5,
        sha256=SHA256.upper(),
        progress=lambda *step: seen.append(step),
    )
    assert (data / "set.tar").read_bytes() == BODY
    assert seen[0] == (0, len(BODY), "set.tar")
    assert seen[-1] == (len(BODY), len(BODY), "set.tar")
    assert [path.name for path in data.iterdir()] == ["set.tar"]


def test_a_cut_connection_is_resumed_at_once(server: Server, data: Path):
    server.files["set.tar"] = BODY
    server.cut_after = [1_500_000, 700_000]
    fetch(server.url("set.tar"), data / "set.tar", sha256=SHA256)
    assert (data / "set.tar").read_bytes() == BODY
    assert [span for _, span in server.asked] == [None, "bytes=1500000-", "bytes=2200000-"]


def test_a_connection_that_stays_cut_is_resumed_by_the_next_call(server: Server, data: Path):
    server.files["set.tar"] = BODY
    server.cut_after = [1_000_000, 0, 0]
    with pytest.raises(
        ValueError, match=r"set.tar was cut after 1,000,000 bytes.*run the same command again to resume"
    ):
        fetch(server.url("set.tar"), data / "set.tar", sha256=SHA256)
    assert not (data / "set.tar").exists()
    fetch(server.url("set.tar"), data / "set.tar", sha256=SHA256)
    assert server.asked[-1] == ("set.tar", "bytes=1000000-")
    assert (data / "set.tar").read_bytes() == BODY


def test_a_server_without_ranges_sends_all_again(server: Server, data: Path):
    server.files["set.tar"], server.ranges = BODY, False
    server.cut_after = [1_000_000]
    fetch(server.url("set.tar"), data / "set.tar", sha256=SHA256)
    assert (data / "set.tar").read_bytes() == BODY


def test_a_file_that_changed_on_the_server_is_not_glued_to_the_old_half(server: Server, data: Path):
    server.files["set.tar"] = b"old" * 700_000
    server.cut_after = [1_000_000, 0, 0]
    with pytest.raises(ValueError, match="was cut"):
        fetch(server.url("set.tar"), data / "set.tar")
    server.files["set.tar"] = BODY
    fetch(server.url("set.tar"), data / "set.tar")  # no checksum is needed: the entity tag tells
    assert (data / "set.tar").read_bytes() == BODY


def test_a_part_that_is_complete_or_too_long_is_understood(server: Server, data: Path):
    server.files["set.tar"] = BODY
    (data / "set.tar.part").write_bytes(BODY)
    fetch(server.url("set.tar"), data / "set.tar", sha256=SHA256)
    (data / "long.tar.part").write_bytes(BODY + b"more")
    fetch(server.url("set.tar"), data / "long.tar", sha256=SHA256)
    assert (data / "long.tar").read_bytes() == BODY == (data / "set.tar").read_bytes()


@pytest.mark.parametrize(("md5", "sha256"), [("0" * 32, None), (None, "0" * 64), (MD5, "0" * 64)])
def test_a_wrong_checksum_leaves_nothing(server: Server, data: Path, md5: str | None, sha256: str | None):
    server.files["set.tar"] = BODY
    with pytest.raises(ValueError, match=r"wrong checksum: (md5|sha256) \w+ instead of 0+; it was deleted"):
        fetch(server.url("set.tar"), data / "set.tar", md5=md5, sha256=sha256)
    assert list(data.iterdir()) == []


def test_another_size_is_refused_before_the_download(server: Server, data: Path):
    server.files["set.tar"] = BODY
    with pytest.raises(ValueError, match=r"offers 3,072,000 bytes for set.tar where 7 are expected"):
        fetch(server.url("set.tar"), data / "set.tar", size=7)
    assert list(data.iterdir()) == []


def test_a_missing_file_and_an_unreachable_server_are_told_apart(server: Server, data: Path):
    with pytest.raises(ValueError, match=r"the server refuses .*404"):
        fetch(server.url("nowhere.tar"), data / "set.tar")
    with pytest.raises(ValueError, match=r"cut after 0 bytes \(.*refused"):
        fetch("http://127.0.0.1:9/set.tar", data / "set.tar", attempts=1)


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("https://example.org/a.tar", True),
        ("http://127.0.0.1:80/a.tar", True),
        ("http://localhost/a.tar", True),
        ("http://[::1]:8/a.tar", True),
        ("http://example.org/a.tar", False),
        ("http://localhost.example.org/a.tar", False),
        ("http://127.0.0.1@example.org/a.tar", False),
        ("file:///etc/passwd", False),
        ("ftp://127.0.0.1/a.tar", False),
    ],
)
def test_only_https_and_this_machine_are_allowed(url: str, fine: bool):
    assert allowed(url) == fine


def test_a_redirect_to_plain_http_is_refused(server: Server, data: Path):
    server.redirects["set.tar"] = "http://example.org/set.tar"
    with pytest.raises(ValueError, match=r"leads to 'http://example.org/set.tar', which is not https"):
        fetch(server.url("set.tar"), data / "set.tar")
    with pytest.raises(ValueError, match="is not https"):
        fetch("http://example.org/set.tar", data / "set.tar")
