"""Text embeddings on disk: one safetensors file per set of texts and weights."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor


def cached_tensor(folder: Path | None, facts: object, compute: Callable[[], Tensor]) -> Tensor:
    """The tensor of these facts: from its file, or computed and kept.

    A file is renamed into place when it is whole, so a killed run leaves none. One that cannot be read is made anew.

    Args:
        folder: made if missing; None keeps nothing.
        facts: all that decides the tensor, as JSON knows it.
        compute: makes it.
    """
    if folder is None:
        return compute()
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    key = hashlib.sha256(json.dumps(facts, ensure_ascii=False).encode()).hexdigest()[:24]
    file = folder / f"text-{key}.safetensors"
    if file.is_file():
        try:
            return load_file(file)["texts"]
        except (SafetensorError, KeyError, OSError):
            file.unlink()
    texts = compute()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".text-") as scratch:
        whole = Path(scratch) / file.name
        save_file({"texts": texts.cpu().contiguous()}, whole)
        whole.replace(file)
    return texts
