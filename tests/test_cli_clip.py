"""Zero-shot models from the command line: what they are told, what is left out and why, second opinions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from ood_toolkit.datasets.classes import class_list, validation_labels
from ood_toolkit.models import ClipPrompts, load_classifier
from ood_toolkit.models.clip import TextTower, prompt_templates
from ood_toolkit.models.negatives import NegativeLabels, read_vocabulary
from ood_toolkit.records import Record, read_records
from ood_toolkit.scorefile import Column, ScoreFile
from tests.command_line import Bench

TEXT = {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
SMALL = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
LARGE = {"image_size": 224, "layers": 1, "width": 16, "head_width": 8, "patch_size": 56}
FOLDERS = ("golden retriever", "great white shark", "rusty_iron", "stupa")
NAMES = ("golden retriever", "great white shark", "rusty iron", "stupa")
CLIP_DETECTORS = "mcm,clip_cosine,clip_energy,clip_entropy,gl_mcm,neglabel(groups=2),outlier_prompts"


def network(classes: int = 4) -> nn.Module:
    """A factory for `test_cli_clip:network`, any image size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))


def other_network() -> nn.Module:
    model = network()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def imagenet_network() -> nn.Module:
    return network(1000)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Specs of small open_clip models with random weights, saved as open_clip saves its own."""
    specs = {}
    for name, vision in (("small", SMALL), ("large", LARGE)):
        folder = tmp_path_factory.mktemp(name)
        config = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": TEXT}
        facts = {"model_cfg": config, "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}}
        (folder / "open_clip_config.json").write_text(json.dumps(facts))
        torch.manual_seed(0)
        model: nn.Module = open_clip.CLIP(**config)  # pyright: ignore[reportArgumentType]
        for parameter in model.parameters():  # far from the initialisation, so that nothing is near zero or one
            nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
        save_file(model.state_dict(), folder / "open_clip_model.safetensors")
        specs[name] = f"open_clip:local-dir:{folder}"
    return specs


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """known/CLASS NAME/*.png, strange/*.png, names.txt, words.txt."""
    for number, (place, count) in enumerate([*((f"known/{name}", 8) for name in FOLDERS), ("strange", 12)]):
        for index in range(count):
            noise(tmp_path / "photos" / place / f"{index}.png", seed=100 * number + index, shift=40 * number)
    (tmp_path / "photos" / "names.txt").write_text("\n".join(FOLDERS) + "\n\n")
    (tmp_path / "photos" / "words.txt").write_text("\n".join(f"noun {number}" for number in range(40)))
    return tmp_path / "photos"


def noise(file: Path, *, seed: int, shift: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 60, (36, 40, 3)) + shift
    Image.fromarray(pixels.astype(np.uint8)).save(file)


def folders(photos: Path, *more: object) -> tuple[object, ...]:
    """Nothing is learned, so that every image of `known` is scored."""
    return ("--suite", "folders", "--id", photos / "known", "--ood", f"strange={photos / 'strange'}",
            "--calibrators", "none", "--resamples", 0, "--fit-fraction", 0, "--calibrate-fraction", 0,
            *more)  # fmt: skip


def zero_shot(photos: Path, clip: str, *more: object) -> tuple[object, ...]:
    return folders(photos, "--model", clip, "--class-names", photos / "names.txt", "--prompts", "best7", *more)


def left_behind(run: Path) -> tuple[dict[str, Any], list[Record], ScoreFile]:
    facts = json.loads((run / "run.json").read_text())
    return facts, list(read_records(run / "records.jsonl")), ScoreFile.load(run / "scores.safetensors")


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def test_scores_and_accuracy_are_those_of_open_clips_own_recipe(bench: Bench, photos: Path, clips, tmp_path: Path):
    assert bench(*zero_shot(photos, clips["small"], "--detectors", "mcm,energy")).code == 0
    _, records, scores = left_behind(tmp_path / "run")
    made: Any = open_clip.create_model_from_pretrained(clips["small"].removeprefix("open_clip:"))
    model, preprocess = made
    tokenizer = open_clip.get_tokenizer(clips["small"].removeprefix("open_clip:"))
    files = [photos / "known" / name for name in scores.ids["id"]]
    with torch.no_grad():
        images = unit(model.encode_image(torch.stack([preprocess(Image.open(file)) for file in files])))
        rows = []
        for name in NAMES:
            texts = [template.replace("{}", name) for template in prompt_templates("best7")]
            rows.append(unit(unit(model.encode_text(tokenizer(texts))).mean(dim=0)))
        cosines = images @ torch.stack(rows).T
        logits = model.logit_scale.exp() * cosines
    predicted = scores.columns[Column("prediction", clips["small"], "", "id")]
    assert predicted.tolist() == logits.argmax(dim=1).tolist()
    energy = scores.columns[Column("score", clips["small"], "energy", "id")]
    torch.testing.assert_close(energy.float(), -logits.logsumexp(dim=1), rtol=1e-4, atol=1e-4)
    mcm = scores.columns[Column("score", clips["small"], "mcm", "id")]
    torch.testing.assert_close(mcm.float(), 1 - cosines.softmax(dim=1).amax(dim=1), rtol=1e-4, atol=1e-5)
    labels = torch.tensor([FOLDERS.index(file.parent.name) for file in files])
    (accuracy,) = [r.value for r in records if r.metric == "accuracy"]
    assert accuracy == pytest.approx((logits.argmax(dim=1) == labels).double().mean().item())


def test_every_zero_shot_detector_has_a_row_and_the_run_says_what_the_model_was_told(
    bench: Bench, photos: Path, clips, tmp_path: Path
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a sketch of {}\n{}, seen at night\n")
    told = ("--negatives", photos / "words.txt", "--negatives-share", 0.5, "--outlier-prompt", "a blank page",
            "--outlier-prompt", "a wall; white")  # fmt: skip
    result = bench(*zero_shot(photos, clips["small"], "--detectors", CLIP_DETECTORS, *told, "--prompts", prompts))
    assert result.code == 0, result.err
    facts, records, scores = left_behind(tmp_path / "run")
    rows = {r.method: r for r in records if (r.task, r.metric) == ("anomaly", "auroc")}
    assert list(rows) == CLIP_DETECTORS.split(",")
    assert all(row.value is not None for row in rows.values())
    assert facts["zero_shot"]["templates"] == ["a sketch of {}", "{}, seen at night"]
    assert facts["zero_shot"]["class_names"] == facts["class_names"] == list(NAMES)
    assert facts["zero_shot"]["outlier_prompts"] == ["a blank page", "a wall; white"]
    negatives = facts["zero_shot"]["negatives"]
    assert (negatives["source"], negatives["nouns"], negatives["share"]) == ("words.txt", 40, 0.5)
    words = "zero-shot by 2 prompts of the user's own for 4 given class names"
    assert rows["mcm"].texts == words
    assert rows["neglabel(groups=2)"].texts == f"{words}; negative labels: 50% of 40 words of words.txt"
    caption = (tmp_path / "run" / "table.md").read_text().replace("\\", "")
    assert words in caption
    assert caption.count("2 prompts of the user's own") == len(
        [t for t in ("Detectors", "Calibrators") if t in caption]
    )
    assert "outlier_prompts: outlier prompts 'a blank page', 'a wall; white'" in caption

    clip = clips["small"]
    model: Any = open_clip.create_model(clip.removeprefix("open_clip:")).eval()
    tokenizer = open_clip.get_tokenizer(clip.removeprefix("open_clip:"))
    with torch.no_grad():
        outliers = unit(model.encode_text(tokenizer(["a blank page", "a wall; white"])))
        classes = [
            unit(unit(model.encode_text(tokenizer([f"a sketch of {n}", f"{n}, seen at night"]))).mean(dim=0))
            for n in NAMES
        ]
    loaded = load_classifier(clip, clip=ClipPrompts(NAMES, "single"))
    pictures = [Image.open(photos / "strange" / name) for name in scores.ids["strange"]]
    images = loaded.classifier(torch.stack([loaded.transform(picture) for picture in pictures])).features
    masses = (images @ torch.cat([torch.stack(classes), outliers]).T / 0.01).softmax(dim=1)
    found = scores.columns[Column("score", clip, "outlier_prompts", "strange")]
    torch.testing.assert_close(found.float(), masses[:, len(NAMES) :].sum(dim=1), rtol=1e-3, atol=1e-5)


def test_a_second_run_embeds_no_text_and_runs_no_image(bench: Bench, photos: Path, clips, tmp_path: Path, monkeypatch):
    embedded: list[int] = []
    embed = TextTower.embed

    def counting(self: TextTower, texts: list[str]) -> Tensor:
        embedded.append(len(texts))
        return embed(self, texts)

    monkeypatch.setattr(TextTower, "embed", counting)
    told = ("--negatives", photos / "words.txt", "--outlier-prompt", "a blank page")
    arguments = zero_shot(photos, clips["small"], "--detectors", CLIP_DETECTORS, *told)
    first = bench(*arguments)
    assert first.code == 0, first.err
    assert sum(embedded) == 4 * 7 + 40 + 1
    before = (tmp_path / "run" / "records.jsonl").read_text()
    second = bench(*arguments)
    assert sum(embedded) == 4 * 7 + 40 + 1
    assert "32 images of id read from the store, no forward pass" in second.err
    assert (tmp_path / "run" / "records.jsonl").read_text() == before
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 3


def test_an_architecture_with_a_local_checkpoint_is_that_model(
    bench: Bench, photos: Path, clips, tmp_path: Path, monkeypatch
):
    from open_clip import factory

    folder = Path(clips["small"].removeprefix("open_clip:local-dir:"))
    config = json.loads((folder / "open_clip_config.json").read_text())
    monkeypatch.setitem(factory._MODEL_CONFIGS, "tiny-vit", config["model_cfg"])
    file = folder / "open_clip_model.safetensors"
    result = bench(*zero_shot(photos, "open_clip:tiny-vit", "--checkpoint", file, "--detectors", "mcm"))
    assert result.code == 0, result.err
    made: Any = open_clip.create_model_from_pretrained("tiny-vit", pretrained=str(file))
    model, preprocess = made
    scores = left_behind(tmp_path / "run")[2]
    with torch.no_grad():
        pictures = torch.stack([preprocess(Image.open(photos / "known" / name)) for name in scores.ids["id"]])
        prompts = open_clip.SIMPLE_IMAGENET_TEMPLATES
        texts = open_clip.build_zero_shot_classifier(model, open_clip.get_tokenizer("tiny-vit"), NAMES, prompts)
        cosines = unit(model.encode_image(pictures)) @ texts
    found = scores.columns[Column("score", "open_clip:tiny-vit", "mcm", "id")]
    torch.testing.assert_close(found.float(), 1 - cosines.softmax(dim=1).amax(dim=1), rtol=1e-4, atol=1e-5)


WITHOUT_CLIP = {
    "prompts": (["--prompts", "best7"], "--prompts is for zero-shot models; add --model open_clip:ARCH/TAG"),
    "class names": (["--class-names", "x.txt"], "--class-names is for zero-shot models"),
    "outliers": (["--outlier-prompt", "a wall"], "--outlier-prompt is for zero-shot models"),
    "negatives": (["--negatives", "wordnet"], "--negatives is for zero-shot models"),
    "a share of nothing": (["--negatives-share", "0.5"], "--negatives-share needs --negatives wordnet"),
    "a second opinion of another kind": (["--second-opinion", "timm:resnet50"], "open_clip:ARCH/TAG; got 'timm:res"),
    "gl_mcm": (["--detectors", "gl_mcm"], "gl_mcm needs the tap local_mcm of test_cli_clip:network: only zero-shot"),
    "neglabel": (["--detectors", "neglabel"], "take --model open_clip:ARCH/TAG with --negatives"),
    "outlier_prompts": (["--detectors", "outlier_prompts"], "open_clip:ARCH/TAG with --outlier-prompt"),
}


@pytest.mark.parametrize("case", list(WITHOUT_CLIP))
def test_words_and_their_detectors_without_a_zero_shot_model_are_one_line(bench: Bench, photos: Path, case: str):
    arguments, message = WITHOUT_CLIP[case]
    result = bench(*folders(photos, "--model", "test_cli_clip:network", "--detectors", "msp", *arguments))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


WRONG = {
    "unknown prompts": (["--prompts", "best8"], "--prompts must be openai80, best7, single, or a file"),
    "prompts without a place": (["--prompts", "names.txt"], "needs {} where the class name goes; got 'golden retr"),
    "no names": (["--class-names", "nowhere.txt"], "--class-names 'nowhere.txt' cannot be read: No such file"),
    "one name": (["--class-names", "one.txt"], "needs two class names or more, one a line; got 1"),
    "names twice": (["--class-names", "twice.txt"], "--class-names 'twice.txt' names 'a' twice"),
    "no words": (["--negatives", "nowhere.txt"], "there is no word list at nowhere.txt"),
    "too small a share": (["--negatives", "words.txt", "--negatives-share", "0.001"], "leaves no negative label"),
    "share in percent": (["--negatives", "words.txt", "--negatives-share", "15"], "share must be in (0, 1]"),
    "no negatives": (["--detectors", "neglabel"], "no negative labels were given; add --negatives wordnet"),
    "outliers with a place": (["--outlier-prompt", "a {} page"], "it has no {} for a class name; got 'a {} page'"),
    "no outliers": (["--detectors", "outlier_prompts"], "no outlier prompts were given; add --outlier-prompt"),
    "size of the official transform": (["--transform", "official"], "this model takes 32x32; use --transform own"),
    "its own opinion": (["--second-opinion", "SPEC"], "is the model itself; write mcm among the --detectors"),
    "a number of classes": (["--classes", "4", "--no-pretrained"], "give names, not a number"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_is_wrong_for_a_zero_shot_model_is_one_line(bench: Bench, photos: Path, clips, case: str, monkeypatch):
    monkeypatch.chdir(photos)
    Path("one.txt").write_text("a\n")
    Path("twice.txt").write_text("a\nb\na\n")
    arguments, message = WRONG[case]
    arguments = [clips["small"] if word == "SPEC" else word for word in arguments]
    result = bench(*zero_shot(photos, clips["small"], "--detectors", "msp", *arguments))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result.err
    assert message in result.err


def test_folders_of_other_classes_than_imagenets_need_their_names(bench: Bench, photos: Path, clips):
    result = bench(*folders(photos, "--model", clips["small"], "--prompts", "single", "--detectors", "mcm"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "folders do not stand for its 1000 classes" in result.err
    assert "other classes than ImageNet's are named with --class-names FILE" in result.err
    two = ("--model", clips["small"], "--model", "test_cli_clip:network", "--prompts", "single", "--detectors", "mcm")
    assert "zero-shot models take theirs from --class-names FILE" in bench(*folders(photos, *two)).err


def test_a_main_model_without_names_takes_its_folders_from_the_names_given(
    bench: Bench, photos: Path, clips, tmp_path: Path
):
    names = photos / "other-order.txt"
    names.write_text("\n".join(reversed(FOLDERS)))
    told = ("--class-names", names, "--second-opinion", clips["small"], "--detectors", "msp", "--prompts", "single")
    assert bench(*folders(photos, "--model", "test_cli_clip:network", *told)).code == 0
    scores = left_behind(tmp_path / "run")[2]
    expected = [FOLDERS[::-1].index(name.partition("/")[0]) for name in scores.ids["id"]]
    assert scores.columns[Column("label", "", "", "id")].tolist() == expected


@pytest.mark.slow
def test_with_all_detectors_those_without_their_texts_are_left_out_with_the_remedy(
    bench: Bench, photos: Path, clips, tmp_path: Path
):
    models = ("--model", "test_cli_clip:network", "--ensemble", "none", "--fit-fraction", 0.5)
    result = bench(*zero_shot(photos, clips["small"], *models, "--detectors", "all"))
    assert result.code == 0, result.err
    facts, records, _ = left_behind(tmp_path / "run")
    of_clip, of_network = (facts["left_out"][spec] for spec in (clips["small"], "test_cli_clip:network"))
    assert "gl_mcm" not in of_clip
    assert "add --negatives wordnet" in of_clip["neglabel"]
    assert "add --outlier-prompt" in of_clip["outlier_prompts"]
    for name in ("gl_mcm", "neglabel", "outlier_prompts"):
        assert "take --model open_clip:ARCH/TAG" in of_network[name]
    assert {r.model for r in records if r.method == "gl_mcm"} == {clips["small"]}


def test_a_named_detector_that_one_of_two_models_lacks_is_left_out_there(
    bench: Bench, photos: Path, clips, tmp_path: Path
):
    more = ("--model", "test_cli_clip:network", "--detectors", "gl_mcm", "--ensemble", "none")
    result = bench(*zero_shot(photos, clips["small"], *more))
    assert result.code == 0, result.err
    facts, records, _ = left_behind(tmp_path / "run")
    assert {r.model for r in records if r.method == "gl_mcm"} == {clips["small"]}
    assert "only zero-shot models show it" in facts["left_out"]["test_cli_clip:network"]["gl_mcm"]


def test_a_named_detector_that_only_the_ensemble_can_serve_is_left_out_of_its_members(
    bench: Bench, photos: Path, tmp_path: Path
):
    models = ("--model", "test_cli_clip:network", "--member", "test_cli_clip:other_network")
    result = bench(*folders(photos, *models, "--detectors", "msp,mutual_information", "--ensemble", "mean_probability"))
    assert result.code == 0, result.err
    facts, records, _ = left_behind(tmp_path / "run")
    assert {r.model for r in records if r.method == "mutual_information"} == {
        "ensemble[test_cli_clip:network, test_cli_clip:other_network]"
    }
    assert "comes from no single classifier" in facts["left_out"]["test_cli_clip:network"]["mutual_information"]
    alone = bench(*folders(photos, *models[:2], "--detectors", "mutual_information"))
    assert (alone.code, alone.err.splitlines()[-1].count("comes from no single classifier")) == (2, 1)


def test_the_official_transform_keeps_clips_own_normalisation_and_says_so(
    bench: Bench, photos: Path, clips, tmp_path: Path
):
    result = bench(*zero_shot(photos, clips["large"], "--detectors", "energy", "--transform", "official"))
    assert result.code == 0, result.err
    _, records, scores = left_behind(tmp_path / "run")
    words = "resize 256 bilinear, centre crop 224, mean 0.4 0.5 0.6, std 0.2 0.3 0.25 (the model's own mean and std"
    assert all(record.transform.startswith(words) for record in records)
    assert "(the model's own mean and std, not ImageNet's)" in (tmp_path / "run" / "table.md").read_text()
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

    spelt_out: Any = Compose([Resize(256), CenterCrop(224), ToTensor(), Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.25])])
    model: Any = open_clip.create_model(clips["large"].removeprefix("open_clip:")).eval()
    head = load_classifier(clips["large"], clip=ClipPrompts(NAMES, "best7")).classifier.head.weight
    pictures = [spelt_out(Image.open(photos / "strange" / name)) for name in scores.ids["strange"]]
    with torch.no_grad():
        logits = unit(model.encode_image(torch.stack(pictures))) @ head.T
    found = scores.columns[Column("score", clips["large"], "energy", "strange")]
    torch.testing.assert_close(found.float(), -logits.logsumexp(dim=1), rtol=1e-3, atol=1e-3)


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """ImageNet-A, ImageNet-O and validation images, three classes of each, as their folders are published."""
    a_list, o_list = class_list("imagenet_a"), class_list("imagenet_o")
    both = [wnid for wnid in a_list if wnid in o_list][:3]
    index, labels = class_list("imagenet1k"), validation_labels()
    for number, wnid in enumerate(both):
        for seed in range(3):
            noise(tmp_path / f"root/imagenet-a/{wnid}/{seed}_a _ b_0.5.jpg", seed=10 * number + seed)
            noise(tmp_path / f"root/imagenet-o/{wnid}/benthos{seed}.JPEG", seed=100 + 10 * number + seed, shift=50)
        for row in [n for n, label in enumerate(labels, 1) if label == index[wnid]][:3]:
            noise(tmp_path / f"root/imagenet-1k/val/{wnid}/ILSVRC2012_val_{row:08d}.JPEG", seed=200 + row, shift=90)
    return tmp_path / "root"


def test_under_the_official_mask_a_zero_shot_model_is_one_of_200_names(
    bench: Bench, official: Path, photos: Path, clips, tmp_path: Path
):
    clip = clips["small"]
    result = bench("--suite", "natural-adversarial", "--data-root", official, "--learn", "none", "--model", clip,
                   "--prompts", "single", "--negatives", photos / "words.txt", "--negatives-share", 0.3,
                   "--detectors", "mcm,gl_mcm,neglabel(groups=2)", "--calibrators", "none", "--resamples", 0,
                   "--model", "test_cli_clip:imagenet_network", "--ensemble", "none",
                   "--second-opinion", clip)  # fmt: skip
    assert result.code == 0, result.err
    _, records, scores = left_behind(tmp_path / "run")
    names = open_clip.IMAGENET_CLASSNAMES
    for part, mask, indices in (
        ("imagenet-a", "imagenet-a:200", class_list("imagenet_a")),
        ("imagenet-o", "imagenet-o:200", class_list("imagenet_o")),
    ):
        alone = ClipPrompts(
            tuple(names[index] for index in indices.values()),
            "single",
            negatives=NegativeLabels(read_vocabulary(photos / "words.txt"), share=0.3),
        )
        loaded = load_classifier(clip, clip=alone, taps=("local_mcm", "negative_cosines"))
        pictures = [Image.open(official / part / name.partition("/")[2]) for name in scores.ids[part]]
        outputs = loaded.classifier(torch.stack([loaded.transform(picture) for picture in pictures]))
        cosines = outputs.features @ unit(outputs.head.weight).T
        whole = 1 - cosines.double().softmax(dim=1).amax(dim=1)
        patches = outputs.taps["local_mcm"].double()
        found = {m: scores.columns[Column("score", clip, m, part, mask)].double() for m in ("mcm", "gl_mcm")}
        torch.testing.assert_close(found["mcm"], whole, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["gl_mcm"], whole + patches, rtol=1e-4, atol=1e-6)
        both = torch.cat([cosines, outputs.taps["negative_cosines"]], dim=1).double()
        groups = both[:, 200:][:, torch.randperm(12, generator=torch.Generator().manual_seed(0))].view(-1, 2, 6)
        masses = [
            torch.cat([both[:, :200], group], dim=1).div(0.01).softmax(dim=1)[:, 200:].sum(dim=1)
            for group in groups.unbind(dim=1)
        ]
        negatives = scores.columns[Column("score", clip, "neglabel(groups=2)", part, mask)].double()
        torch.testing.assert_close(negatives, torch.stack(masses).mean(dim=0), rtol=1e-3, atol=1e-6)
        # the second opinion on another model's errors is this very score, under the same mask
        second = scores.columns[Column("score", "test_cli_clip:imagenet_network", f"{clip}+mcm", part, mask)]
        torch.testing.assert_close(second.double(), whole, rtol=1e-4, atol=1e-6)
    rows = {(r.model, r.task) for r in records if r.method == f"{clip}+mcm" and r.value is not None}
    assert rows == {("test_cli_clip:imagenet_network", task) for task in ("misclassification", "anomaly")}


def test_a_second_opinion_on_ones_own_images_is_that_models_mcm(bench: Bench, photos: Path, clips, tmp_path: Path):
    told = ("--class-names", photos / "names.txt", "--prompts", "single", "--detectors", "mcm")
    clip = clips["small"]
    (photos / "strange" / "3.png").write_bytes(b"no image")
    main = folders(photos, "--model", "test_cli_clip:network", "--second-opinion", clip, *told)
    assert bench(*main).code == 0
    assert bench(*folders(photos, "--model", clip, *told, "--out", tmp_path / "clip")).code == 0
    facts, records, scores = left_behind(tmp_path / "run")
    theirs = left_behind(tmp_path / "clip")[2]
    for part in ("id", "strange"):
        assert scores.ids[part] == theirs.ids[part]
        second = scores.columns[Column("score", "test_cli_clip:network", f"{clip}+mcm", part)]
        assert torch.equal(second, theirs.columns[Column("score", clip, "mcm", part)])
        assert not torch.equal(second, scores.columns[Column("score", "test_cli_clip:network", "mcm", part)])
    row = next(r for r in records if (r.method, r.task) == (f"{clip}+mcm", "misclassification"))
    own = next(r for r in records if (r.method, r.task) == ("mcm", "misclassification"))
    assert (row.positives, row.negatives) == (own.positives, own.negatives)  # the errors are those of the main model
    assert row.texts.startswith(f"second opinion of {clip} (resize")
    assert row.texts.endswith("zero-shot by 1 prompt named single for 4 given class names")
    assert facts["second_opinion"]["spec"] == clip
    assert f"{clip}+mcm" in (tmp_path / "run" / "table.csv").read_text()


def test_a_second_opinion_must_know_the_same_classes(bench: Bench, photos: Path, clips):
    def refused(*arguments: object) -> str:
        result = bench(*folders(photos, "--detectors", "msp", "--second-opinion", clips["small"], *arguments))
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        return result.err

    four = ("--model", "test_cli_clip:network")
    assert "must know the 4 classes of test_cli_clip:network by their names, but has 1000" in refused(*four)
    (photos / "three.txt").write_text("a\nb\nc\n")
    assert "but has 3 names; give --class-names FILE" in refused(*four, "--class-names", photos / "three.txt")
    labels = photos / "labels.csv"
    labels.write_text("".join(f"{n}/{i}.png,{k}\n" for k, n in enumerate(FOLDERS) for i in range(8)))
    unknown = ("--model", "test_cli_clip:imagenet_network", "--labels", labels)
    assert "the 1000 classes of test_cli_clip:imagenet_network may not be ImageNet's" in refused(*unknown)
    digits = bench("--suite", "digits", "--second-opinion", clips["small"])
    assert (digits.code, digits.err.count("\n")) == (2, 1)
    assert "the digits suite brings its own images and networks" in digits.err
