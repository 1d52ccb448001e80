"""Cross-field checks: combinations of valid values that cannot run or run badly. Pure: they do not inspect the machine.

Absence of deadlocks: a batch of B groups trains when B groups are ready, and under `wait` it is held open for the
oldest groups. This wait ends if every live group can finish, for which the checks require: (1) an engine has a slot and
its KV cache holds one trajectory of full length, so its first-come-first-served queue always makes progress; (2) a
group whose members have failed can still be trained, min_group_size <= group_size; (3) the trainer can process every
trajectory, max_tokens_per_micro_batch >= max_context_tokens; (4) colocated roles never wait for each other's device,
max_staleness = 0. The admission window (η + 1)·B >= B always admits a whole batch. Therefore no number of slots, η or B
alone can deadlock a run. Too few slots only slow it down, which is a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from penstock.platform.checks.algorithm import (
    ALGORITHM_CHECKS,
    check_no_lora,
    check_trainer,
    split_models,
    unequal_work,
)
from penstock.platform.checks.cluster import check_cluster, check_pools
from penstock.platform.checks.flow import FLOW_CHECKS, check_answers, check_sets
from penstock.platform.config.findings import Command, Finding, Fit, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.rollout.config import MAX_TOP_K
from penstock.trainer.config import PreferenceConfig

Check = Callable[[RunConfig], Iterator[Finding]]


def check_config(config: RunConfig, command: Command) -> list[Finding]:
    """Run all checks that apply to `command`."""
    findings = list(check_pools(config))
    if not findings:  # the pools exist, so roles can be placed on them
        findings += check_cluster(config, command)
    return findings + [finding for check in _CHECKS[command] for finding in check(config)]


def check_model(config: RunConfig) -> Iterator[Finding]:
    """Check the ratio of query to key/value heads."""
    shape = config.model.shape
    if shape.num_heads % shape.num_kv_heads:
        # Unless it is made from scratch, the shape is that of the model's config.json.
        where = "model.shape: " if config.model.from_scratch else f"model.path={config.model.path}: "
        yield error(
            f"{where}num_heads={shape.num_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}: query heads "
            "cannot share key/value heads evenly, so the model cannot be trained. Use a model of another shape."
        )


def check_has_policy(config: RunConfig) -> Iterator[Finding]:
    """Check that there is a policy to start from."""
    if config.model.from_scratch:
        yield error(
            "model.from_scratch=true is only for `penstock sft`: a random policy earns no reward to learn from. "
            "Set model.from_scratch=false and model.path to a policy."
        )
    elif config.model.path is None:
        yield error("model.path is not set: there is no policy to start from. Give a model directory or a hub name.")


def check_sft_section(config: RunConfig) -> Iterator[Finding]:
    """Check that `sft` has its section, an initial model, and equal work for all ranks."""
    if config.sft is None:
        yield error(
            "sft is not set, so `penstock sft` has no batch size and length. Use experiment=arithmetic_sft "
            "or add an sft section."
        )
        return
    if not config.model.from_scratch and config.model.path is None:
        yield error("model.path is not set. Give a model directory, or model.from_scratch=true.")
    yield from unequal_work("sft.batch_size", config.sft.batch_size, config.trainer)


def check_preference_section(config: RunConfig) -> Iterator[Finding]:
    """Check that `rm` and `dpo` have their section and an initial policy, and that pairs fit a micro-batch."""
    preference, trainer, context = config.preference, config.trainer, config.model.max_context_tokens
    if preference is None:
        yield error(
            "preference is not set, so training on pairs has no batch size and length. Use "
            "experiment=arithmetic_preference or add a preference section."
        )
        return
    yield from unequal_work("preference.batch_size", preference.batch_size, trainer)
    if trainer.max_tokens_per_micro_batch < 2 * context:
        yield error(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below 2 x "
            f"model.max_context_tokens={context}: the two answers of a pair share one micro-batch. Use at least "
            f"{2 * context}.",
            fits=[
                Fit("trainer.max_tokens_per_micro_batch", 2 * context, "the two answers of a pair share a micro-batch"),
                Fit(
                    "model.max_context_tokens",
                    trainer.max_tokens_per_micro_batch // 2,
                    "two answers of a pair share trainer.max_tokens_per_micro_batch="
                    f"{trainer.max_tokens_per_micro_batch}",
                ),
            ],
        )
    yield from split_models(trainer, "pairs", "one rank needs the whole pair to compare its answers")


def check_no_settings_of_dpo(config: RunConfig) -> Iterator[Finding]:
    """Warn of settings of `preference` that a reward model does not read: its answers are one score each."""
    preference = config.preference
    for key in ("beta", "length", "nll_coefficient") if preference is not None else ():
        value, default = getattr(preference, key), PreferenceConfig.model_fields[key].default
        if value != default:
            yield warning(
                f"preference.{key}={value} has no effect with `penstock rm`: a reward model compares one score of each "
                f"answer. Leave it at {default}."
            )


def check_sampling(config: RunConfig) -> Iterator[Finding]:
    """Check that the context has space for a prompt and an answer, and that what is sampled from can be recorded."""
    sampling, context = config.rollout.sampling, config.model.max_context_tokens
    if sampling.max_new_tokens >= context:
        yield error(
            f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no space for a prompt in "
            f"model.max_context_tokens={context}: prompt and answer share the context. Use less than {context}, or "
            "a longer context.",
            fits=[
                Fit(
                    "rollout.sampling.max_new_tokens",
                    max(1, context // 2),
                    f"prompt and answer share model.max_context_tokens={context}",
                ),
                Fit(
                    "model.max_context_tokens",
                    2 * sampling.max_new_tokens,
                    f"it holds a prompt and rollout.sampling.max_new_tokens={sampling.max_new_tokens}",
                ),
            ],
        )
    for key, cuts in (("top_p", sampling.top_p < 1), ("min_p", sampling.min_p > 0)):
        if cuts and not sampling.top_k:
            yield error(
                f"rollout.sampling.{key}={getattr(sampling, key):g} without rollout.sampling.top_k: the ids that each "
                "token was sampled from are recorded, since the trainer renormalises over the same ones, and without "
                f"top_k there may be as many as the vocabulary has. Use a top_k from 2 to {MAX_TOP_K}, e.g. 20."
            )
    target, largest = config.algorithm.entropy.target, sampling.top_k or config.model.shape.vocab_size
    if target is not None and target >= math.log(largest):
        yield error(
            f"algorithm.entropy.target={target:g} with {largest:,} tokens to sample from (rollout.sampling.top_k="
            f"{sampling.top_k}, model.shape.vocab_size={config.model.shape.vocab_size}): their entropy is at most ln "
            f"{largest:,} = {math.log(largest):.3g} nat, so the coefficient would rise to its maximum and stay there. "
            "Use a smaller target, e.g. 0.2."
        )
    if not sampling.top_k:
        return
    if sampling.top_k == 1 or sampling.top_k >= config.model.shape.vocab_size:
        effect = "every token is then certain, and nothing is learned" if sampling.top_k == 1 else "it cuts nothing off"
        yield error(
            f"rollout.sampling.top_k={sampling.top_k} with model.shape.vocab_size={config.model.shape.vocab_size}: "
            f"{effect}. Use 0 for all tokens, or a number from 2 to {MAX_TOP_K} and below the vocabulary."
        )
    if config.model.head_dtype == "model" and config.model.dtype != "float32":
        yield error(
            f"rollout.sampling.top_k={sampling.top_k} with model.head_dtype=model: logits rounded to "
            f"{config.model.dtype} often tie with the k-th one, and engines then keep more tokens than they report. "
            "Use model.head_dtype=float32."
        )


_CHECKS: dict[Command, tuple[Check, ...]] = {
    "train": (check_model, check_has_policy, check_sampling, check_trainer, *FLOW_CHECKS, *ALGORITHM_CHECKS),
    "sft": (check_model, check_sft_section, check_trainer),
    "rm": (
        check_model, check_has_policy, check_preference_section, check_trainer, check_no_lora,
        check_no_settings_of_dpo,
    ),
    "dpo": (check_model, check_has_policy, check_preference_section, check_trainer),
    "eval": (check_model, check_has_policy, check_sampling, check_answers, check_sets),
    "sample": (check_model, check_has_policy, check_sampling),
}  # fmt: skip
