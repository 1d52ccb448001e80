"""vLLM's arguments for one engine: those that follow from the configuration, and those that a user passes on.

`rollout.engine.args` takes any argument of the installed vLLM but those in `RESERVED`. vLLM's own parser says whether
it exists and reads its value, in the dry run as at the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn

from vllm.config import ProfilerConfig, WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from penstock.dataflow.errors import ConfigError
from penstock.rollout.config import CPU_BLOCK_TOKENS, MAX_TOP_K, VllmEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.scheduler import holding_scheduler
from penstock.rollout.engines.vllm.worker import BACKEND
from penstock.weights.model_config import DTYPE_BYTES

CPU_STEP_FLOPS = 5e10
"""Of the prompts of one step: about a second of one core."""
VLLM_STEP_TOKENS = 2048
"""vLLM's own limit for the tokens of a step."""
USAGE = UsageContext.OPENAI_API_SERVER
"""By which vLLM decides how many tokens a step of a GPU may prefill: as many as `vllm serve`, 8,192 on an H100, not
2,048. On CPUs `step_of_a_cpu` decides.
"""
KEY = "rollout.engine.args"

OTHER_KEYS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_context_tokens",
    "max_num_seqs": "rollout.engine.max_num_seqs",
    "tensor_parallel_size": "rollout.engine.tensor_parallel_size",
    "kv_cache_dtype": "rollout.engine.kv_cache_dtype",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_gib",
    "gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "enforce_eager": "rollout.engine.enforce_eager",
    "stream_interval": "rollout.engine.journal_interval_tokens",
    "generation_config": "rollout.sampling",
    "override_generation_config": "rollout.sampling",
    "profiler_config": "trainer.profile_steps",
    "enable_return_routed_experts": "algorithm.routing",
    "seed": "seed",
}
"""Arguments that have a key of their own."""

_LAYOUT = "weights are written into the engine's live parameters, whose layout it would change"
_PARALLEL = "Penstock places engines itself: rollout.num_engines and tensor_parallel_size"
_RECORDED = "the logprob of every token is recorded as it was sampled, which it would change"
_VERSIONS = "it decides how tokens get their policy version and weights are swapped"
_ADAPTERS = "trainer=lora adds its adapters to the engine's own weights"
_TOKENS = "engines take token ids and return tokens"
RESERVED: dict[str, str] = {
    **dict.fromkeys(
        ["model_weights", "hf_config_path", "config_format", "hf_overrides", "model_class_overrides", "model_impl",
         "load_format", "model_loader_extra_config", "ignore_patterns", "quantization", "quantization_config",
         "allow_deprecated_quantization", "moe_backend", "linear_backend", "kernel_config", "cpu_offload_gb",
         "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group",
         "offload_prefetch_step", "offload_params", "enable_expert_parallel", "enable_ep_weight_filter",
         "enable_eplb", "eplb_config", "expert_placement_strategy", "enable_elastic_ep", "elastic_ep_max_dp_size",
         "revision", "code_revision", "tokenizer_revision"],
        _LAYOUT,
    ),
    **dict.fromkeys(
        ["pipeline_parallel_size", "distributed_executor_backend", "master_addr", "master_port", "nnodes", "node_rank",
         "device_ids", "prefill_context_parallel_size", "decode_context_parallel_size", "data_parallel_size",
         "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address",
         "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
         "data_parallel_multi_port_external_lb", "data_parallel_backend"],
        _PARALLEL,
    ),
    **dict.fromkeys(
        ["logprobs_mode", "max_logprobs", "logits_processors", "return_sampling_mask", "watermark_config",
         "diffusion_config"],
        _RECORDED,
    ),
    **dict.fromkeys(
        ["speculative_config", "spec_method", "spec_model", "spec_tokens"],
        "that speculation samples from the policy is not proven: vLLM's CPU build does not",
    ),
    **dict.fromkeys(
        ["scheduler_cls", "worker_cls", "worker_extension_cls", "weight_transfer_config", "enable_sleep_mode",
         "enable_cumem_allocator", "sleep_preserve_parameter_names", "disable_log_stats", "kv_transfer_config",
         "kv_offloading_size", "kv_offloading_backend", "enable_fault_tolerance", "fault_tolerance_config"],
        _VERSIONS,
    ),
    **dict.fromkeys(
        ["enable_lora", "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras", "max_cpu_loras",
         "lora_dtype", "lora_target_modules", "enable_tower_connector_lora", "specialize_active_lora",
         "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels"],
        _ADAPTERS,
    ),
    **dict.fromkeys(
        ["runner", "convert", "pooler_config", "skip_tokenizer_init", "tokens_only", "enable_prompt_embeds"],
        _TOKENS,
    ),
    "language_model_only": "the language model alone is trained, and engines serve it without a vision tower",
    "trust_remote_code": "code from a model's repository is not run",
    "hf_token": "a configuration is saved with the run: set HF_TOKEN in the environment",
}  # fmt: skip
"""Arguments that are refused, with the reason."""


