"""Patch embeddings of CLIP's image towers, in the space of the text embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ood_toolkit.models.stages import Map

PATCH_TOKENS = ("values", "output")
"""Which patch embeddings: of the last attention's values, as GL-MCM reads them, or of the last block's output."""


@dataclass(frozen=True)
class PatchReader:
    """Where a tower shows its patches.

    Args:
        layer: module of the tower whose output is read.
        read: that output as a map → (N, P, D) patch embeddings, not of unit length.
    """

    layer: str
    read: Callable[[Map], Float[Tensor, "N P D"]]


def patch_reader(visual: nn.Module, tokens: str) -> PatchReader | None:
    """How to read patches from an open_clip tower; None for a tower without patches in the text space.

    OpenAI's ViT and ResNet towers have them. timm's towers and attentional pooling have none: their projection is
    trained on pooled features only.

    Args:
        visual: the image tower.
        tokens: "values": the last block, or the ResNet's attention pool, with every position attending to itself
            alone (GL-MCM after MaskCLIP); "output": the plain patch tokens after the last block, whose attention has
            mixed the whole image into each. A ResNet has "values" only.
    """
    if tokens not in PATCH_TOKENS:
        raise ValueError(f"patch tokens are {' or '.join(PATCH_TOKENS)}, got {tokens!r}")
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.transformer import VisionTransformer

    if isinstance(visual, ModifiedResNet):
        if tokens == "output":
            return None  # it pools a map that no projection has seen
        return PatchReader("layer4", lambda layer: _attention_pool_values(visual.attnpool, layer))
    if not isinstance(visual, VisionTransformer) or visual.attn_pool is not None or visual.proj is None:
        return None
    blocks = len(visual.transformer.resblocks)
    if tokens == "output":
        return PatchReader(f"transformer.resblocks.{blocks - 1}", lambda layer: _projected(visual, _as_tokens(layer)))
    before = f"transformer.resblocks.{blocks - 2}" if blocks > 1 else "ln_pre"
    return PatchReader(before, lambda layer: _last_values(visual, layer))


def _last_values(visual: Any, layer: Map) -> Float[Tensor, "N P D"]:
    """The last block with the identity as attention matrix."""
    tokens = _as_tokens(layer).to(visual.proj.dtype)
    alone = torch.full((tokens.shape[1], tokens.shape[1]), -torch.inf, dtype=tokens.dtype, device=tokens.device)
    alone.fill_diagonal_(0.0)
    return _projected(visual, visual.transformer.resblocks[-1](tokens, attn_mask=alone))


def _projected(visual: Any, tokens: Float[Tensor, "N T W"]) -> Float[Tensor, "N P D"]:
    """Patch tokens, the class token left out, through the final norm and the projection."""
    return visual.ln_post(tokens[:, 1:].to(visual.proj.dtype)) @ visual.proj


def _attention_pool_values(pool: Any, layer: Map) -> Float[Tensor, "N P D"]:
    positions = _as_tokens(layer).to(pool.v_proj.weight.dtype)
    return pool.c_proj(pool.v_proj(positions))


def _as_tokens(layer: Map) -> Float[Tensor, "N P D"]:
    return layer.transpose(1, 2)
