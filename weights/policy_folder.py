"""Reading a policy's tensors from its Hugging Face directory, without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from penstock.dataflow.errors import CheckpointError


def checkpoint_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and tensor of everything in `path`'s safetensors files.

    Raises:
        CheckpointError: If there are none.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: no *.safetensors in it, so there are no weights to serve")
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, tensors.get_tensor(name)
