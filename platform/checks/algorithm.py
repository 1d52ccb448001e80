"""Cross-field checks of `trainer` and `algorithm`, including their combinations with `dataflow` and `partner`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.envs.import_path import call_problem, nearest_hint
from penstock.platform.config.field_errors import describe_errors
from penstock.platform.config.findings import Finding, Fit, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.algorithms.aggregation import SEQUENCE_SUMS
from penstock.trainer.algorithms.catalog import Custom, Named, find
from penstock.trainer.algorithms.conditions import SEVERAL_UPDATES, Condition
from penstock.trainer.algorithms.corrections import CorrectionConfig
from penstock.trainer.algorithms.losses.clipped import ClipConfig, is_dapo
from penstock.trainer.algorithms.losses.pairs import PairsConfig
from penstock.trainer.algorithms.rules import algorithm_violations
from penstock.trainer.config import TrainerConfig
from penstock.trainer.validation import muon_violations, trainer_violations

LEAST_LORA_REACH = 1e-3
"""Of the elements of alpha / rank · B: 50 steps at 1e-5 with the defaults."""


def check_trainer(config: RunConfig) -> Iterator[Finding]:
    """Check backends, parallelism and adapters by the trainer's own rules."""
    trainer, context = config.trainer, config.model.max_context_tokens
    # What fits in place of the key that a sentence begins with.
    fits = {
        "trainer.max_tokens_per_micro_batch": (
            Fit(
                "trainer.max_tokens_per_micro_batch",
                -(-context // trainer.sequence_parallel_size),
                f"a micro-batch holds a sequence of model.max_context_tokens={context}",
            ),
            Fit(
                "model.max_context_tokens",
                trainer.max_group_tokens,
                f"a sequence is in one micro-batch, trainer.max_tokens_per_micro_batch="
                f"{trainer.max_tokens_per_micro_batch}",
            ),
        ),
        "model.dtype": (Fit("model.dtype", "float32", "trainer.backend=torch computes in float32"),),
        "trainer.zero_stage": (
            (Fit("trainer.zero_stage", 0, "trainer.backend=fsdp2 shards everything"),)
            if trainer.backend == "fsdp2"
            else ()
        ),
    }
    own = trainer_violations(config.model, trainer)
    for violation in own:
        yield error(violation, fits=fits.get(violation.partition("=")[0], ()))
    violations: list[str] = []
    if config.algorithm.needs_critic:
        violations += muon_violations("critic.optimizer", config.critic.optimizer, trainer, is_adapted=False)
    if config.partner is not None:
        others = [one for one in trainer_violations(config.partner.model, trainer) if one not in own]
        violations += [re.sub(r"\bmodel\.", "partner.model.", one) for one in others]
        if (optimizer := config.partner.optimizer) is not None:
            violations += muon_violations("partner.optimizer", optimizer, trainer, is_adapted=trainer.lora is not None)
    yield from map(error, violations)


def check_unread_trainer_settings(config: RunConfig) -> Iterator[Finding]:
    """Warn of settings of optimizers and sequence parallelism that are not read, or not to their end."""
    trainer = config.trainer
    if trainer.sequence_parallel is not None and trainer.sequence_parallel_size == 1:
        yield warning(
            f"trainer.sequence_parallel={trainer.sequence_parallel} has no effect with "
            "trainer.sequence_parallel_size=1: no ranks share a sequence. Use sequence_parallel_size above 1, or leave "
            "it out."
        )
    optimizers = {"trainer.optimizer": trainer.optimizer}
    if config.algorithm.needs_critic:
        optimizers["critic.optimizer"] = config.critic.optimizer
    num_updates = config.total_steps * config.algorithm.updates_per_batch
    for key, optimizer in optimizers.items():
        for name in ("decay", "final_lr_ratio"):
            if not optimizer.decay_steps and config.is_typed(f"{key}.{name}"):
                yield warning(
                    f"{key}.{name}={getattr(optimizer, name)} has no effect with {key}.decay_steps=0: the rate never "
                    "decays. Use decay_steps above 0, or leave it out."
                )
        if key == "trainer.optimizer" and optimizer.warmup_steps > num_updates:
            yield warning(
                f"{key}.warmup_steps={optimizer.warmup_steps} with {num_updates} optimizer steps (total_steps="
                f"{config.total_steps}): the rate never reaches {key}.lr={optimizer.lr:g}. Use fewer, or more steps."
            )


def check_no_lora(config: RunConfig) -> Iterator[Finding]:
    """Refuse adapters for reward models, whose new head must be trained whole."""
    if config.trainer.lora is not None:
        yield error(
            "trainer.lora with `penstock rm`: a reward model begins with a new head, which must be trained whole. Use "
            "trainer.lora=null."
        )


def check_lora_reference(config: RunConfig) -> Iterator[Finding]:
    """Warn of reference settings that have no effect because the policy without its adapters is the reference."""
    reference = config.reference
    is_own = config.trainer.lora is not None and reference.path is None and config.algorithm.needs_reference
    if is_own and (reference.pool is not None or reference.num_workers > 1):
        yield warning(
            f"reference.pool={reference.pool} and reference.num_workers={reference.num_workers} have no effect with "
            "trainer.lora and reference.path=null: the trainer itself is the reference, without its adapters.",
            "reference",
        )


def check_lora_rounding(config: RunConfig) -> Iterator[Finding]:
    """Warn of adapters that stay so small that bfloat16 rounds much of them away (benchmarks/lora_rounding.py)."""
    lora, lr = config.trainer.lora, config.trainer.optimizer.lr
    num_updates = config.total_steps * config.algorithm.updates_per_batch
    if lora is None or config.model.dtype != "bfloat16":
        return
    reach = lora.alpha / lora.rank * lr * num_updates  # AdamW changes an element of B by the rate at most
    if reach < LEAST_LORA_REACH:
        yield warning(
            f"trainer.lora with model.dtype=bfloat16 and {num_updates} optimizer steps at trainer.optimizer.lr={lr:g} "
            f"(total_steps={config.total_steps}): elements of alpha / rank · B reach {reach:.1g} at most. Below "
            f"{LEAST_LORA_REACH:g} bfloat16 rounds much of the update away, in the trainer's forward as in the "
            "engines. Use a higher rate (about ten times that of full training) or more steps."
        )


def check_algorithm(config: RunConfig) -> Iterator[Finding]:
    """Report combinations within the section that cannot work."""
    yield from map(error, algorithm_violations(config.algorithm))
    advantage, loss = find("advantage", config.algorithm.advantage.name), config.algorithm.loss_entry
    for entry, parameters in ((advantage, ("rewards", "config")), (loss, ("tokens", "config"))):
        if not entry.is_own:
            continue
        key = f"algorithm.{entry.kind}.function"
        try:
            function = entry.load()
        except ConfigError as problem:
            yield from (error(violation, key) for violation in problem.violations)
            continue
        if wrong := misfit(function, parameters):
            yield error(f"{key}={entry.name!r} {wrong}", key)
        if entry.level == "pair" and not (entry.settings and issubclass(entry.settings, PairsConfig)):
            yield error(
                f"{key}={entry.name!r} compares pairs, but its settings do not say which. Let them be a subclass of "
                "PairsConfig (trainer/algorithms/losses/pairs.py).",
                key,
            )
        if entry.settings is not None:
            yield from _of_args(entry.kind, getattr(config.algorithm, entry.kind), entry.settings)


def _of_args(kind: str, section: Custom, settings: type[BaseModel]) -> Iterator[Finding]:
    """Check the settings that a user's function has declared."""
    try:
        settings.model_validate(section.args)
    except ValidationError as problem:
        described = describe_errors(problem, {}, settings, ("algorithm", kind, "args"))
        yield from (error(sentence, key) for key, sentence in described.items())


def misfit(function: Callable[..., Any], parameters: Sequence[str]) -> str:
    """Return why a user's function cannot be called with these positional arguments; empty if it can.

    Args:
        function: The function, or an object that can be called.
        parameters: Names of the arguments, for the message.
    """
    call = f"({', '.join(parameters)})"
    if isinstance(function, type | BuiltinFunctionType):
        kind = "class" if isinstance(function, type) else "builtin function"
        return f"is a {kind}, but would be called with {call}. Name a function of yours."
    problem = call_problem(function, call, *parameters)
    return f"{problem}. Change its parameters." if problem else ""


def check_reward_parts(config: RunConfig) -> Iterator[Finding]:
    """Check that parts of the reward that settings name are among `reward.parts`. Parts of a function are not known."""
    parts, named = config.reward.parts, [("algorithm.reward_weights", name) for name in config.algorithm.reward_weights]
    if config.dataflow.filters.zero_variance_part is not None:
        named.append(("dataflow.filters.zero_variance_part", config.dataflow.filters.zero_variance_part))
    if config.evaluation.part is not None:
        named.append(("evaluation.part", config.evaluation.part))
    for key, name in named if parts else ():
        if name.partition("/")[0] not in parts:
            failing = "evaluation" if key == "evaluation.part" else "group"
            yield error(
                f"{key} names {name}, which is none of reward.parts: every {failing} would fail for lack of it. "
                f"Parts: {', '.join(parts)}.{nearest_hint(name, parts)}",
                "reward.parts",
            )


def check_group_size(config: RunConfig) -> Iterator[Finding]:
    """Check that a group has as many members as the algorithm compares with one another."""
    algorithm, flow = config.algorithm, config.dataflow
    advantage, loss = find("advantage", algorithm.advantage.name), algorithm.loss_entry
    has_baseline = advantage.level == "group" or advantage.name == "reinforce_pp_baseline"
    if loss.level == "pair":
        setting, why = f"algorithm.loss={loss.name}", "it compares the answers of a group in pairs"
    elif loss.needs_advantages and has_baseline and not (advantage.is_own or algorithm.teacher_coefficient):
        setting, why = f"algorithm.advantage={advantage.name}", "its baseline is the rewards of a group"
    else:
        return
    alone = Fit(
        "algorithm.advantage.type", "reinforce_pp", f"a group of dataflow.group_size={flow.group_size} has no baseline"
    )
    for key, size in (("group_size", flow.group_size), ("min_group_size", flow.fewest_members)):
        if size < 2:
            yield error(
                f"dataflow.{key}={size} with {setting}: {why}, and one answer alone has none to be compared with, so "
                "nothing would be learned. Use at least 2, or an algorithm without a baseline of the group: "
                "algorithm=ppo, or algorithm=reinforce_pp algorithm/advantage=reinforce_pp.",
                "algorithm",
                fits=[alone] if advantage.name == "reinforce_pp_baseline" else (),
            )
            return


def check_algorithm_flow(config: RunConfig) -> Iterator[Finding]:
    """Check that streaming and trimming leave the algorithm the whole batches and sequences that it needs."""
    algorithm, flow = config.algorithm, config.dataflow
    advantage, loss = find("advantage", algorithm.advantage.name), algorithm.loss_entry
    if (
        flow.stream_micro_batches
        and advantage.level == "batch"
        and getattr(algorithm.advantage, "whiten", "none") == "batch"
    ):
        yield error(
            f"dataflow.stream_micro_batches=true with algorithm.advantage={advantage.name}: it whitens over all tokens "
            "of the batch, which are not available when the first part is trained. Use one of the two, or "
            "algorithm.advantage.whiten=none."
        )
    for entry in algorithm.entries_of_batch if flow.stream_micro_batches else ():
        yield error(
            f"dataflow.stream_micro_batches=true with algorithm.{entry.kind}={entry.name}: it compares all tokens of "
            "the batch, which are not available when the first part is trained. Use one of the two."
        )
    if flow.stream_micro_batches and algorithm.imitates_passing:
        yield error(
            f"dataflow.stream_micro_batches=true with algorithm.nll_coefficient={algorithm.nll_coefficient:g}: it is a "
            "mean over the answers of the batch that pass, and how many these are is not known when the first part is "
            "trained. Use one of the two."
        )
    if flow.stream_micro_batches and algorithm.updates_per_batch > 1:
        yield error(
            f"dataflow.stream_micro_batches=true with algorithm.mini_batches={algorithm.mini_batches} x "
            f"epochs={algorithm.epochs}: mini-batches are drawn from the whole batch, which is not available when the "
            "first part is trained. Use one of the two."
        )
    if flow.length_limiting is not None and algorithm.overlong.mode == "penalty":
        yield error(
            f"dataflow.length_limiting={flow.length_limiting} with algorithm.overlong.mode=penalty: the penalty begins "
            "shortly before rollout.sampling.max_new_tokens, so answers that a lower limit cuts off would have none. "
            "Use one of the two, or algorithm.overlong.mode=mask."
        )
    if flow.batch_groups % algorithm.mini_batches:
        yield error(
            f"algorithm.mini_batches={algorithm.mini_batches} does not divide dataflow.batch_groups="
            f"{flow.batch_groups}: mini-batches of unequal size would weigh groups unequally. Use a divisor.",
            fits=[
                Fit(
                    "dataflow.batch_groups",
                    -(-flow.batch_groups // algorithm.mini_batches) * algorithm.mini_batches,
                    f"algorithm.mini_batches={algorithm.mini_batches} divides it",
                )
            ],
        )
    if flow.on_expiry is ExpiryPolicy.TRIM and flow.max_staleness:
        whole = [entry for entry in (loss, *algorithm.correction.weights) if entry.level in ("sequence", "pair")]
        for entry in whole:
            yield error(
                f"dataflow.on_expiry=trim with algorithm.{entry.kind}={entry.name}: the ratio of a sequence would be "
                "that of its newer part only. Use on_expiry=wait or drop."
            )


def check_algorithm_parallel(config: RunConfig) -> Iterator[Finding]:
    """Refuse settings that need whole sequences under sequence parallelism, where each rank has a part of them."""
    algorithm, size = config.algorithm, config.trainer.sequence_parallel_size
    if size == 1:
        return
    found = [
        f"{entry.kind}={entry.name}"
        for entry in (algorithm.loss_entry, *algorithm.correction.entries)
        # A custom loss may need whole sequences.
        if entry.level in ("sequence", "pair") or entry.masks_sequences or entry.is_own
    ]
    if algorithm.entropy_top_share < 1:
        found.append(f"entropy_top_share={algorithm.entropy_top_share:g}")
    instead = "" if config.trainer.backend == "fsdp2" else ", or tensor parallelism"
    for setting in found:
        yield error(
            f"algorithm.{setting} with trainer.sequence_parallel_size={size}: it needs all tokens of a sequence, but "
            f"each rank would have only a part of it. Use sequence_parallel_size=1{instead}.",
            f"algorithm.{setting.partition('=')[0]}",
        )


def check_critic(config: RunConfig) -> Iterator[Finding]:
    """Check what a critic can be combined with, and report critic settings without a critic."""
    algorithm, trainer = config.algorithm, config.trainer
    if not algorithm.needs_critic:
        if config.critic.path is not None:
            yield error(
                f"critic.path={config.critic.path} with algorithm.advantage={algorithm.advantage.name}, which has no "
                "critic, so it would not be loaded. Use algorithm=ppo, or critic.path=null."
            )
        if (ratio := config.critic.updates_per_policy_update) != 1:
            yield error(
                f"critic.updates_per_policy_update={ratio:g} with algorithm.advantage={algorithm.advantage.name}, "
                "which has no critic, so nothing would be updated. Use algorithm=ppo, or leave it at 1."
            )
        return
    if config.dataflow.stream_micro_batches:
        yield error(
            f"dataflow.stream_micro_batches=true with algorithm.advantage={algorithm.advantage.name}: its critic is "
            "trained on whole batches. Use one of the two."
        )
    if config.critic.warmup_steps >= config.total_steps:
        yield error(
            f"critic.warmup_steps={config.critic.warmup_steps} with total_steps={config.total_steps}: only the critic "
            "would be trained, and the policy never. Use fewer, or more total_steps.",
            fits=[
                Fit(
                    "critic.warmup_steps",
                    config.total_steps // 2,
                    f"the policy is trained in the rest of the total_steps={config.total_steps}",
                )
            ],
        )
    ratio, num_updates = config.critic.updates_per_policy_update, config.total_steps * algorithm.updates_per_batch
    if int(num_updates * ratio + 1e-9) < 1:
        yield error(
            f"critic.updates_per_policy_update={ratio:g} with {num_updates} updates of the policy (total_steps="
            f"{config.total_steps}): the critic would never be updated. Use at least {1 / num_updates:.3g}."
        )
    why = (
        "the returns of a sequence are computed on one rank"
        if trainer.backend == "fsdp2"
        else "DeepSpeed keeps one set of such groups per process, and the critic is a second engine in that process"
    )
    yield from split_models(trainer, f"algorithm.advantage={algorithm.advantage.name}", why)


def check_teacher(config: RunConfig) -> Iterator[Finding]:
    """Check that exactly the algorithms that learn from a teacher have one, and do not filter groups by reward."""
    algorithm, teacher = config.algorithm, config.teacher
    if not algorithm.needs_teacher:
        if teacher.path is not None:
            yield error(
                f"teacher.path={teacher.path} with algorithm.loss={algorithm.loss.name}, which uses no teacher, so it "
                "would not be loaded. Use algorithm=distill, algorithm.teacher_coefficient above 0, or "
                "teacher.path=null."
            )
        return
    if teacher.path is None:
        yield error(
            f"teacher.path is not set, but algorithm.loss={algorithm.loss.name} with algorithm.teacher_coefficient="
            f"{algorithm.teacher_coefficient:g} learns from a teacher. Give the directory or hub name of a policy with "
            "the same tokenizer."
        )
    if config.dataflow.filters.zero_variance and algorithm.loss.type == "distill":
        yield error(
            "dataflow.filters.zero_variance=true with algorithm.loss=distill: it drops groups of equal rewards, but "
            "distillation learns from them as much as from others. Use zero_variance=false."
        )
    elif config.dataflow.filters.zero_variance:
        yield warning(
            "dataflow.filters.zero_variance=true with algorithm.teacher_coefficient="
            f"{algorithm.teacher_coefficient:g}: it drops groups of equal rewards, which the teacher would train too. "
            "Use zero_variance=false.",
            "dataflow.filters",
        )


def check_algorithm_limits(config: RunConfig) -> Iterator[Finding]:
    """Check the token budget of pairs, and that the optimizer can divide the gradient."""
    algorithm, trainer, context = config.algorithm, config.trainer, config.model.max_context_tokens
    pairs = algorithm.loss.pairs if isinstance(algorithm.loss, PairsConfig) else None
    together = config.dataflow.group_size if pairs == "all" else 2
    if pairs is not None and trainer.max_tokens_per_micro_batch < together * context:
        yield error(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below {together} x "
            f"model.max_context_tokens={context}: algorithm.loss={algorithm.loss.name} with algorithm.loss.pairs="
            f"{pairs} needs {together} answers of a group in one micro-batch. Use at least "
            f"{together * context}.",
            fits=[
                Fit(
                    "trainer.max_tokens_per_micro_batch",
                    together * context,
                    f"{together} answers of a group share a micro-batch",
                ),
                Fit(
                    "model.max_context_tokens",
                    trainer.max_tokens_per_micro_batch // together,
                    f"{together} answers of a group share trainer.max_tokens_per_micro_batch="
                    f"{trainer.max_tokens_per_micro_batch}",
                ),
            ],
        )
    if algorithm.correction.renormalize != "none" and cannot_divide(config):
        yield error(
            f"algorithm.correction.renormalize={algorithm.correction.renormalize} with trainer.zero_stage="
            f"{trainer.zero_stage} in model.dtype={config.model.dtype}: the gradient is divided at the end of the "
            "batch by the share that was left, which DeepSpeed's plain bfloat16 optimizer does not support. Use "
            "trainer.zero_stage=2 or 3."
        )


def check_algorithm_bias(config: RunConfig) -> Iterator[Finding]:
    """Warn of combinations that run but are biased, or lack a part of the algorithm that they are named after."""
    algorithm, eta = config.algorithm, config.dataflow.max_staleness
    loss = algorithm.loss_entry
    if eta and loss.takes_weight and algorithm.proximal != "behavior" and not algorithm.correction.weights:
        weight = "tis_seq" if loss.level == "sequence" else "decoupled"
        advice = f"{weight}, or algorithm.proximal=behavior" if loss.has_ratio else "tis_token"
        yield warning(
            f"algorithm.correction={algorithm.correction} with dataflow.max_staleness={eta}: stale tokens "
            f"are trained as if they were on-policy, which biases the gradient. Use algorithm/correction={advice}.",
            "algorithm.proximal",
        )
    if algorithm.advantage.type == "dr_grpo" and algorithm.aggregation not in SEQUENCE_SUMS:
        yield warning(
            f"algorithm.advantage=dr_grpo with algorithm.aggregation={algorithm.aggregation}: dr_grpo omits the "
            "deviation to be unbiased, and this aggregation adds a length bias. Use aggregation=constant_length."
        )
    filters = config.dataflow.filters
    lowest, highest = filters.pass_rate or (0.0, 1.0)
    drops_equal_groups = filters.zero_variance or (lowest > 0 and highest < 1)
    if isinstance(algorithm.loss, ClipConfig) and is_dapo(algorithm) and not drops_equal_groups:
        yield warning(
            f"dataflow.filters.zero_variance=false with algorithm.loss.clip_high={algorithm.loss.clip_high:g} above "
            f"clip_low={algorithm.loss.clip_low:g} and algorithm.overlong.mode=penalty, which is DAPO without its "
            "dynamic sampling: groups of equal rewards stay in the batch and give no gradient, so it is effectively "
            "smaller. Use dataflow.filters.zero_variance=true, which samples other groups instead.",
            "dataflow.filters",
        )
    if algorithm.loss.type == "sft":
        yield warning(
            "algorithm.loss=sft raises the probability of every sampled token, so rewards have no effect. Use "
            "`penstock sft` to train on gold answers."
        )


def check_published(config: RunConfig) -> Iterator[Finding]:
    """Warn of each setting that the paper of the chosen loss or advantage argues against.

    What such a paper only leaves out (a divergence in CISPO, say) is not named, but in the comments of the preset.
    """
    algorithm = config.algorithm
    for one in (*algorithm.loss_entry.deviations, *find("advantage", algorithm.advantage.name).deviations):
        if one.holds(algorithm):
            shown = [f"algorithm.{key}={_shown(attrgetter(key)(algorithm))}" for key in (one.key, *one.others)]
            yield warning(f"{shown[0]} with {', '.join(shown[1:])}: {one.why}. {one.remedy}.")


def check_without_effect(config: RunConfig) -> Iterator[Finding]:
    """Warn of each setting that differs from its default and is not read (`trainer.algorithms.conditions`).

    Each variant (a loss, an estimator, a correction) has only settings that it reads. The remaining cases are settings
    that depend on other settings: the first condition that fails is named. Combinations that are refused as errors are
    not reported again.
    """
    algorithm = config.algorithm
    refusals = [error(violation) for violation in algorithm_violations(algorithm)]
    is_stale = Condition(
        lambda _: config.dataflow.max_staleness > 0,
        ("dataflow.max_staleness",),
        "every token has staleness 0, so its factor is 1",
        "Use dataflow.max_staleness above 0",
    )
    settings = [*_settings("algorithm", algorithm), *_settings("critic", config.critic)]
    for key, value, field in settings:
        conditions = [one for one in field.metadata if isinstance(one, Condition)]
        conditions += [is_stale] if key == "algorithm.staleness_decay" else []
        if key == "critic.value_clip" and config.critic.updates_per_policy_update > 1:
            conditions.remove(SEVERAL_UPDATES)  # the critic itself has several
        default = field.get_default(call_default_factory=True)
        # For a variant only its choice is compared; its settings have their own conditions.
        is_default = value.name == default.name if isinstance(value, Named | Custom) else value == default
        failed = next((condition for condition in conditions if not condition.holds(algorithm)), None)
        if is_default or failed is None or any(refusal.touches([key]) for refusal in refusals):
            continue
        keys = [each if each.startswith("dataflow.") else f"algorithm.{each}" for each in failed.keys]
        combination = ", ".join(f"{each}={_shown(attrgetter(each)(config))}" for each in keys)
        yield warning(
            f"{key}={_shown(value)} has no effect with {combination}: {failed.why}. {failed.remedy}, or "
            f"leave {key.rpartition('.')[2]} at {_shown(default)}."
        )


def _settings(path: str, section: BaseModel) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Key, value and field of all settings of a section and of those in it."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        yield f"{path}.{name}", value, field
        if isinstance(value, BaseModel):
            yield from _settings(f"{path}.{name}", value)


def _shown(value: Any) -> str:
    if isinstance(value, Named | Custom):
        return value.name
    return str(value) if isinstance(value, str | CorrectionConfig) else json.dumps(value)


def check_partner(config: RunConfig) -> Iterator[Finding]:
    """Check that both policies can train on the same groups, with tokens of the other policy corrected for."""
    partner, flow, algorithm = config.partner, config.dataflow, config.algorithm
    if partner is None:
        return
    if partner.model.path is None or partner.model.from_scratch:
        yield error("partner.model.path is not set: the partner starts from a policy on disk.")
    ours, theirs = config.model.shape.vocab_size, partner.model.shape.vocab_size
    if ours != theirs:
        yield error(
            f"partner.model.shape.vocab_size={theirs} differs from model.shape.vocab_size={ours}: each policy trains "
            "on tokens that the other one has sampled. Use two policies with the same tokenizer."
        )
    if flow.group_size % 2:
        yield error(
            f"dataflow.group_size={flow.group_size} is odd: half of each group is sampled by the partner. Use "
            f"{flow.group_size + 1}.",
            "partner",
            fits=[Fit("dataflow.group_size", flow.group_size + 1, "half of each group is sampled by the partner")],
        )
    loss = algorithm.loss_entry
    has_own_ratio = loss.has_ratio and algorithm.proximal == "behavior"
    looks_at_behavior = loss.needs_advantages and not loss.takes_weight
    carries = looks_at_behavior or has_own_ratio
    if not algorithm.correction.weights and not carries and not loss.is_own:
        yield error(
            f"partner with algorithm.correction={algorithm.correction}: tokens sampled by the partner would be trained "
            "as if the policy had sampled them. Use algorithm/correction=f_tis."
        )
    for key, is_set, why in (
        ("algorithm.kl.coefficient", algorithm.needs_reference, "the reference scores groups for one policy"),
        ("dataflow.stream_micro_batches", flow.stream_micro_batches, "both policies train on complete batches"),
        ("cluster.colocated", config.cluster.colocated, "only one trainer and its engines can take turns"),
        ("algorithm.proximal", algorithm.proximal == "interpolate", "tokens of the partner have no staleness"),
    ):
        if is_set:
            yield error(f"partner with {key}={attrgetter(key)(config)}: {why}. Leave it at its default.")


def cannot_divide(config: RunConfig) -> bool:
    """Whether DeepSpeed's plain bfloat16 optimizer is used, which cannot divide the gradient after a batch."""
    trainer = config.trainer
    return trainer.backend == "deepspeed" and trainer.zero_stage < 2 and config.model.dtype != "float32"


def split_models(trainer: TrainerConfig, setting: str, why: str) -> Iterator[Finding]:
    """Refuse tensor and sequence parallelism for settings that need whole sequences on one rank."""
    for key in ("tensor_parallel_size", "sequence_parallel_size"):
        if (size := getattr(trainer, key)) > 1:
            larger = "more ranks" if trainer.backend == "fsdp2" else "ZeRO"
            yield error(
                f"trainer.{key}={size} with {setting}: {why}. Use 1, and {larger} for models that are too large."
            )


def unequal_work(key: str, value: int, trainer: TrainerConfig) -> Iterator[Finding]:
    """Check that `value` groups or examples can be divided evenly among the data-parallel ranks."""
    size = trainer.data_parallel_size
    if size == 0 or value % size == 0:
        return
    below = value - value % size
    choices = f"{below} or {below + size}" if below else str(size)
    ranks = f"trainer.num_ranks={trainer.num_ranks}"
    if size != trainer.num_ranks:
        ranks = f"the data-parallel size {size} of {ranks}"
    yield error(
        f"{key}={value} is not a multiple of {ranks}: ranks would get unequal work. Use {choices}.",
        *("trainer.num_ranks", "trainer.tensor_parallel_size", "trainer.sequence_parallel_size"),
        fits=[Fit(key, below + size, f"the work of {size} ranks is equal")],
    )


ALGORITHM_CHECKS = (
    check_algorithm, check_group_size, check_algorithm_flow, check_algorithm_parallel, check_critic, check_teacher,
    check_lora_reference, check_lora_rounding, check_algorithm_limits, check_algorithm_bias, check_partner,
    check_reward_parts, check_without_effect, check_unread_trainer_settings, check_published,
)  # fmt: skip
