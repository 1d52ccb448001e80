"""A policy's Hugging Face directory: its tensors read without building the model, and written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.dataflow.errors import CheckpointError
from penstock.weights.hf_folder import CONFIG_FILE, model_folder, transformers_config, weight_files
from penstock.weights.layout.checkpoint_names import of_language_model, tensors_as_held, text_config


def policy_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in `path`'s safetensors files that is of the language model.

    Raises:
        CheckpointError: If there are none.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: no *.safetensors in it, so there are no weights to serve")

    def held() -> Iterator[tuple[str, torch.Tensor]]:
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, tensors.get_tensor(name)

    yield from of_language_model(transformers_config(path / CONFIG_FILE), held())


def write_policy(hf_model: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a policy as the checkpoint that it was loaded from: what else is in that, a vision tower for one, stays.

    Args:
        hf_model: Its class and configuration; its weights are not used.
        tensors: Its weights by the names of its modules, in main memory, tied ones once.
        folder: To write; made here.

    Raises:
        CheckpointError: If the checkpoint does not hold a tensor that was trained.
    """
    source = model_folder(hf_model.name_or_path) if hf_model.name_or_path else None
    hf_config = transformers_config(source / CONFIG_FILE) if source else hf_model.config
    if source is None or text_config(hf_config) is hf_config or not hf_model.can_generate():
        hf_model.save_pretrained(folder, state_dict=dict(tensors))
        return
    folder.mkdir(parents=True)
    files = weight_files(source)
    trained = tensors_as_held(hf_config, tensors, _names(files))
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as held:
            names = list(held.keys())
            written = {name: trained.pop(name) if name in trained else held.get_tensor(name) for name in names}
        save_file({name: one.contiguous() for name, one in written.items()}, folder / file.name, {"format": "pt"})
    if trained:
        raise CheckpointError(f"{source}: {len(trained)} tensors that were trained are not in it, e.g. {min(trained)}")
    for name in (CONFIG_FILE, "model.safetensors.index.json"):
        if (source / name).exists():
            shutil.copy2(source / name, folder / name)


def _names(files: Iterable[Path]) -> set[str]:
    """Of the tensors in safetensors files."""
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as held:
            found.update(held.keys())
    return found
