"""CLIP and kin as zero-shot classifiers: the text head, the texts beside it, and the taps that such models bring.

`Head(scale · text embeddings, bias)` over unit image embeddings is an ordinary linear head, so every detector reads a
zero-shot classifier, and the law `head(features) == logits` holds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.detectors.clip import local_concept_mismatch
from ood_toolkit.models.afterwards import Afterwards
from ood_toolkit.models.negatives import NegativeLabels, farthest
from ood_toolkit.models.patches import PatchReader, patch_reader
from ood_toolkit.models.reductions import Reduction, Tap
from ood_toolkit.models.stages import Map
from ood_toolkit.models.text_cache import cached_tensor
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import l2_normalise

TEMPLATE_SETS = ("openai80", "best7", "single")
"""Names of the prompt sets: OpenAI's 80 ImageNet templates, the 7 best of them, and "a photo of a {}."."""

_TEXTS_AT_ONCE = 800
"""How many texts are embedded in one pass: 10 classes of 80 templates, as open_clip does by default."""

Tokenizer = Callable[[list[str]], Tensor]
"""Texts → token ids (N, context length)."""


@dataclass(frozen=True)
class ClipPrompts:
    """What a zero-shot classifier is told in words.

    Args:
        classes: one name per class; empty for OpenAI's names of the 1000 ImageNet classes.
        templates: a name in `TEMPLATE_SETS`, or templates of your own with `{}` where the class name goes. A class is
            the mean of the unit embeddings of its texts, at unit length again.
        outliers: whole texts for what should not come, such as "a blank page"; they fill the tap "outlier_cosines".
        negatives: how the negative labels of NegLabel are chosen; they fill the tap "negative_cosines".
        subsets: class masks, as class indices. Negative labels are chosen for each of them too, by its own classes:
            `negative_cosines(classes=(…))`.
        cache: folder that keeps text embeddings by names, templates and text weights; None embeds anew each time.
    """

    classes: tuple[str, ...] = ()
    templates: str | tuple[str, ...] = "openai80"
    outliers: tuple[str, ...] = ()
    negatives: NegativeLabels | None = None
    subsets: tuple[tuple[int, ...], ...] = ()
    cache: Path | None = None

    def __post_init__(self) -> None:
        if len(self.classes) == 1:
            raise ValueError("a zero-shot classifier needs at least two class names")
        if isinstance(self.templates, str) and self.templates not in TEMPLATE_SETS:
            raise ValueError(
                f"no prompt set is named {self.templates!r}; known: {', '.join(TEMPLATE_SETS)}, or a tuple of templates"
            )
        if not self.templates or any("{}" not in template for template in self.own_templates):
            raise ValueError(f"every template needs {{}} where the class name goes, got {self.templates!r}")

    @property
    def own_templates(self) -> tuple[str, ...]:
        """The user's templates; none where a set is named."""
        return () if isinstance(self.templates, str) else self.templates

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        if self.classes:
            return self.classes
        from open_clip import IMAGENET_CLASSNAMES

        return tuple(IMAGENET_CLASSNAMES)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The templates themselves."""
        return self.own_templates or prompt_templates(str(self.templates))

    def texts(self, name: str) -> list[str]:
        """All texts of one class."""
        return [pattern.format(name) for pattern in self.patterns]

    @property
    def descriptions(self) -> dict[str, str]:
        """What is said to the model, in words for captions: under "" to all, under a tap's name for that tap."""
        named = "of the user's own" if self.own_templates else f"named {self.templates}"
        names = f"{len(self.classes)} given class names" if self.classes else "OpenAI's 1000 ImageNet class names"
        prompts = "1 prompt" if len(self.patterns) == 1 else f"{len(self.patterns)} prompts"
        found = {"": f"zero-shot by {prompts} {named} for {names}"}
        if self.outliers:
            more = f" and {len(self.outliers) - 3} more" if len(self.outliers) > 3 else ""
            found["outlier_cosines"] = f"outlier prompts {', '.join(map(repr, self.outliers[:3]))}{more}"
        if self.negatives:
            words = self.negatives.vocabulary
            count = len(words.nouns) + len(words.adjectives)
            found["negative_cosines"] = f"negative labels: {self.negatives.share:.0%} of {count:,} words" + (
                f" of {words.source}" if words.source else ""
            )
        return found


