import hashlib
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from ood_toolkit.datasets import install
from ood_toolkit.datasets.catalogue import Archive, CatalogueEntry, entry
from ood_toolkit.datasets.classes import class_list
from ood_toolkit.datasets.install import check, get, list_sets, terms
from ood_toolkit.datasets.locate import open_set
from tests.datasets.conftest import Server
from tests.datasets.official import as_tar, jpeg, tar_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`imagenet-o` with all 200 class folders, one image each, and its README."""
    folder = tmp_path_factory.mktemp("official") / "imagenet-o"
    for number, wnid in enumerate(class_list("imagenet_o")):
        jpeg(folder / wnid / f"benthos, {number}_0.9994893.JPEG", number)
    (folder / "README.txt").write_text("This is ImageNet-O\n")
    return folder


def served(server: Server, archive: Path, **changes: object) -> CatalogueEntry:
    """The catalogue's ImageNet-O with 200 images, served by this machine."""
    content = archive.read_bytes()
    server.files[archive.name] = content
    facts = {"bytes": len(content), "md5": hashlib.md5(content).hexdigest(), "sha256": None, **changes}
    return replace(
        entry("imagenet-o"),
        images=200,
        archives=(Archive(url=server.url(archive.name), file=archive.name, **facts),),  # pyright: ignore
    )


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz")])
def test_a_set_is_fetched_unpacked_verified_and_found(
    server: Server, whole: Path, data: Path, tmp_path: Path, suffix: str, mode: str
):
    known = served(server, as_tar(whole, tmp_path / f"imagenet-o{suffix}", mode=mode))
    said: list[str] = []
    done = get(known, data, yes=True, say=said.append)
    assert (done.images, done.problems) == (200, [])
    assert sorted(path.name for path in data.iterdir()) == ["imagenet-o"]
    for path in whole.rglob("*.JPEG"):
        assert (data / "imagenet-o" / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert said[-1] == f"imagenet-o: 200 images in {data / 'imagenet-o'} (folder), complete"
    requests = len(server.asked)
    assert get(known, data).images == 200  # it is there: no question, no request
    assert len(server.asked) == requests


def test_a_tar_may_stay_packed_and_is_read_as_it_is(server: Server, whole: Path, data: Path, tmp_path: Path):
    known = served(server, as_tar(whole, tmp_path / "imagenet-o.tar"))
    assert get(known, data, yes=True, unpacked=False).problems == []
    assert [path.name for path in data.iterdir()] == ["imagenet-o.tar"]
    assert len(open_set(known, data)) == 200


def test_nothing_is_fetched_without_agreement_to_licence_and_size(
    server: Server, whole: Path, data: Path, tmp_path: Path
):
    known = served(server, as_tar(whole, tmp_path / "imagenet-o.tar"))
    shown: list[str] = []
    with pytest.raises(ValueError, match="nothing was downloaded: ImageNet-O needs your agreement"):
        get(known, data, ask=lambda text: bool(shown.append(text)))
    assert server.asked == []
    assert "licence: ImageNet terms: non-commercial" in shown[0]
    assert "0.00 GB" in shown[0]
    assert "one in five" in shown[0]
    assert get(known, data, ask=lambda text: True).problems == []


def test_a_cut_download_resumes_at_the_next_call(server: Server, whole: Path, data: Path, tmp_path: Path):
    known = served(server, as_tar(whole, tmp_path / "imagenet-o.tar"))
    server.cut_after = [50_000, 0, 0]
    with pytest.raises(ValueError, match="run the same command again to resume"):
        get(known, data, yes=True)
    assert check(known, data).found is None
    assert get(known, data, yes=True).problems == []
    assert server.asked[-1] == ("imagenet-o.tar", "bytes=50000-")
    assert sorted(path.name for path in data.iterdir()) == ["imagenet-o"]


def test_a_wrong_checksum_installs_nothing(server: Server, whole: Path, data: Path, tmp_path: Path):
    known = served(server, as_tar(whole, tmp_path / "imagenet-o.tar"), md5="0" * 32)
    with pytest.raises(ValueError, match="wrong checksum"):
        get(known, data, yes=True)
    assert list(data.iterdir()) == []


def test_a_truncated_archive_installs_nothing(server: Server, whole: Path, data: Path, tmp_path: Path):
    archive = as_tar(whole, tmp_path / "imagenet-o.tar.gz", mode="w:gz")
    archive.write_bytes(archive.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="truncated or damaged"):
        get(served(server, archive), data, yes=True)
    assert list(data.iterdir()) == []


def test_a_dangerous_archive_installs_nothing_and_touches_nothing(
    server: Server, whole: Path, data: Path, tmp_path: Path
):
    link = tarfile.TarInfo("imagenet-o/link")
    link.type, link.linkname = tarfile.SYMTYPE, "../.."
    for number, bad in enumerate((("../../evil", b"x"), ("/tmp/ood-evil", b"x"), (link, b""))):
        archive = as_tar(whole, tmp_path / f"{number}.tar.gz", mode="w:gz")
        with tarfile.open(archive) as tar:
            members = [(m, tar.extractfile(m).read()) for m in tar if m.isreg()]  # pyright: ignore
        tar_of(archive, [*members, bad], mode="w:gz")
        with pytest.raises(ValueError, match=r"leads outside its folder|is a link"):
            get(served(server, archive), data, yes=True)
        assert list(data.iterdir()) == []
    assert not any(tmp_path.rglob("evil"))
    assert not Path("/tmp/ood-evil").exists()


def test_an_archive_with_other_contents_installs_nothing(server: Server, whole: Path, data: Path, tmp_path: Path):
    known = replace(served(server, as_tar(whole, tmp_path / "o.tar.gz", mode="w:gz")), images=2000)
    with pytest.raises(ValueError, match=r"does not hold ImageNet-O as it should: 2,000 images are expected, 200 are"):
        get(known, data, yes=True)
    assert not (data / "imagenet-o").exists()


def test_an_archive_put_there_by_hand_is_verified_and_unpacked(server: Server, whole: Path, data: Path, tmp_path: Path):
    known = served(server, as_tar(whole, tmp_path / "o.tar.gz", mode="w:gz"))
    by_hand = replace(known, archives=(replace(known.archives[0], url=None),), login="Log in at example.org.")
    with pytest.raises(ValueError, match=r"cannot be downloaded by this tool. Log in at example.org."):
        get(by_hand, data, yes=True)
    (data / "o.tar.gz").write_bytes(server.files["o.tar.gz"])
    assert get(by_hand, data).problems == []  # no download, so no question
    assert (data / "o.tar.gz").is_file()  # the user's file stays
    assert server.asked == []


def test_what_is_there_already_is_never_overwritten(server: Server, whole: Path, data: Path, tmp_path: Path):
    known = served(server, as_tar(whole, tmp_path / "o.tar.gz", mode="w:gz"))
    (data / "imagenet-o").mkdir()
    (data / "imagenet-o" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already but holds no ImageNet-O; move it away"):
        get(known, data, yes=True)
    assert [path.name for path in (data / "imagenet-o").iterdir()] == ["mine.txt"]
    jpeg(data / "imagenet-o/n01443537/a.jpg", 0)
    with pytest.raises(ValueError, match=r"200 images are expected, 1 are there.*move .*imagenet-o away"):
        get(known, data, yes=True)


def test_a_check_says_what_is_missing_and_what_does_not_belong(whole: Path, tmp_path: Path):
    known = replace(entry("imagenet-o"), images=200)
    as_tar(whole, tmp_path / "imagenet-o.tar")
    assert check(known, tmp_path).text == f"imagenet-o: 200 images in {tmp_path / 'imagenet-o.tar'} (tar), complete"
    for wnid in list(class_list("imagenet_o"))[:199]:
        jpeg(tmp_path / "o2/imagenet-o" / wnid / "a.JPEG", 0)
    jpeg(tmp_path / "o2/imagenet-o/n01440764/a.JPEG", 0)
    assert check(known, tmp_path / "o2").problems == [
        f"1 class folders are missing, first {list(class_list('imagenet_o'))[199]}",
        "1 folders are none of its classes, first n01440764",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("imagenet-1k", "Register at https://image-net.org"),
        ("imagenet-a", "ood-bench data get imagenet-a"),
        ("objectnet", "Fill in the form at https://objectnet.dev"),
        ("inaturalist", "plain http"),
        ("ssb-hard", "drive.google.com"),
    ],
)
def test_a_set_that_is_not_there_comes_with_what_to_do(data: Path, name: str, words: str):
    checked = check(name, data)
    assert checked.found is None
    assert words in checked.text


def test_the_list_says_where_each_set_lies(whole: Path, tmp_path: Path):
    (tmp_path / "root").mkdir()
    as_tar(whole, tmp_path / "root" / "imagenet-o.tar")
    found = {known.name: where for known, where in list_sets(tmp_path / "root")}
    assert found.pop("imagenet-o").path == tmp_path / "root" / "imagenet-o.tar"  # pyright: ignore
    assert set(found.values()) == {None}
    assert "size unknown" in terms(entry("openimage-o"))


def test_room_is_asked_for_before_the_download(
    server: Server, whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known = served(server, as_tar(whole, tmp_path / "imagenet-o.tar"), bytes=10**18)
    with pytest.raises(ValueError, match=r"needs about 2000000000.0 GB in .* are free"):
        get(known, data, yes=True)
    assert server.asked == []


def test_a_folder_that_is_there_and_laid_out_otherwise_is_named(tmp_path: Path):
    jpeg(tmp_path / "imagenet-o" / "n00000000" / "a.JPEG", 0)
    with pytest.raises(ValueError, match=r"the folder '.*imagenet-o' is there, but not laid out as imagenet-o/<wnid"):
        open_set(entry("imagenet-o"), tmp_path)
    assert "is there, but not laid out as" in check("imagenet-o", tmp_path).problems[0]
    assert "looked for imagenet-a" in check("imagenet-a", tmp_path).problems[0]


def test_a_group_of_imagenet_c_is_complete_only_with_all_images_at_every_severity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wnid = next(iter(class_list("imagenet1k")))
    for corruption in ("gaussian_noise", "shot_noise"):
        for severity in range(1, 6):
            jpeg(tmp_path / "imagenet-c" / "noise" / corruption / str(severity) / wnid / "a.JPEG", severity)
    problem = "50,000 images are expected at each severity, 15 of 15 differ, first gaussian_noise/1 with 1"
    assert problem in check("imagenet-c-noise", tmp_path).problems
    monkeypatch.setattr(install, "_AT_A_SEVERITY", 1)
    (problem,) = [text for text in check("imagenet-c-noise", tmp_path).problems if "severity" in text]
    assert problem.endswith("5 of 15 differ, first impulse_noise/1 with 0")
    for severity in range(1, 6):
        jpeg(tmp_path / "imagenet-c" / "noise" / "impulse_noise" / str(severity) / wnid / "a.JPEG", severity)
    assert not any("severity" in text for text in check("imagenet-c-noise", tmp_path).problems)
