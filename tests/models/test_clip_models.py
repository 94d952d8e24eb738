import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from ood_toolkit.detectors import GLMCMDetector, MCMDetector, NegLabelDetector, OutlierPromptsDetector
from ood_toolkit.models import ClipPrompts, load_classifier
from ood_toolkit.models.clip import TextTower, prompt_templates
from ood_toolkit.models.negatives import NegativeLabels, Vocabulary
from ood_toolkit.models.patches import patch_reader
from ood_toolkit.models.stages import as_map

TEXT = {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 12, "vision_cfg": VIT, "text_cfg": TEXT},
    "one-block": {"embed_dim": 12, "vision_cfg": {**VIT, "layers": 1}, "text_cfg": TEXT},
    "resnet": {
        "embed_dim": 12,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64},
        "text_cfg": TEXT,
    },
    "timm": {
        "embed_dim": 12,
        "vision_cfg": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160},
        "text_cfg": TEXT,
    },
    "coca": {
        "embed_dim": 12,
        "vision_cfg": {**VIT, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**TEXT, "dim_head": 8, "attn_pooler_heads": 2},
        "custom_text": True,
    },
    "siglip-like": {"embed_dim": 12, "vision_cfg": VIT, "text_cfg": TEXT, "init_logit_bias": -7.5},
}
NAMES = ("tench", "great white shark", "{odd} name", "stupa")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small open_clip models with random weights, saved as open_clip saves its own."""
    made = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        folder = tmp_path_factory.mktemp(name)
        text = json.dumps({"model_cfg": config, "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}})
        (folder / "open_clip_config.json").write_text(text)
        torch.manual_seed(number)
        kind: Any = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CLIP
        model: nn.Module = kind(**{key: value for key, value in config.items() if key != "custom_text"})
        for parameter in model.parameters():  # far from the initialisation, so that nothing is near zero or one
            nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
        save_file(model.state_dict(), folder / "open_clip_model.safetensors")
        made[name] = folder
    return made


def _spec(folder: Path) -> str:
    return f"open_clip:local-dir:{folder}"


def _reference(folder: Path) -> tuple[Any, Any]:
    spec = f"local-dir:{folder}"
    return open_clip.create_model(spec).eval(), open_clip.get_tokenizer(spec)


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def _pictures(count: int = 3, side: int = 40) -> list[Image.Image]:
    return [Image.fromarray(torch.randint(256, (side, side + 8, 3), dtype=torch.uint8).numpy()) for _ in range(count)]


@pytest.mark.parametrize("templates", ["single", "best7", ("a {} in the rain", "{}, drawn")])
def test_the_text_head_equals_a_literal_computation(folders, templates):
    loaded = load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, templates))
    model, tokenizer = _reference(folders["vit"])
    patterns = templates if isinstance(templates, tuple) else prompt_templates(templates)
    rows = []
    with torch.no_grad():
        for name in NAMES:
            units = [_unit(model.encode_text(tokenizer([p.replace("{}", name)])))[0] for p in patterns]
            rows.append(model.logit_scale.exp() * _unit(sum(units, torch.zeros(12)) / len(units)))
    torch.testing.assert_close(loaded.classifier.head.weight, torch.stack(rows), rtol=1e-5, atol=1e-5)
    assert (loaded.classifier.head.bias == 0).all()
    assert loaded.class_names == NAMES


@pytest.mark.parametrize("name", ["vit", "resnet", "siglip-like", "timm", "coca"])
def test_zero_shot_logits_equal_open_clips_own_recipe(folders, name):
    loaded = load_classifier(_spec(folders[name]), clip=ClipPrompts(NAMES, "best7"))
    spec = f"local-dir:{folders[name]}"
    made: Any = open_clip.create_model_from_pretrained(spec)
    model, preprocess = made
    tokenizer = open_clip.get_tokenizer(spec)
    pictures = _pictures(side=70)
    templates = open_clip.SIMPLE_IMAGENET_TEMPLATES
    with torch.no_grad():
        weights = open_clip.build_zero_shot_classifier(model.eval(), tokenizer, NAMES, templates)
        images = torch.stack([preprocess(picture) for picture in pictures])
        embeddings = model.encode_image(images, normalize=True)
        expected = model.logit_scale.exp() * embeddings @ weights
        expected = expected if model.logit_bias is None else expected + model.logit_bias
    outputs = loaded.classifier(torch.stack([loaded.transform(picture) for picture in pictures]))
    torch.testing.assert_close(outputs.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.features, embeddings, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.head(outputs.features), outputs.logits, rtol=1e-5, atol=1e-5)


def test_the_shipped_names_and_templates_are_openais():
    assert ClipPrompts().class_names == tuple(open_clip.IMAGENET_CLASSNAMES)
    assert len(ClipPrompts().class_names) == 1000
    assert ClipPrompts().class_names[:2] == ("tench", "goldfish")
    for name, shipped in (
        ("openai80", open_clip.OPENAI_IMAGENET_TEMPLATES),
        ("best7", open_clip.SIMPLE_IMAGENET_TEMPLATES),
    ):
        assert ClipPrompts(templates=name).texts("great auk") == [template("great auk") for template in shipped]
    assert len(prompt_templates("openai80")) == 80
    assert ClipPrompts(templates="single").texts("great auk") == ["a photo of a great auk."]


def test_text_heads_are_computed_once_and_kept_by_names_prompts_and_weights(folders, tmp_path, monkeypatch):
    embedded: list[int] = []
    embed = TextTower.embed

    def counting(self: TextTower, texts: list[str]) -> Tensor:
        embedded.append(len(texts))
        return embed(self, texts)

    monkeypatch.setattr(TextTower, "embed", counting)

    def head(names: tuple[str, ...] = NAMES, templates: str = "best7", model: str = "vit") -> Tensor:
        prompts = ClipPrompts(names, templates, cache=tmp_path)
        return load_classifier(_spec(folders[model]), clip=prompts).classifier.head.weight

    first = head()
    assert sum(embedded) == 28
    assert torch.equal(head(), first)
    assert sum(embedded) == 28
    others = [head(names=NAMES[::-1]), head(templates="single"), head(model="siglip-like")]
    assert sum(embedded) == 28 + 28 + 4 + 28
    assert all(not torch.equal(other, first) for other in others)
    torch.testing.assert_close(others[0].flip(0), first)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    assert {file.suffix for file in files} == {".safetensors"}
    for file in files:
        file.write_bytes(b"cut off")
    assert torch.equal(head(), first)


def test_a_killed_run_leaves_no_text_head_behind(folders, tmp_path, monkeypatch):
    import safetensors.torch

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, "single", cache=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_outlier_prompts_fill_their_tap_and_their_detector(folders):
    outliers = ("a blank page", "a photo of a street")
    prompts = ClipPrompts(NAMES, "single", outliers=outliers)
    loaded = load_classifier(_spec(folders["vit"]), clip=prompts, taps=("outlier_cosines",))
    outputs = loaded.classifier(torch.rand(3, 3, 32, 32))
    model, tokenizer = _reference(folders["vit"])
    with torch.no_grad():
        texts = _unit(model.encode_text(tokenizer(list(outliers))))
    cosines = outputs.features @ texts.T
    torch.testing.assert_close(outputs.taps["outlier_cosines"], cosines)
    known = outputs.features @ _unit(outputs.head.weight).T
    masses = torch.cat([known, cosines], dim=1).div(0.01).softmax(dim=1)[:, len(NAMES) :].sum(dim=1)
    scores = OutlierPromptsDetector().fit(outputs)(outputs)
    torch.testing.assert_close(scores, masses, rtol=1e-3, atol=1e-5)


def test_negative_labels_fill_their_tap_and_their_detector(folders):
    vocabulary = Vocabulary(tuple(f"noun {number}" for number in range(30)), ("red", "tall", "round", "wet"))
    negatives = NegativeLabels(vocabulary, share=0.5)
    prompts = ClipPrompts(NAMES, "single", negatives=negatives)
    loaded = load_classifier(_spec(folders["vit"]), clip=prompts, taps=("negative_cosines",))
    outputs = loaded.classifier(torch.rand(3, 3, 32, 32))
    model, tokenizer = _reference(folders["vit"])
    classes = _unit(outputs.head.weight)
    kept = []
    with torch.no_grad():
        for words, prompt in ((vocabulary.nouns, "The nice {}."), (vocabulary.adjectives, "This is a {} photo")):
            texts = [_unit(model.encode_text(tokenizer([prompt.format(word)])))[0] for word in words]
            closeness = [float(torch.quantile(classes @ text, 0.95)) for text in texts]
            ranked = sorted(range(len(words)), key=closeness.__getitem__)
            kept += [texts[index] for index in ranked[: len(words) // 2]]
    expected = outputs.features @ torch.stack(kept).T
    torch.testing.assert_close(outputs.taps["negative_cosines"], expected, rtol=1e-4, atol=1e-5)
    scores = NegLabelDetector(groups=1).fit(outputs)(outputs)
    both = torch.cat([outputs.features @ classes.T, expected], dim=1).div(0.01).softmax(dim=1)
    torch.testing.assert_close(scores, both[:, len(NAMES) :].sum(dim=1), rtol=1e-3, atol=1e-5)


def _value_patches(visual: Any, images: Tensor) -> Tensor:
    """GL-MCM's patches spelt out: the last block's value projection in place of its attention."""
    tokens = visual._embeds(images)
    for block in visual.transformer.resblocks[:-1]:
        tokens = block(tokens)
    last = visual.transformer.resblocks[-1]
    width = tokens.shape[-1]
    weight, bias = last.attn.in_proj_weight[2 * width :], last.attn.in_proj_bias[2 * width :]
    values = last.ln_1(tokens) @ weight.T + bias
    values = values @ last.attn.out_proj.weight.T + last.attn.out_proj.bias + tokens
    values = values + last.mlp(last.ln_2(values))
    return visual.ln_post(values[:, 1:]) @ visual.proj


def _pooled_values(visual: Any, images: Tensor) -> Tensor:
    layer = visual.layer4(visual.layer3(visual.layer2(visual.layer1(visual.stem(images)))))
    pool = visual.attnpool
    positions = layer.flatten(2).transpose(1, 2)
    values = positions @ pool.v_proj.weight.T + pool.v_proj.bias
    return values @ pool.c_proj.weight.T + pool.c_proj.bias


def _output_patches(visual: Any, images: Tensor) -> Tensor:
    tokens = visual.transformer(visual._embeds(images))
    return visual.ln_post(tokens[:, 1:]) @ visual.proj


@pytest.mark.parametrize(
    ("name", "tokens", "patches"),
    [
        ("vit", "values", _value_patches),
        ("vit", "output", _output_patches),
        ("one-block", "values", _value_patches),
        ("resnet", "values", _pooled_values),
    ],
)
def test_patches_are_the_towers_own_without_the_class_token(folders, name, tokens, patches):
    visual = _reference(folders[name])[0].visual
    reader = patch_reader(visual, tokens)
    assert reader is not None
    side = CONFIGS[name]["vision_cfg"]["image_size"]
    images, seen = torch.rand(3, 3, side, side), []
    hook = visual.get_submodule(reader.layer).register_forward_hook(lambda *call: seen.append(as_map(call[2], visual)))
    with torch.no_grad():
        visual(images)
        hook.remove()
        torch.testing.assert_close(reader.read(seen[0]), patches(visual, images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "spec", "patches", "temperature"),
    [
        ("vit", "local_mcm", _value_patches, 1.0),
        ("vit", "local_mcm(temperature=0.01)", _value_patches, 0.01),
        ("vit", "local_mcm(tokens='output')", _output_patches, 1.0),
        ("one-block", "local_mcm", _value_patches, 1.0),
        ("resnet", "local_mcm", _pooled_values, 1.0),
    ],
)
def test_local_mcm_is_the_best_patch_by_hand(folders, name, spec, patches, temperature):
    loaded = load_classifier(_spec(folders[name]), clip=ClipPrompts(NAMES, "single"), taps=(spec,))
    classifier = loaded.classifier
    images = torch.rand(3, *loaded.input_size)
    outputs = classifier(images)
    with torch.no_grad():
        cosines = _unit(patches(classifier.model.visual, classifier._normalise(images))) @ _unit(outputs.head.weight).T
    expected = 1 - (cosines.double() / temperature).softmax(dim=-1).amax(dim=(1, 2))
    torch.testing.assert_close(outputs.taps[spec].double(), expected, rtol=1e-4, atol=1e-6)
    if spec == "local_mcm":
        whole = MCMDetector().fit(outputs)(outputs)
        torch.testing.assert_close(GLMCMDetector().fit(outputs)(outputs), whole + expected.float())


@pytest.mark.parametrize(("name", "patches"), [("vit", _value_patches), ("resnet", _pooled_values)])
def test_under_a_class_mask_local_mcm_is_the_best_patch_among_its_classes(folders, name, patches):
    tap = "local_mcm(temperature=0.01, classes=(3, 0))"
    loaded = load_classifier(_spec(folders[name]), clip=ClipPrompts(NAMES, "single"), taps=(tap,))
    images = torch.rand(4, *loaded.input_size)
    outputs = loaded.classifier(images)
    model = loaded.classifier.model
    with torch.no_grad():
        texts = _unit(outputs.head.weight)[[3, 0]]
        cosines = _unit(patches(model.visual, loaded.classifier._normalise(images))) @ texts.T
    expected = [min(1 - float((patch.double() / 0.01).softmax(0).max()) for patch in image) for image in cosines]
    assert outputs.taps[tap].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_under_a_class_mask_negative_labels_are_those_far_from_its_classes(folders):
    words = tuple(f"noun {number}" for number in range(40))
    negatives = NegativeLabels(Vocabulary(words), share=0.25)
    prompts = ClipPrompts(NAMES, "single", negatives=negatives, subsets=((3, 0), (1, 2)))
    tap = "negative_cosines(classes=(3, 0))"
    loaded = load_classifier(_spec(folders["vit"]), clip=prompts, taps=(tap, "negative_cosines"))
    outputs = loaded.classifier(torch.rand(3, 3, 32, 32))
    model, tokenizer = _reference(folders["vit"])
    with torch.no_grad():
        texts = _unit(model.encode_text(tokenizer([f"The nice {word}." for word in words])))
    classes = _unit(outputs.head.weight)[[3, 0]]
    closeness = [float(torch.quantile(classes @ text, 0.95)) for text in texts]
    chosen = sorted(range(len(words)), key=closeness.__getitem__)[:10]
    torch.testing.assert_close(outputs.taps[tap], outputs.features @ texts[chosen].T, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs.taps[tap], outputs.taps["negative_cosines"])
    other = ClipPrompts(NAMES, "single", negatives=negatives)
    fingerprints = [load_classifier(_spec(folders["vit"]), clip=p).classifier.fingerprint() for p in (prompts, other)]
    assert fingerprints[0] == fingerprints[1]  # the store of outputs serves every mask
    with pytest.raises(ValueError, match="were not chosen for a mask of 1 classes"):
        load_classifier(_spec(folders["vit"]), clip=prompts, taps=("negative_cosines(classes=(1,))",))


def test_every_detector_that_asks_for_no_other_tap_reads_a_zero_shot_model(folders):
    from ood_toolkit.registry import build_detector

    loaded = load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, "single"))
    images = torch.rand(40, 3, 32, 32)
    train = loaded.classifier(images)
    train = train.with_labels(torch.arange(40) % len(NAMES))
    for name in ("msp", "energy", "mcm", "clip_cosine", "vim(dim=4)", "knn(k=3)", "mahalanobis", "react", "gradnorm"):
        detector: Any = build_detector(name)
        assert detector.fit(train)(train).isfinite().all(), name


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_autocast_changes_a_zero_shot_model_by_its_rounding_only(folders, amp):
    taps = ("local_mcm", "outlier_cosines")
    prompts = ClipPrompts(NAMES, "single", outliers=("a blank page",))
    full, half = (
        load_classifier(_spec(folders["vit"]), clip=prompts, taps=taps, amp=dtype).classifier for dtype in (None, amp)
    )
    images = torch.rand(3, 3, 32, 32)
    expected, found = full(images), half(images)
    torch.testing.assert_close(found.features, expected.features, rtol=0.05, atol=0.02)
    for tap in taps:
        torch.testing.assert_close(found.taps[tap], expected.taps[tap], rtol=0.05, atol=0.03)


def test_patches_of_an_image_do_not_depend_on_its_batch(folders):
    loaded = load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, "single"), taps=("local_mcm",))
    images = torch.rand(5, 3, 32, 32)
    together = loaded.classifier(images).taps["local_mcm"]
    alone = torch.cat([loaded.classifier(image).taps["local_mcm"] for image in images.split(1)])
    torch.testing.assert_close(together, alone)


def test_taps_without_their_texts_are_gaps_and_not_errors(folders):
    taps = ("negative_cosines", "outlier_cosines", "local_mcm")
    loaded = load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, "single"), taps=taps)
    assert set(loaded.classifier(torch.rand(2, 3, 32, 32)).taps) == {"local_mcm"}
    assert set(loaded.classifier.tap_gaps) == {"negative_cosines", "outlier_cosines"}
    for name in ("timm", "coca"):
        pooled = load_classifier(_spec(folders[name]), clip=ClipPrompts(NAMES, "single"), taps=("local_mcm",))
        assert set(pooled.classifier.tap_gaps) == {"local_mcm"}
    with pytest.raises(ValueError, match="patch tokens are values or output, got 'keys'"):
        load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, "single"), taps=("local_mcm(tokens='keys')",))
    with pytest.raises(ValueError, match="ModifiedResNet shows no patches of tokens='output'"):
        load_classifier(_spec(folders["resnet"]), clip=ClipPrompts(NAMES), taps=("local_mcm(tokens='output')",))


def test_texts_are_part_of_the_fingerprint(folders):
    prompts = [
        ClipPrompts(NAMES, "single"),
        ClipPrompts(NAMES, "best7"),
        ClipPrompts(NAMES, "single", outliers=("a blank page",)),
        ClipPrompts(NAMES, "single", outliers=("an empty page",)),
    ]
    prints = [load_classifier(_spec(folders["vit"]), clip=each).classifier.fingerprint() for each in prompts]
    assert len(set(prints)) == len(prints)
    assert load_classifier(_spec(folders["vit"]), clip=prompts[0]).classifier.fingerprint() == prints[0]


def test_an_architecture_with_a_checkpoint_is_that_checkpoint(folders, tmp_path, monkeypatch):
    from open_clip import factory

    monkeypatch.setitem(factory._MODEL_CONFIGS, "tiny-vit", CONFIGS["vit"])
    file = folders["vit"] / "open_clip_model.safetensors"
    loaded = load_classifier("open_clip:tiny-vit", checkpoint=file, clip=ClipPrompts(NAMES, "single"))
    same = load_classifier(_spec(folders["vit"]), clip=ClipPrompts(NAMES, "single"))
    torch.testing.assert_close(loaded.classifier.head.weight, same.classifier.head.weight)
    wrong = folders["resnet"] / "open_clip_model.safetensors"
    with pytest.raises(ValueError, match="is no checkpoint of open_clip:tiny-vit") as caught:
        load_classifier("open_clip:tiny-vit", checkpoint=wrong, clip=ClipPrompts(NAMES, "single"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="there is no checkpoint at"):
        load_classifier("open_clip:tiny-vit", checkpoint=tmp_path / "none.pt")
    with pytest.raises(ValueError, match=r"needs weights: write open_clip:tiny-vit/TAG .*--checkpoint FILE"):
        load_classifier("open_clip:tiny-vit")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("open_clip:ViT-B-33", "no open_clip architecture is named 'ViT-B-33'; did you mean 'ViT-B-32'"),
        ("open_clip:ViT-B-32/opena", "no weights of ViT-B-32 is named 'opena'; did you mean 'openai'"),
        ("open_clip:local-dir:/no/such/folder", "cannot be loaded"),
    ],
)
def test_a_clip_spec_that_names_nothing_is_answered_in_one_line(spec, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        load_classifier(spec)
    assert "\n" not in str(caught.value)


def test_published_openai_weights_run_with_their_own_activation(monkeypatch):
    asked: dict[str, Any] = {}

    def offline(name: str, **settings: Any) -> nn.Module:
        asked.update(settings, name=name)
        raise OSError("cannot reach the hub")

    monkeypatch.setattr(open_clip, "create_model", offline)
    for tag, activation in (("openai", True), ("laion2b_s34b_b79k", False)):
        with pytest.raises(ValueError, match=r"cannot be loaded \(cannot reach the hub\).*--checkpoint FILE"):
            load_classifier(f"open_clip:ViT-B-32/{tag}")
        assert (asked["name"], asked["pretrained"], asked["force_quick_gelu"]) == ("ViT-B-32", tag, activation)


def test_prompts_are_for_clip_models_and_are_checked():
    with pytest.raises(ValueError, match="class names and prompts are for open_clip: models, not for timm:resnet10t"):
        load_classifier("timm:resnet10t", pretrained=False, clip=ClipPrompts())
    with pytest.raises(ValueError, match="known: openai80, best7, single"):
        ClipPrompts(templates="80")
    with pytest.raises(ValueError, match=r"every template needs {}"):
        ClipPrompts(templates=("a photo",))
    with pytest.raises(ValueError, match="at least two class names"):
        ClipPrompts(("tench",))
    with pytest.raises(ValueError, match="give names, not a number"):
        load_classifier("open_clip:ViT-B-32", checkpoint="x.pt", classes=10)
