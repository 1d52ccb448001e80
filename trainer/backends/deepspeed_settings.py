"""What DeepSpeed is told: what follows from the keys of `trainer`, and what a user passes on (`trainer.deepspeed`).

DeepSpeed's own configuration says, in the dry run as at the start, whether it has a setting and takes the value. It
ignores settings that it does not know, so it is watched which ones it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from penstock.dataflow.errors import ConfigError
from penstock.trainer.backends.tensor_parallel import autotp_settings
from penstock.trainer.config import ZERO_BUCKET_ELEMENTS, TrainerConfig
from penstock.weights.model_config import ModelConfig

KEY = "trainer.deepspeed"
_BATCH = "Penstock counts batches in tokens and scales gradients by them"
_DTYPE = "trainer and engines must compute alike: model.dtype"
_LAYOUT = "Penstock reads weights and moments where DeepSpeed keeps them, which it would change"
_OPTIMIZER = "the optimizer is that of trainer.optimizer"
_UNUSED = "Penstock does not use this part of DeepSpeed"
RESERVED: dict[str, str] = {
    **dict.fromkeys(
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
         "managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"],
        _BATCH,
    ),
    "gradient_clipping": "set trainer.optimizer.gradient_clip_norm",
    **dict.fromkeys(
        ["optimizer", "scheduler", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"], _OPTIMIZER
    ),
    **dict.fromkeys(["bf16", "bfloat16", "fp16", "torch_autocast", "data_types"], _DTYPE),
    "tensor_parallel": "set trainer.tensor_parallel_size",
    "sequence_parallel_size": "set trainer.sequence_parallel_size",
    "compile": "set trainer.compile",
    **dict.fromkeys(
        ["activation_checkpointing", "autotuning", "checkpoint", "data_efficiency", "dataloader_drop_last",
         "datastates", "expert_parallel", "hybrid_engine", "pipeline", "weight_quantization",
         "use_data_before_expert_parallelism"],
        _UNUSED,
    ),
    "zero_optimization.stage": "set trainer.zero_stage",
    "zero_optimization.offload_optimizer": "set trainer.offload_optimizer",
    "zero_optimization.offload_param": "set trainer.offload_parameters",
    **{
        f"zero_optimization.{name}": _LAYOUT
        for name in (
            "allgather_partitions", "compute_grad_norm", "cpu_offload", "cpu_offload_param",
            "cpu_offload_use_pin_memory", "elastic_checkpoint", "leaf_module", "legacy_stage1",
            "load_from_fp32_weights", "override_module_apply", "parameter_alignment",
            "pipeline_loading_checkpoint", "round_robin_gradients", "save_muon_momentum_buffer_in_memory",
            "stage3_module_granularity_threshold", "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights", "zero_quantized_weights",
        )
    },
}  # fmt: skip
"""Settings that are refused, with the reason."""


def deepspeed_settings(model: ModelConfig, trainer: TrainerConfig) -> dict[str, Any]:
    """The DeepSpeed configuration. The batch size is nominal: our micro-batches are counted in tokens.

    Raises:
        ConfigError: If `trainer.deepspeed` has reserved settings.
    """
    bucket = min(ZERO_BUCKET_ELEMENTS, model.shape.num_parameters)
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if trainer.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if clips_here(model, trainer) else trainer.optimizer.gradient_clip_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if trainer.tensor_parallel_size > 1:
        settings["tensor_parallel"] = autotp_settings(
            trainer.tensor_parallel_size, is_tied=model.shape.tie_word_embeddings
        )
    if model.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        if trainer.zero_stage > 0:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if refused := list(reserved(trainer.deepspeed)):
        raise ConfigError(refused)
    return _merged(settings, trainer.deepspeed)


def clips_here(model: ModelConfig, trainer: TrainerConfig) -> bool:
    """Whether our backend clips gradients because DeepSpeed reports no norm."""
    return trainer.zero_stage == 0 and model.dtype == "float32"


def reserved(passed: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """A sentence for each setting that may not be passed."""
    for name, value in passed.items():
        path = f"{section}{name}"
        if reason := RESERVED.get(path):
            yield f"{KEY}.{path}: this setting of DeepSpeed is reserved: {reason}."
        elif isinstance(value, Mapping):
            yield from reserved(value, f"{path}.")


def problems(passed: Mapping[str, Any]) -> list[str]:
    """What is wrong with `trainer.deepspeed`; empty if nothing. Imports DeepSpeed."""
    from deepspeed.runtime.config import DeepSpeedConfig

    if refused := list(reserved(passed)):
        return refused
    watched = _Watched({"train_batch_size": 1, **passed})
    try:
        DeepSpeedConfig(watched)
    except ValidationError as error:
        return [f"{KEY}: DeepSpeed says: {'.'.join(map(str, one['loc']))}: {one['msg']}." for one in error.errors()]
    except Exception as error:  # noqa: BLE001 - its checks raise what they like
        return [f"{KEY}={dict(passed)!r:.80}: DeepSpeed says: {' '.join(str(error).split())[:400]}"]
    return [f"{KEY}.{name}: DeepSpeed has no such setting, and would ignore it." for name in watched.never_read()]


def _merged(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of both become one; elsewhere a value that the user passes takes the place of ours."""
    merged = dict(ours)
    for name, value in theirs.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


class _Watched(dict[str, Any]):
    """A configuration that knows which of its keys were read, as do its sections. Copies share that knowledge.

    A section of which no key was read was checked as a whole, by pydantic, which refuses the names it does not know.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(
            {name: _Watched(value) if isinstance(value, dict) else value for name, value in settings.items()}
        )
        self.read: set[str] = set()

    def never_read(self) -> Iterator[str]:
        """Of a section its own keys, after its name."""
        for name, value in self.items():
            if name not in self.read:
                yield name
            elif isinstance(value, _Watched) and value.read:
                yield from (f"{name}.{inner}" for inner in value.never_read())

    def __copy__(self) -> _Watched:
        copied = _Watched({})
        copied.update(self)
        copied.read = self.read
        return copied

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)
