import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from ood_toolkit.datasets.unpack import unpack
from tests.datasets.official import as_tar, imagenet_a, tar_of


def outside(tmp_path: Path) -> list[str]:
    """Every file but those below `target` and the archive."""
    return sorted(
        path.name
        for path in tmp_path.rglob("*")
        if path.is_file() and "target" not in path.parts and not path.name.startswith("archive")
    )


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tar.xz", "w:xz")])
def test_every_file_comes_out_as_it_went_in(tmp_path: Path, suffix: str, mode: str):
    folder = imagenet_a(tmp_path / "in")
    count = unpack(as_tar(folder, tmp_path / f"archive{suffix}", mode=mode), tmp_path / "target")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert count == len(files) == 11
    for path in files:
        assert (tmp_path / "target" / path.relative_to(folder.parent)).read_bytes() == path.read_bytes()


def test_a_zip_comes_out_as_it_went_in(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as zipped:
        zipped.mkdir("sketch")
        zipped.writestr("sketch/n01440764/sketch_1 ü.JPEG", b"image")
    assert unpack(tmp_path / "archive.zip", tmp_path / "target") == 1
    assert (tmp_path / "target/sketch/n01440764/sketch_1 ü.JPEG").read_bytes() == b"image"


@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/evil", "/tmp/evil", "..\\evil", "a\\..\\..\\evil", "C:\\evil", "\\evil", ".."]
)
def test_a_path_that_leads_outside_is_refused_in_tar_and_zip(tmp_path: Path, name: str):
    tar = tar_of(tmp_path / "archive.tar", [("good.jpg", b"x"), (name, b"evil")])
    with pytest.raises(ValueError, match="which leads outside its folder; nothing was installed"):
        unpack(tar, tmp_path / "target")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as zipped:
        zipped.writestr(name, b"evil")
    with pytest.raises(ValueError, match="which leads outside its folder; nothing was installed"):
        unpack(tmp_path / "archive.zip", tmp_path / "target")
    assert outside(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.SYMTYPE, "is a link"),
        (tarfile.LNKTYPE, "is a link"),
        (tarfile.CHRTYPE, "neither file nor folder"),
        (tarfile.FIFOTYPE, "neither file nor folder"),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes, message: str):
    (tmp_path / "secret").mkdir()
    info = tarfile.TarInfo("folder")
    info.type, info.linkname = kind, str(tmp_path / "secret")
    tar = tar_of(tmp_path / "archive.tar", [(info, b""), ("folder/evil", b"evil")])
    with pytest.raises(ValueError, match=message):
        unpack(tar, tmp_path / "target")
    assert outside(tmp_path) == []


def test_a_link_in_a_zip_is_refused(tmp_path: Path):
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as zipped:
        zipped.writestr(info, "/etc/passwd")
    with pytest.raises(ValueError, match="is a link or device"):
        unpack(tmp_path / "archive.zip", tmp_path / "target")


def test_a_name_that_comes_twice_or_is_file_and_folder_is_refused(tmp_path: Path):
    for members in ([("a", b"1"), ("a", b"2")], [("a", b"1"), ("a/b", b"2")]):
        tar = tar_of(tmp_path / "archive.tar", members)  # pyright: ignore
        with pytest.raises(ValueError, match=r"twice, or as file and folder"):
            unpack(tar, tmp_path / f"target{len(members[1][0])}")


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tar.xz", "w:xz"), (".zip", "")])
def test_a_truncated_archive_is_named(tmp_path: Path, suffix: str, mode: str):
    whole = tmp_path / f"archive{suffix}"
    if mode:
        as_tar(imagenet_a(tmp_path / "in"), whole, mode=mode)
    else:
        with zipfile.ZipFile(whole, "w") as zipped:
            zipped.writestr("a.jpg", bytes(2000))
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2 + 77])
    with pytest.raises(ValueError, match=rf"archive{suffix} is truncated or damaged"):
        unpack(whole, tmp_path / "target")


def test_a_damaged_zip_is_named(tmp_path: Path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("a.jpg", b"abcdefgh")
    (tmp_path / "archive.zip").write_bytes(buffer.getvalue().replace(b"abcdefgh", b"abcdefgX", 1))
    with pytest.raises(ValueError, match="Bad CRC-32"):
        unpack(tmp_path / "archive.zip", tmp_path / "target")
