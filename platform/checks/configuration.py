"""Cross-field checks: combinations of valid values that cannot run, or not well. Pure, no machine is looked at.

When a run cannot deadlock. A batch of B groups is trained when B groups are ready, and `wait` holds it open for
the oldest ones. That always ends if every live group can finish: (1) an engine has a slot and a KV cache that holds
one trajectory of full length, so the engine's queue, which is first come first served, always moves; (2) a group whose
members failed can still be trained, min_group_size <= group_size; (3) the trainer can take every trajectory,
max_tokens_per_micro_batch >= max_context_tokens; (4) colocated roles never wait for each other's device,
max_staleness = 0. The admission gate (η + 1)·B >= B always lets a whole batch live at once. So neither the number of
slots nor η nor B can deadlock a run by itself; too few slots only make it slow, and that is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.platform.checks.algorithm import (
    ALGORITHM_CHECKS,
    check_no_lora,
    check_trainer,
    split_models,
    unequal_work,
)
from penstock.platform.checks.cluster import check_cluster, check_pools
from penstock.platform.checks.flow import FLOW_CHECKS
from penstock.platform.checks.without_effect import check_without_effect
from penstock.platform.config.findings import Command, Finding, error
from penstock.platform.config.schema import RunConfig

Check = Callable[[RunConfig], Iterator[Finding]]


def check_config(config: RunConfig, command: Command) -> list[Finding]:
    """Run every check that concerns `command`."""
    findings = list(check_pools(config))
    if not findings:  # roles can be placed
        findings += check_cluster(config, command)
    return findings + [finding for check in _CHECKS[command] for finding in check(config)]


def check_model(config: RunConfig) -> Iterator[Finding]:
    """Heads must share keys evenly; flash attention needs half precision."""
    shape, model = config.model.shape, config.model
    if shape.num_heads % shape.num_kv_heads:
        yield error(
            f"model.shape.num_heads={shape.num_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}: query "
            "heads could not share key/value heads evenly. Copy both from the checkpoint's config.json."
        )
    if model.attention == "flash_attention_2" and model.dtype == "float32":
        yield error(
            "model.attention=flash_attention_2 does not work in model.dtype=float32: its kernels take 16-bit "
            "numbers only. Use model.dtype=bfloat16 or model.attention=sdpa."
        )


def check_has_policy(config: RunConfig) -> Iterator[Finding]:
    """`train` and `eval` start from a policy."""
    if config.model.from_scratch:
        yield error(
            "model.from_scratch=true is only for `penstock sft`: random weights never earn a reward to learn from. "
            "Set model.from_scratch=false and model.path to a policy."
        )
    elif config.model.path is None:
        yield error("model.path is not set: there is no policy to start from. Give a model directory or a hub name.")


def check_sft_section(config: RunConfig) -> Iterator[Finding]:
    """`sft` needs its section, a start and equal work for the ranks."""
    if config.sft is None:
        yield error(
            "sft is not set, so `penstock sft` does not know batch size and length. Use experiment=arithmetic_sft "
            "or add an sft section."
        )
        return
    if not config.model.from_scratch and config.model.path is None:
        yield error("model.path is not set. Give a model directory, or model.from_scratch=true.")
    yield from unequal_work("sft.batch_size", config.sft.batch_size, config.trainer)


def check_preference_section(config: RunConfig) -> Iterator[Finding]:
    """`rm` and `dpo` need their section, a policy to start from, equal work for the ranks, and room for a pair."""
    preference, trainer, context = config.preference, config.trainer, config.model.max_context_tokens
    if preference is None:
        yield error(
            "preference is not set, so batch size and length of learning from pairs are not known. Use "
            "experiment=arithmetic_preference or add a preference section."
        )
        return
    yield from unequal_work("preference.batch_size", preference.batch_size, trainer)
    if trainer.max_tokens_per_micro_batch < 2 * context:
        yield error(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below 2 x "
            f"model.max_context_tokens={context}: the two answers of a pair lie in one micro-batch. Use at least "
            f"{2 * context}."
        )
    yield from split_models(trainer, "pairs", "a pair is compared by one rank that sees all of it")


def check_sampling(config: RunConfig) -> Iterator[Finding]:
    """Room for an answer."""
    sampling, context = config.rollout.sampling, config.model.max_context_tokens
    if sampling.max_new_tokens >= context:
        yield error(
            f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.max_context_tokens={context}: prompt and answer share the context. Use less than {context}, or "
            "a longer context."
        )


_CHECKS: dict[Command, tuple[Check, ...]] = {
    "train": (
        check_model, check_has_policy, check_sampling, check_trainer, *FLOW_CHECKS, *ALGORITHM_CHECKS,
        check_without_effect,
    ),
    "sft": (check_model, check_sft_section, check_trainer),
    "rm": (check_model, check_has_policy, check_preference_section, check_trainer, check_no_lora),
    "dpo": (check_model, check_has_policy, check_preference_section, check_trainer),
    "eval": (check_model, check_has_policy, check_sampling),
    "sample": (check_model, check_has_policy, check_sampling),
}  # fmt: skip