def engine_args(spec: EngineSpec, config: VllmEngineConfig) -> AsyncEngineArgs:
    """vLLM's arguments for one engine.

    Raises:
        ConfigError: Listing what is wrong in `rollout.engine.args`, or because the device is too small.
    """
    cache_gib = config.cache_gib(spec.device)
    utilization = config.gpu_memory_utilization
    if spec.device == "cuda":
        shard = spec.model.shape.num_parameters * DTYPE_BYTES[spec.model.dtype] / config.tensor_parallel_size
        staged = shard if spec.bucket_bytes is None else min(shard, spec.bucket_bytes)
        utilization = config.vllm_utilization(shard, staged, current_platform.get_device_total_memory())
    derived: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.model.dtype,
        "hf_overrides": {"head_dtype": spec.model.head_dtype},
        "max_model_len": spec.model.max_context_tokens,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        "kv_cache_dtype": config.kv_cache_dtype,
        "gpu_memory_utilization": utilization,
        "enforce_eager": config.enforce_eager or spec.device == "cpu",
        "enable_sleep_mode": spec.device == "cuda",
        "logprobs_mode": "processed_logprobs",  # after temperature and truncation: what the importance ratio needs
        "max_logprobs": MAX_TOP_K,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "penstock.rollout.engines.vllm.worker.WorkerExtension",
        "tensor_parallel_size": config.tensor_parallel_size,
        "scheduler_cls": f"{holding_scheduler.__module__}.{holding_scheduler.__name__}",
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "moe_backend": "triton" if spec.device == "cuda" else "auto",  # others of a GPU reorder what the loader wrote
        "language_model_only": True,  # of a checkpoint that has a vision tower, too
        "seed": spec.seed,
        "enable_log_requests": False,
        "disable_log_stats": False,
    }
    if spec.profile_steps:
        derived["profiler_config"] = ProfilerConfig(
            profiler="torch", torch_profiler_dir=spec.profile_in, torch_profiler_with_stack=False, ignore_frontend=True
        )
    args = AsyncEngineArgs(**(derived | step_of_a_cpu(spec, config) | parsed(config.args)))
    if spec.device == "cpu" and "enable_prefix_caching" not in config.args and args.create_model_config().is_hybrid:
        args.enable_prefix_caching = False  # for it Mamba's CPU operator would have to give states within a prompt
    if spec.device == "cuda" and spec.records_routes and spec.model.shape.num_experts:
        args.enable_return_routed_experts = True
    return args


def step_of_a_cpu(spec: EngineSpec, config: VllmEngineConfig) -> dict[str, int]:
    """How much one step of a CPU engine may compute, and the smallest blocks of its prefix cache; empty on a GPU.

    All that a step does must end before new weights are taken, and the prompts of a batch take seconds if they are
    computed in one. By default vLLM shares no prompt below 128 tokens, the length of its blocks on CPUs.
    """
    if spec.device != "cpu":
        return {}
    flops_per_token = 2 * spec.model.shape.active_parameters
    most = max(int(CPU_STEP_FLOPS / flops_per_token), config.max_num_seqs)
    return {"max_num_batched_tokens": min(most, VLLM_STEP_TOKENS), "block_size": CPU_BLOCK_TOKENS}


def parsed(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a user passes on, with their values as vLLM's parser reads them.

    Raises:
        ConfigError: Naming each argument that vLLM does not have, does not take with this value, or that is reserved.
    """
    if not args:
        return {}
    known = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
    values, refused = {}, []
    for name, value in args.items():
        reason = refusal(name, known)
        try:
            read = None if reason else parser.parse_args(list(words(name, value)))
        except ValueError as error:
            reason = str(error)
        if reason:
            refused.append(f"{KEY}.{name}={value!r:.80}: {reason}")
        else:
            values[name] = getattr(read, name)
    if refused:
        raise ConfigError(refused)
    return values


def problems(args: Mapping[str, Any]) -> list[str]:
    """What is wrong with `rollout.engine.args`; empty if nothing."""
    try:
        parsed(args)
    except ConfigError as error:
        return error.violations
    return []


def refusal(name: str, known: set[str]) -> str | None:
    """Why an argument may not be passed, whatever its value; None if it may."""
    if key := OTHER_KEYS.get(name):
        return f"set {key} instead."
    if reason := RESERVED.get(name):
        return f"this argument of vLLM is reserved, since {reason}."
    if name in known:
        return None
    nearest = get_close_matches(name.lower().replace("-", "_"), sorted(known), n=1)
    return f"vLLM has no such argument.{f' Did you mean {nearest[0]}?' if nearest else ''}"


def words(name: str, value: Any) -> Iterator[str]:
    """An argument as on vLLM's command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
    elif isinstance(value, list):
        yield f"--{flag}"
        yield from (one if isinstance(one, str) else json.dumps(one) for one in value)
    else:
        yield f"--{flag}={value if isinstance(value, str) or value is None else json.dumps(value)}"


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which says what it does not take instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"vLLM says: {message}")
