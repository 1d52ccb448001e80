"""`rollout.engine.args` against vLLM's own parser and configuration: what is accepted, what is refused, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import compose_config, load_config
from penstock.rollout.config import VllmEngineConfig
from penstock.weights.model_config import ModelConfig
from tests.contract.engine_harness import make_spec

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]

ACCEPTED: list[tuple[str, Any, str, Any]] = [
    # argument, value in YAML, where vLLM's configuration of the engine has it, what is there
    ("block_size", 64, "cache_config.block_size", 64),
    ("enable_prefix_caching", False, "cache_config.enable_prefix_caching", False),
    ("prefix_caching_hash_algo", "xxhash", "cache_config.prefix_caching_hash_algo", "xxhash"),
    ("num_gpu_blocks_override", 77, "cache_config.num_gpu_blocks_override", 77),
    ("mamba_cache_dtype", "float32", "cache_config.mamba_cache_dtype", "float32"),
    ("max_num_batched_tokens", 1024, "scheduler_config.max_num_batched_tokens", 1024),
    ("max_num_batched_tokens", "1k", "scheduler_config.max_num_batched_tokens", 1000),
    ("long_prefill_token_threshold", 48, "scheduler_config.long_prefill_token_threshold", 48),
    ("scheduling_policy", "priority", "scheduler_config.policy", "priority"),
    ("watermark", 0.05, "scheduler_config.watermark", 0.05),
    ("scheduler_reserve_full_isl", False, "scheduler_config.scheduler_reserve_full_isl", False),
    ("disable_hybrid_kv_cache_manager", True, "scheduler_config.disable_hybrid_kv_cache_manager", True),
    ("max_num_scheduled_tokens", 512, "scheduler_config.max_num_scheduled_tokens", 512),
    ("distributed_timeout_seconds", 99, "parallel_config.distributed_timeout_seconds", 99),
    ("max_parallel_loading_workers", None, "parallel_config.max_parallel_loading_workers", None),
    ("use_tqdm_on_load", False, "load_config.use_tqdm_on_load", False),
    ("download_dir", "elsewhere", "load_config.download_dir", "elsewhere"),
    ("additional_config", {"some": {"key": 3}}, "additional_config", {"some": {"key": 3}}),
    ("compilation_config", {"debug_dump_path": "/none"}, "compilation_config.debug_dump_path", Path("/none")),
    ("enable_mfu_metrics", True, "observability_config.enable_mfu_metrics", True),
    ("kv_cache_metrics", True, "observability_config.kv_cache_metrics", True),
    ("kv_cache_metrics_sample", 0.5, "observability_config.kv_cache_metrics_sample", 0.5),
    ("enable_logging_iteration_details", True, "observability_config.enable_logging_iteration_details", True),
]
REFUSED = [
    ("block_size", "large", "vLLM says: argument --block-size"),
    ("block_size", True, "vLLM says: argument --block-size"),
    ("enable_prefix_caching", "perhaps", "vLLM says"),
    ("scheduling_policy", "fair", "vLLM says: argument --scheduling-policy: invalid choice: 'fair'"),
    ("watermark", "much", "vLLM says: argument --watermark"),
    ("blocksize", 64, "vLLM has no such argument. Did you mean block_size?"),
    ("enable-prefix-caching", True, "Did you mean enable_prefix_caching?"),
    ("colour", "blue", "vLLM has no such argument."),
    ("speculative_config", {"method": "ngram"}, "is reserved, since that speculation samples from the policy"),
    ("logprobs_mode", "raw_logprobs", "is reserved, since the logprob of every token is recorded"),
    ("quantization", "fp8", "is reserved, since weights are written into the engine's live parameters"),
    ("data_parallel_size", 2, "rollout.num_engines"),
    ("scheduler_cls", "mine.Scheduler", "is reserved, since it decides how tokens get their policy version"),
    ("enable_lora", True, "trainer=lora"),
    ("trust_remote_code", True, "code from a model's repository is not run"),
    ("hf_token", "hf_1", "set HF_TOKEN in the environment"),
    ("tensor_parallel_size", 2, "set rollout.engine.tensor_parallel_size instead"),
    ("max_model_len", 99, "set model.max_context_tokens instead"),
]


@pytest.mark.parametrize(("name", "value", "place", "expected"), ACCEPTED, ids=lambda one: str(one)[:30])
def test_an_argument_changes_what_it_should_in_vllms_own_configuration(
    tiny_model_config: ModelConfig, name: str, value: Any, place: str, expected: Any
) -> None:
    from penstock.rollout.engines.vllm.arguments import engine_args

    def found(args: dict[str, Any]) -> Any:
        engine = VllmEngineConfig(type="vllm", kv_cache_gib=0.1, args=args)
        config: Any = engine_args(make_spec(tiny_model_config, engine, "keep_kv"), engine).create_engine_config()
        for part in place.split("."):
            config = getattr(config, part)
        return config

    assert found({name: value}) == expected
    if value is not None:
        assert found({}) != expected


@pytest.mark.parametrize(("name", "value", "why"), REFUSED, ids=lambda one: str(one)[:30])
def test_an_argument_is_refused_by_name_with_its_reason(name: str, value: Any, why: str) -> None:
    from penstock.rollout.engines.vllm.arguments import parsed

    with pytest.raises(ConfigError) as refused:
        parsed({name: value, "block_size": 32} if name != "block_size" else {name: value})
    (told,) = refused.value.violations
    assert told.startswith(f"rollout.engine.args.{name}={value!r}: ")
    assert why in told


def test_all_reserved_arguments_exist_and_so_does_every_argument_that_penstock_sets() -> None:
    """A newer vLLM may rename them, and what is not reserved under its new name could be passed."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from penstock.rollout.engines.vllm.arguments import OTHER_KEYS, RESERVED

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert not [name for name in [*RESERVED, *OTHER_KEYS] if name not in known]
    assert not RESERVED.keys() & OTHER_KEYS.keys()


