"""Whether the trainer can train or score with a checkpoint, asked of transformers without memory for weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.weights.hf_folder import CONFIG_FILE, transformers_config
from penstock.weights.layout.checkpoint_names import loading_arguments, text_config
from penstock.weights.model_config import Attention, ModelForm

ModelRole = Literal["policy", "frozen", "value", "reward"]
"""`policy`: trained. `frozen`: a reference or teacher, which scores tokens. `value`: a critic, or a reward model to be
trained; it may begin with a new head. `reward`: a finished reward model, which scores answers."""
_HEAD = "score"
"""The linear layer of sequence classifiers that gives the scores."""


_PLACED = "Penstock places the weights itself"
_SAME = "what is loaded must be the checkpoint that the engines serve"
LOAD_RESERVED: dict[str, str] = {
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "attn_implementation": "set model.attention",
    "quantization_config": "the trainer needs floating-point weights",
    "trust_remote_code": "code from a model's repository is not run",
    "gguf_file": "make a Hugging Face folder of it, as examples/pretrained/smollm2.py does",
    **dict.fromkeys(
        ["device_map", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict", "tp_plan", "tp_size",
         "device_mesh", "distributed_config", "low_cpu_mem_usage"],
        _PLACED,
    ),
    **dict.fromkeys(
        ["config", "state_dict", "revision", "subfolder", "variant", "adapter_kwargs", "adapter_name", "key_mapping",
         "ignore_mismatched_sizes", "from_tf", "from_flax", "cache_dir", "force_download", "local_files_only",
         "proxies", "token", "output_loading_info", "commit_hash"],
        _SAME,
    ),
}  # fmt: skip
"""Arguments of `from_pretrained` that `model.load` may not have, with the reason."""


def unsupported(folder: Path, role: ModelRole = "policy", load: Mapping[str, Any] | None = None) -> list[str]:
    """Why this model cannot have its role; empty if it can.

    The model is loaded on the meta device by transformers itself, so missing tensors and wrong shapes are those that it
    would find in a run.

    Args:
        folder: Hugging Face directory.
        role: What the run does with it.
        load: `model.load`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hf_config = transformers_config(folder / CONFIG_FILE)
    if role == "frozen" and getattr(hf_config, "quantization_config", None) is not None:
        return []  # whether its library loads it is known only where it will run
    if role != "reward" and (problem := _of_config(hf_config)):
        return [problem]
    if refused := [said for name in load or () if (said := _of_argument(hf_config, name))]:
        return refused
    gives_logprobs = role in ("policy", "frozen")
    auto, kind = AutoModelForSequenceClassification, "sequence classifier"
    if gives_logprobs:
        auto, kind = AutoModelForCausalLM, "language model"
    labels = {"num_labels": 1} if role == "value" else {}
    try:
        with torch.device("meta"):
            auto.from_config(text_config(hf_config) if gives_logprobs else hf_config)
        own = loading_arguments(hf_config) if gives_logprobs else {}
    except Exception as error:  # noqa: BLE001 - each model refuses in its own way, which is the answer
        return [f"transformers cannot build a {kind} of it: {_line(error)}"]
    try:
        model, loading = auto.from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            local_files_only=True,
            **labels,
            **own,
            **(load or {}),
        )
    except Exception as error:  # noqa: BLE001
        return [f"transformers cannot load its weights: {_line(error)}"]
    problems = []
    missing = sorted(set(loading["missing_keys"]) - ({f"{_HEAD}.weight"} if role == "value" else set()))
    if missing:
        problems.append(
            f"{len(missing)} tensors of {type(model).__name__} are not in the checkpoint, e.g. {missing[0]}; they "
            f"would be random. The checkpoint is of {' or '.join(hf_config.architectures or ['an unknown class'])}. "
            f"Use a complete checkpoint of a {kind}"
        )
    return [*problems, *([] if gives_logprobs else _of_scores(model))]


def form_of(folder: Path, attention: Attention) -> ModelForm:
    """How the trainer computes the language model of a folder.

    Raises:
        ConfigError: If it is not causal.
    """
    from penstock.trainer.models.model_form import model_form

    return model_form(transformers_config(folder / CONFIG_FILE), attention)


def _of_config(hf_config: Any) -> str | None:
    if getattr(hf_config, "quantization_config", None) is not None:
        return (
            "its weights are quantised (quantization_config), and the trainer's code needs floating-point weights. Use "
            "the original model"
        )
    of_text, of_whole = text_config(hf_config).tie_word_embeddings, hf_config.tie_word_embeddings
    if of_text != of_whole:
        return (
            f"its config.json has tie_word_embeddings={of_whole}, and {of_text} in its text_config: whether its head "
            "is its embedding is not known. Set both to what the checkpoint has"
        )
    return None


def _of_argument(hf_config: Any, name: str) -> str | None:
    """Why `model.load` may not have an argument, or None. A name that transformers does not know fails in the load."""
    if reason := LOAD_RESERVED.get(name):
        return f"model.load.{name} is reserved: {reason}"
    if name in hf_config.to_dict() or hasattr(hf_config, name):
        return (
            f"model.load.{name} is a value of its config.json, which the engines read too: they would compute with "
            "another one. Change it there"
        )
    return None


def _of_scores(model: Any) -> list[str]:
    head = getattr(model, _HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        return [f"{type(model).__name__} has no linear layer `{_HEAD}` that gives its scores. Use another architecture"]
    if head.out_features != 1:
        return [
            f"it has {head.out_features} labels (num_labels), but a score is one number. Use a sequence classifier "
            "with one label"
        ]
    return []


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
