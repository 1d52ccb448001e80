"""A policy's Hugging Face directory: its tensors read as a trainer has them, and written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.dataflow.errors import CheckpointError, boundary
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.hf_folder import CONFIG_FILE, model_folder, transformers_config, weight_files
from penstock.weights.layout.checkpoint_names import loading_arguments, module_tensors, tensors_as_held, text_config
from penstock.weights.model_config import DType


def policy_tensors(folder: Path, dtype: DType) -> dict[str, torch.Tensor]:
    """Name and tensor of the policy in a folder, as a trainer would publish them: by transformers' modules, tied ones
    once.

    transformers loads them. What is in the files in the same form and dtype is mapped, and takes no memory.

    Args:
        folder: Hugging Face directory; what it holds besides the language model is left out.
        dtype: `model.dtype`.

    Raises:
        CheckpointError: If it has no weights, not all of them, or a head of its own that its configuration denies.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with boundary(CheckpointError, f"{folder} cannot be loaded"):
        hf_config = transformers_config(folder / CONFIG_FILE)
        weight_files(folder)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[dtype],
            output_loading_info=True,
            local_files_only=True,
            **loading_arguments(hf_config),
        )
    kind, missing = type(model).__name__, sorted(loading["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors of {kind} are not in it, e.g. {missing[0]}; they would be random. Use a "
            "complete checkpoint."
        )
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if own := sorted(tensors.keys() - {tensor.name for tensor in module_tensors(hf_config)}):
        raise CheckpointError(
            f"{folder}: {own[0]} is not equal to the embedding, but {CONFIG_FILE} has tie_word_embeddings=true. Set it "
            "to false if the head is right, or remove the head from the files if it is stale."
        )
    return tensors


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