def test_what_penstock_sets_cannot_be_set_again(tiny_model_config: ModelConfig) -> None:
    from penstock.rollout.engines.vllm.arguments import OTHER_KEYS, RESERVED, engine_args, step_of_a_cpu

    engine = VllmEngineConfig(type="vllm")
    spec = make_spec(tiny_model_config, engine, "keep_kv")
    ours = engine_args(spec, engine)
    changed = {
        field.name
        for field in fields(ours)
        if getattr(ours, field.name) != (field.default if field.default is not MISSING else field.default_factory())
    }
    assert "model" in changed
    assert changed - step_of_a_cpu(spec, engine).keys() <= RESERVED.keys() | OTHER_KEYS.keys()


def test_a_step_of_a_cpu_engine_computes_about_a_second_and_a_user_may_change_it(
    tiny_model_config: ModelConfig,
) -> None:
    from penstock.rollout.engines.vllm.arguments import CPU_STEP_FLOPS, engine_args, step_of_a_cpu

    engine = VllmEngineConfig(type="vllm", max_num_seqs=64)
    spec = make_spec(tiny_model_config, engine, "keep_kv")
    assert step_of_a_cpu(spec, engine)["max_num_batched_tokens"] == 2048  # a tiny model: vLLM's own limit
    large = spec.model.model_copy(update={"shape": spec.model.shape.model_copy(update={"num_layers": 200_000})})
    of_large = make_spec(large, engine, "keep_kv")
    tokens = step_of_a_cpu(of_large, engine)["max_num_batched_tokens"]
    assert tokens == max(64, int(CPU_STEP_FLOPS / (2 * large.shape.active_parameters)))
    assert tokens < 2048
    theirs = VllmEngineConfig(type="vllm", max_num_seqs=64, args={"max_num_batched_tokens": 99, "block_size": "64"})
    asked = engine_args(of_large, theirs)
    assert (asked.max_num_batched_tokens, asked.block_size, theirs.block_tokens("cpu")) == (99, 64, 64)


@pytest.mark.full
def test_the_dry_run_refuses_what_vllm_refuses_with_all_other_mistakes() -> None:
    typed = ["+rollout.engine.args={block_size: large, quantization: fp8}", "trainer.num_ranks=0"]
    with pytest.raises(ConfigError):
        compose_config(["experiment=arithmetic", *typed])
    with pytest.raises(ConfigError) as refused:
        load_config("train", ["experiment=arithmetic", "name=engine-args", typed[0]], dry_run=True)
    told = "\n".join(refused.value.violations)
    assert "rollout.engine.args.block_size='large': vLLM says: argument --block-size" in told
    assert "rollout.engine.args.quantization='fp8': this argument of vLLM is reserved" in told
