"""A classifier of 1000 classes that takes no time, and photographs for it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

SPEC = "tests.benchmarks.tiny:factory"
TWIN = "tests.benchmarks.tiny:twin"


class Pooled(nn.Module):
    """Means of 3 × 3 fields, then a linear layer."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(27, 1000)
        self.head.weight.data = 5 * torch.randn(1000, 27, generator=generator)
        self.head.bias.data = torch.randn(1000, generator=generator)
        # classes that are there (tench, goldfish, stingray, …) win often enough to be right now and then
        self.head.bias.data[[0, 1, 6, 11, 51, 70, 954, 988]] += 20

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(images, 3).flatten(1))


def to_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def small(image: Any) -> torch.Tensor:
    """24 × 24 pixels of an image of any size."""
    return to_tensor(image.convert("RGB").resize((24, 24)))


def factory() -> tuple[nn.Module, Any]:
    return Pooled().eval(), small


def twin() -> tuple[nn.Module, Any]:
    return Pooled(seed=2).eval(), small


def photograph(path: Path, seed: int, mode: str = "RGB") -> None:
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (3, 3, 4)).repeat(8, axis=0).repeat(8, axis=1)
    noise = np.clip(coarse + draw.integers(-20, 20, coarse.shape), 0, 255).astype(np.uint8)
    image = Image.frombytes("CMYK", (24, 24), noise.tobytes()) if mode == "CMYK" else Image.fromarray(noise[:, :, :3])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path, format="JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")
