import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ood_toolkit.datasets import ArrayImages, SubsetImages
from ood_toolkit.datasets.accepted import AcceptingImages, TrimmedImages, labels_for
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.classes import class_indices, class_list, folder_map
from ood_toolkit.datasets.install import check
from ood_toolkit.datasets.locate import find, open_set
from ood_toolkit.outputs import Outputs


def framed(path: Path, colour: str) -> None:
    """6 × 5 pixels of a colour in a red border of one pixel and a white one inside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (10, 9), "red")
    image.paste("white", (1, 1, 9, 8))
    image.paste(colour, (2, 2, 8, 7))
    image.save(path)


def test_objectnet_is_read_without_its_border_and_without_folders_outside_imagenet(tmp_path: Path):
    for folder in ("alarm_clock", "air_freshener", "winter_glove"):
        framed(tmp_path / f"objectnet-1.0/images/{folder}/8c3f.png", "blue")
    images = open_set(entry("objectnet"), tmp_path)
    assert list(images.ids) == ["alarm_clock/8c3f.png", "winter_glove/8c3f.png"]
    assert images.labels.tolist() == [409, 658]  # by hand: analog clock, mitten
    assert images.accepted.tolist() == [[409, 530], [658, -1]]  # pyright: ignore  # an alarm clock may be digital
    pixels = np.array(images.open(0))
    assert pixels.shape == (5, 6, 3)
    assert (pixels == (0, 0, 255)).all()
    assert len(open_set(entry("objectnet"), tmp_path, every_folder=True)) == 3
    assert "111 class folders are missing, first backpack" in check("objectnet", tmp_path).text


def test_a_domain_of_domainnet_is_a_set_with_the_classes_of_imagenet_d(tmp_path: Path):
    for domain in ("clipart", "sketch"):
        for folder in ("mug", "cup", "dog", "The_Mona_Lisa"):
            framed(tmp_path / f"domainnet/{domain}/{folder}/{domain}_1.jpg", "blue")
    images = open_set(entry("domainnet"), tmp_path, within="sketch")
    assert list(images.ids) == [f"sketch/{folder}/sketch_1.jpg" for folder in ("cup", "dog", "mug")]
    accepted = [set(row) - {-1} for row in images.accepted.tolist()]  # pyright: ignore
    assert accepted[0] == accepted[2] == {647, 968}  # measuring cup, cup: cup and mug are one class there
    dogs = set(range(151, 269))
    assert dogs < accepted[1]
    assert images.open(0).size == (10, 9)  # no border here
    assert find(entry("domainnet"), tmp_path / "domainnet") is None


def test_class_maps_have_the_published_sizes():
    whole = set(class_list("imagenet1k").values())
    assert len(folder_map("objectnet")) == 113
    maps = {name: folder_map(name) for name in ("objectnet", "domainnet")}
    assert len(set(maps["domainnet"].values())) == 164
    for name, known in maps.items():
        assert list(known) == sorted(known)
        assert set(class_indices(name)) == {index for classes in known.values() for index in classes} <= whole
    # no ImageNet class belongs to two ObjectNet folders, nor to two of ImageNet-D's merged classes
    for known in maps.values():
        distinct = set(known.values())
        assert sum(map(len, distinct)) == len({index for classes in distinct for index in classes})


def arrays(count: int) -> ArrayImages:
    return ArrayImages(np.arange(count * 48, dtype=np.uint8).reshape(count, 4, 4, 3), name="a", labels=[0] * count)


def test_a_prediction_is_right_if_it_is_any_of_the_classes():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 7, generator=generator)
    accepted = [{row % 7, (3 * row + 1) % 7} if row % 5 else set() for row in range(40)]
    images = SubsetImages(AcceptingImages(arrays(40), accepted), range(40))
    rows = torch.arange(40).flip(0)
    labels = labels_for(images, rows, Outputs.from_logits(logits[rows]))
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        if not accepted[row]:
            assert label == -1
            continue
        ranking = logits[row].argsort(descending=True).tolist()
        assert label in accepted[row]
        for top in (1, 5):
            assert (label in ranking[:top]) == bool(accepted[row] & set(ranking[:top]))
    plain = labels_for(arrays(3), torch.tensor([2, 0]), Outputs.from_logits(logits[:2]))
    assert plain.tolist() == [0, 0]


def test_a_mask_that_holds_every_accepted_class_gives_the_largest_logit_of_each_group_the_vote():
    """The rule of WiSE-FT: the largest logit of an ObjectNet class's ImageNet classes stands for it."""
    generator = torch.Generator().manual_seed(1)
    groups = list(folder_map("objectnet").values())
    logits = torch.randn(300, 1000, generator=generator)
    truth = [row % len(groups) for row in range(300)]
    projected = torch.stack([logits[:, list(group)].max(dim=1).values for group in groups], dim=1)
    expected = projected.argmax(dim=1) == torch.tensor(truth)
    images = AcceptingImages(arrays(300), [groups[group] for group in truth])
    labels = labels_for(images, torch.arange(300), Outputs.from_logits(logits))
    mask = torch.tensor(class_indices("objectnet"))
    predicted = mask[logits[:, mask].argmax(dim=1)]
    assert torch.equal(predicted == labels, expected)
    assert 0 < int(expected.sum()) < 300
    cut = labels_for(images, torch.arange(300), Outputs.from_logits(logits[:, mask]), mask)
    assert torch.equal(mask[cut], labels)
    few = labels_for(images, torch.arange(300), Outputs.from_logits(logits[:, [530, 1]]), torch.tensor([530, 1]))
    assert few.tolist() == [0 if 530 in groups[group] else -1 for group in truth]


def test_the_border_changes_the_fingerprint_and_classes_do_not():
    images = arrays(2)
    assert TrimmedImages(images, 1).fingerprint != images.fingerprint != TrimmedImages(images, 2).fingerprint
    assert AcceptingImages(images, [{1}, {2, 3}]).fingerprint == images.fingerprint
    with pytest.raises(ValueError, match="2 images of 'a' need as many sets of classes, not 1"):
        AcceptingImages(images, [{1}])


def test_what_the_catalogue_says_of_these_sets_can_be_printed():
    for name in ("objectnet", "domainnet", "imagenet-hard", "imagenet-p", "imagenet-1k-train"):
        known = entry(name)
        assert json.dumps(known.about)
        assert known.faults, name