def prompt_templates(name: str) -> tuple[str, ...]:
    """The templates of a set in `TEMPLATE_SETS`, as open_clip ships them.

    >>> prompt_templates("single")
    ('a photo of a {}.',)
    """
    if name == "single":
        return ("a photo of a {}.",)
    from open_clip import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES

    shipped = {"openai80": OPENAI_IMAGENET_TEMPLATES, "best7": SIMPLE_IMAGENET_TEMPLATES}
    # open_clip ships functions of the class name
    return tuple(template("{}") for template in shipped[name])


class TextTower:
    """Texts → unit embeddings, with a model's text tower and its tokenizer.

    Args:
        model: an open_clip model: `encode_text(tokens)`.
        tokenizer: the one it was trained with.
        cache: see `ClipPrompts`.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, cache: Path | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = cache
        self._embedded: dict[tuple[str, ...], Tensor] = {}
        self._weights = _text_fingerprint(model, tokenizer) if cache else ""

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "T D"]:
        """The unit embedding of every text, on the model's device."""
        device = next(self._model.parameters()).device
        parts = []
        with torch.no_grad():
            for start in range(0, len(texts), _TEXTS_AT_ONCE):
                tokens = self._tokenizer(list(texts[start : start + _TEXTS_AT_ONCE])).to(device)
                parts.append(self._model.encode_text(tokens, normalize=True).float())
        return torch.cat(parts)

    def classes(self, prompts: ClipPrompts) -> Float[Tensor, "C D"]:
        """The unit embedding of every class: the mean over its texts, at unit length. From the cache where it is."""
        texts = [prompts.texts(name) for name in prompts.class_names]

        def compute() -> Tensor:
            per_pass = max(1, _TEXTS_AT_ONCE // len(texts[0]))
            means = []
            for start in range(0, len(texts), per_pass):
                some = texts[start : start + per_pass]
                embedded = self.embed([text for of_class in some for text in of_class])
                means.append(embedded.unflatten(0, (len(some), -1)).mean(dim=1))
            return l2_normalise(torch.cat(means))

        return cached_tensor(self._cache, ("classes", self._weights, texts), compute)

    def outliers(self, texts: Sequence[str]) -> Float[Tensor, "M D"]:
        """The unit embeddings of whole texts. Cached as well."""
        return cached_tensor(self._cache, ("outliers", self._weights, texts), lambda: self.embed(texts))

    def negatives(
        self, chosen: NegativeLabels, class_names: Sequence[str], classes: Float[Tensor, "C D"]
    ) -> Float[Tensor, "M D"]:
        """The unit embeddings of the mined negative labels, nouns first, the farthest first. Cached as well."""
        groups = chosen.prompts(class_names)

        def compute() -> Tensor:
            kept = []
            for texts in filter(None, groups):
                embedded = self._embed_once(texts)
                kept.append(embedded[farthest(embedded, classes, chosen.share, chosen.percentile)])
            return torch.cat(kept)

        anchors = hashlib.sha256(classes.cpu().contiguous().numpy().tobytes()).hexdigest()
        facts = ("negatives", self._weights, groups, anchors, chosen.share, chosen.percentile)
        found = cached_tensor(self._cache, facts, compute)
        if not len(found):
            words = sum(map(len, groups))
            raise ValueError(f"a share of {chosen.share} of {words} words leaves no negative label; raise the share")
        return found

    def _embed_once(self, texts: Sequence[str]) -> Tensor:
        """A vocabulary is large, and class masks ask for it again."""
        key = tuple(texts)
        if key not in self._embedded:
            self._embedded[key] = self.embed(texts)
        return self._embedded[key]


class ZeroShotClassifier(nn.Module):
    """An image tower under a text head: normalised images → logits `scale · cos(image, text) + bias`.

    Args:
        visual: images → embeddings (N, D), or a tuple that starts with them.
        classes: (C, D) unit text embeddings.
        scale: what multiplies cosines; 100 for OpenAI's models.
        bias: what is added to every logit; SigLIP has one.
        negatives: (M, D) unit embeddings of negative labels, by the class indices they were chosen for, `None` for all
            classes; none where there are no negative labels.
        vocabulary: identifies what negative labels are chosen from, and how.
        outliers: (M, D) unit embeddings of the user's outlier prompts; likewise.
        image_size: (height, width) that the tower takes, in pixels.
    """

    head: nn.Linear
    negative_texts: Tensor
    vocabulary: Tensor
    outlier_texts: Tensor

    def __init__(
        self,
        visual: nn.Module,
        classes: Float[Tensor, "C D"],
        *,
        scale: float,
        bias: float = 0.0,
        negatives: Mapping[tuple[int, ...] | None, Float[Tensor, "M D"]] = MappingProxyType({}),
        vocabulary: str = "",
        outliers: Float[Tensor, "M D"] | None = None,
        image_size: tuple[int, int],
    ) -> None:
        super().__init__()
        self.visual = visual
        self.head = nn.Linear(classes.shape[1], classes.shape[0], device=classes.device)
        with torch.no_grad():
            self.head.weight.copy_(scale * classes)
            self.head.bias.fill_(bias)
        self.register_buffer("negative_texts", negatives.get(None, classes[:0]))
        # the negatives of a class mask follow from the vocabulary, so a mask does not change the fingerprint
        self.register_buffer("vocabulary", torch.tensor(list(vocabulary.encode()), dtype=torch.uint8))
        self._subsets = {subset: f"negative_texts_{n}" for n, subset in enumerate(s for s in negatives if s)}
        for subset, name in self._subsets.items():
            self.register_buffer(name, negatives[subset], persistent=False)
        self.register_buffer("outlier_texts", classes[:0] if outliers is None else outliers)
        self.pretrained_cfg = {"input_size": (3, *image_size)}
        """The shape of one image, in the words of timm."""

    def forward(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N C"]:
        """The logits of normalised images."""
        found = self.visual(images)
        embeddings = found[0] if isinstance(found, tuple) else found
        return self.head(nn.functional.normalize(embeddings, dim=1))

    @property
    def own_taps(self) -> Mapping[str, Callable[..., Tap]]:
        """The taps that this model brings, by name; see `Classifier`. `tap_reasons` says why others are left out.

        Those that look at the classes take `classes`, the indices that count under a class mask.
        """

        def negative_cosines(classes: tuple[int, ...] | None = None) -> TextCosines:
            if classes is not None and classes not in self._subsets:
                raise ValueError(f"the negative labels were not chosen for a mask of {len(classes)} classes")
            return TextCosines(self, "negative_texts" if classes is None else self._subsets[classes])

        def outlier_cosines() -> TextCosines:
            return TextCosines(self, "outlier_texts")

        def local_mcm(
            temperature: float = 1.0, tokens: str = "values", classes: tuple[int, ...] | None = None
        ) -> LocalMCM:
            reader = patch_reader(self.visual, tokens)
            if reader is None:
                raise ValueError(f"{type(self.visual).__name__} shows no patches of tokens={tokens!r}")
            return LocalMCM(self, reader, temperature, classes)

        missing = self.tap_reasons
        return {t.__name__: t for t in (negative_cosines, outlier_cosines, local_mcm) if t.__name__ not in missing}

    @property
    def tap_reasons(self) -> Mapping[str, str]:
        """Why this model does not bring a tap, by its name, and what to do."""
        reasons = {
            "negative_cosines": "no negative labels were given; add --negatives wordnet, or a word list",
            "outlier_cosines": 'no outlier prompts were given; add --outlier-prompt "a blank page" or the like',
            "local_mcm": f"the image tower {type(self.visual).__name__} shows no patches in the space of the texts; "
            "OpenAI's ViT and ResNet towers do",
        }
        given = {
            "negative_cosines": len(self.negative_texts) > 0,
            "outlier_cosines": len(self.outlier_texts) > 0,
            "local_mcm": patch_reader(self.visual, "values") is not None,
        }
        return {tap: reason for tap, reason in reasons.items() if not given[tap]}


class TextCosines(Afterwards):
    """(N, M): cosines of the image embeddings to a buffer of text embeddings.

    Args:
        model: holds the buffer.
        texts: its name.
    """

    def __init__(self, model: ZeroShotClassifier, texts: str) -> None:
        self._model = model
        self._texts = texts

    def compute(self, classifier: Differentiable, images: Float[Tensor, "N C H W"], outputs: Outputs) -> Tensor:
        """No further pass: the features are the image embeddings."""
        return outputs.features @ self._model.get_buffer(self._texts).to(outputs.features).T


class LocalMCM(Reduction):
    """(N,): `1 − max softmax(cos / τ)` over all patches and classes, the local part of GL-MCM.

    Args:
        model: holds the class texts.
        reader: how its tower shows the patches.
        temperature: τ > 0, divides cosines.
        classes: indices of those that count; None for all.
    """

    def __init__(
        self, model: ZeroShotClassifier, reader: PatchReader, temperature: float, classes: tuple[int, ...] | None = None
    ) -> None:
        super().__init__((f"visual.{reader.layer}",))
        self._classes = slice(None) if classes is None else list(classes)
        self._model = model
        self._reader = reader
        self._temperature = temperature

    def reduce(self, layer: Map) -> Float[Tensor, " N"]:
        """From the map before the tower's last step to one number per image."""
        patches = l2_normalise(self._reader.read(layer).float())
        texts = l2_normalise(self._model.head.weight[self._classes]).to(patches)
        return local_concept_mismatch(patches @ texts.T, self._temperature)


def zero_shot_classifier(model: Any, tokenizer: Tokenizer, prompts: ClipPrompts) -> ZeroShotClassifier:
    """An open_clip model as a zero-shot classifier; its text tower is left behind.

    Args:
        model: `visual`, `encode_text`, `logit_scale` and, for SigLIP, `logit_bias`; in eval mode.
        tokenizer: the one it was trained with.
        prompts: class names, templates and further texts.
    """
    tower = TextTower(model, tokenizer, prompts.cache)
    classes = tower.classes(prompts).to(next(model.parameters()).device)
    bias = getattr(model, "logit_bias", None)
    return ZeroShotClassifier(
        model.visual,
        classes,
        scale=float(model.logit_scale.detach().exp()),
        bias=0.0 if bias is None else float(bias.detach()),
        negatives=_negatives(tower, prompts, classes),
        vocabulary=prompts.negatives.fingerprint if prompts.negatives else "",
        outliers=tower.outliers(prompts.outliers).to(classes.device) if prompts.outliers else None,
        image_size=_image_size(model.visual),
    )


def _negatives(
    tower: TextTower, prompts: ClipPrompts, classes: Float[Tensor, "C D"]
) -> dict[tuple[int, ...] | None, Tensor]:
    """The negative labels for all classes, and for every class mask by itself."""
    if prompts.negatives is None:
        return {}
    names = prompts.class_names
    subsets: list[tuple[int, ...] | None] = [None, *prompts.subsets]
    chosen = {}
    for subset in subsets:
        known = range(len(names)) if subset is None else subset
        mined = tower.negatives(prompts.negatives, [names[index] for index in known], classes[list(known)])
        chosen[subset] = mined.to(classes.device)
    return chosen


def _image_size(visual: Any) -> tuple[int, int]:
    size = visual.image_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _text_fingerprint(model: nn.Module, tokenizer: Tokenizer) -> str:
    """SHA-256 of all that decides a text's embedding: the weights beside the image tower, the code, the tokenizer."""
    digest = hashlib.sha256()
    layers = [(name, str(module)) for name, module in model.named_children() if name != "visual"]
    length = getattr(tokenizer, "context_length", None)
    digest.update(repr((type(model).__qualname__, layers, type(tokenizer).__qualname__, length)).encode())
    for name, value in model.state_dict().items():
        if not name.startswith("visual."):
            digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
