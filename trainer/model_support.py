"""Whether the trainer can train or score with a checkpoint, asked of transformers without memory for weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.weights.hf_folder import CONFIG_FILE, transformers_config

_PACKED = {"full_attention", "sliding_attention"}
"""Layers for which rows of several sequences are masked (trainer/models/policy_model.py)."""


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


def unsupported(
    folder: Path, attention: str, role: ModelRole = "policy", load: Mapping[str, Any] | None = None
) -> list[str]:
    """Why this model cannot have its role; empty if it can.

    The model is loaded on the meta device by transformers itself, so missing tensors and wrong shapes are those that it
    would find in a run.

    Args:
        folder: Hugging Face directory.
        attention: `model.attention`.
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
    # With sdpa in any case: varlen computes the same, and no model is asked whether a function of ours suits it. A
    # finished reward model is loaded with the attention and the labels that it has.
    attention_of = {} if role == "reward" else {"attn_implementation": "sdpa"}
    labels = {"num_labels": 1} if role == "value" else {}
    try:
        with torch.device("meta"):
            auto.from_config(hf_config, **attention_of)
    except Exception as error:  # noqa: BLE001 - each model refuses in its own way, which is the answer
        return [f"transformers cannot build a {kind} of it with plain attention (sdpa): {_line(error)}"]
    try:
        model, loading = auto.from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            local_files_only=True,
            **attention_of,
            **labels,
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
    if role != "reward" and (of_body := _of_body(model, attention)):
        return [*problems, *of_body]
    return [*problems, *(_of_logprobs(model) if gives_logprobs else _of_scores(model))]


def _of_config(hf_config: Any) -> str | None:
    text = hf_config.get_text_config(decoder=True)
    if getattr(hf_config, "quantization_config", None) is not None:
        return (
            "its weights are quantised (quantization_config), and the trainer's code needs floating-point weights. Use "
            "the original model"
        )
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - _PACKED)
    if kinds:
        return (
            f"it has layers of {', '.join(kinds)}. The trainer packs several sequences in a row and can separate them "
            "only in full and sliding-window attention. Use a model with attention layers only"
        )
    if (cap := getattr(text, "attn_logit_softcapping", None)) is not None:
        return (
            f"it caps attention scores (attn_logit_softcapping={cap:g}), which the trainer's attention leaves out, so "
            "its logprobs would differ from the engine's. Use a model without it"
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


def _of_body(model: Any, attention: str) -> list[str]:
    import inspect

    body = model.base_model
    if "position_ids" not in inspect.signature(body.forward).parameters:
        return [
            f"{type(body).__name__} takes no position_ids, so several sequences cannot be packed in a row. Use a model "
            "with rotary position embeddings"
        ]
    if attention == "varlen" and not model._supports_attention_backend:  # noqa: SLF001 - what vLLM asks as well
        return [
            f"{type(model).__name__} passes no arguments on to its attention function, which model.attention=varlen "
            "must tell where sequences begin. Use model.attention=sdpa"
        ]
    return []


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


def _of_logprobs(model: Any) -> list[str]:
    if model.get_output_embeddings() is None:
        return [f"{type(model).__name__} has no output embeddings from which logprobs are computed"]
    if changed := _changes_logits(model):
        return [
            f"{type(model).__name__} {changed} (as with final_logit_softcapping or logits_scaling), and logprobs are "
            "computed from the head's weight alone. Use a model whose logits are those of its head"
        ]
    return []


class _Output:
    """The output of a body: its last hidden state, and None for everything else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _changes_logits(model: Any) -> str:
    """What a model does to hidden states before its head, or to logits after it; empty if nothing.

    Its body is replaced, so only the few operations around the head run, on the meta device.
    """
    head, seen = model.get_output_embeddings(), []
    hidden = torch.empty(1, 2, head.weight.shape[1], dtype=head.weight.dtype, device="meta")
    hook = head.register_forward_hook(lambda _module, given, logits: seen.append((given[0], logits)))
    model.base_model.forward = lambda *_args, **_kwargs: _Output(hidden)
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta")).logits
    except Exception as error:  # noqa: BLE001 - its forward pass needs more of its body than is replaced here
        return f"has a forward pass around its head that cannot be followed ({_line(error)})"
    finally:
        hook.remove()
    if len(seen) != 1:
        return f"calls its head {len(seen)} times"
    given, of_head = seen[0]
    if _storage(given) != _storage(hidden):
        return "changes hidden states before its head"
    return "" if _storage(logits) == _storage(of_head) else "changes the logits of its head"


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - storages without memory have no data_ptr


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
