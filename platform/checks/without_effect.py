"""Warnings about settings of `algorithm` that have no effect in their combination, and how to give them an effect.

Each variant (a loss, an estimator, a correction) has only settings that it reads. The remaining cases are settings that
depend on other settings. A table lists for each such setting the conditions under which it is read. If a setting
differs from its default and one of its conditions fails, the warning names the first failing condition. Combinations
that are refused as errors are not reported again. A custom loss or advantage has no settings of ours, and may read
whatever such a function is given, so conditions of what it reads hold; all others are checked as ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.config import CorrectionConfig, Custom, Named
from penstock.trainer.algorithms.rules import (
    LOSSES_OF_RATIO,
    ONE_TERM_PER_SEQUENCE,
    algorithm_violations,
    entries_of_batch,
)


class Condition(NamedTuple):
    """A condition under which a setting has an effect.

    Attributes:
        holds: Whether the condition holds.
        keys: Keys that determine it; keys of `algorithm` without that prefix.
        why: Explanation for the case that it does not hold.
        remedy: How to make it hold.
    """

    holds: Callable[[RunConfig], bool]
    keys: tuple[str, ...]
    why: str
    remedy: str


def _ratio_moves(config: RunConfig) -> bool:
    return config.algorithm.updates_per_batch > 1 or config.algorithm.proximal == "behavior"


def _uses_rewards(config: RunConfig) -> bool:
    return find("loss", config.algorithm.loss.name).needs_advantages


def _loss_is_its_own(config: RunConfig) -> bool:
    """Whether a ratio loss differs from `−A c`: gspo and gmpo also where advantages differ within a sequence."""
    algorithm = config.algorithm
    averages = algorithm.loss.type in ONE_TERM_PER_SEQUENCE and (algorithm.needs_critic or algorithm.kl_in_reward > 0)
    return algorithm.loss.type not in LOSSES_OF_RATIO or _ratio_moves(config) or averages


def _weighs_divergence(config: RunConfig) -> bool:
    """Whether the policy loss takes no weight of the correction, so that the divergence needs its own."""
    algorithm = config.algorithm
    return algorithm.proximal == "behavior" or not find("loss", algorithm.loss.name).takes_weight


_RATIO_MOVES = Condition(
    _ratio_moves,
    ("proximal", "mini_batches", "epochs"),
    "with one optimizer update per batch the ratio to the proximal policy is 1, so no clip bound is reached",
    "Use algorithm.proximal=behavior with algorithm/correction=none, or several updates with proximal=recompute",
)
_LOSS_IS_ITS_OWN = _RATIO_MOVES._replace(
    holds=_loss_is_its_own,
    why="with one optimizer update per batch the ratio to the proximal policy is 1, so the gradient equals that of "
    "ppo_clip and of reinforce",
)
_PROXIMAL_IS_READ = Condition(
    lambda config: (
        config.algorithm.loss.type in (*LOSSES_OF_RATIO, "clip_cov")
        or find("loss", config.algorithm.loss.name).is_own
        or not set(config.algorithm.correction.chain) <= {"opsm"}
    ),
    ("loss", "correction"),
    "neither this loss nor this correction uses the proximal policy",
    "Use algorithm.proximal=target",
)
_SEVERAL_UPDATES = Condition(
    lambda config: config.algorithm.updates_per_batch > 1,
    ("mini_batches", "epochs"),
    "with one update per batch the value equals the old value",
    "Use several updates",
)
_PROXIMAL_DIFFERS = _SEVERAL_UPDATES._replace(
    holds=lambda config: (
        _ratio_moves(config) or config.algorithm.proximal == "target" or bool(entries_of_batch(config.algorithm))
    ),
    why="with one optimizer update per batch it equals proximal=target, and recompute costs one more forward pass",
)
_ADVANTAGES = Condition(
    lambda config: _uses_rewards(config) and not config.algorithm.compares_pairs,
    ("loss",),
    "this loss uses no advantage",
    "Use a loss of advantages, such as ppo_clip",
)
_REWARDS = Condition(
    lambda config: config.algorithm.overlong.mode != "penalty" or _uses_rewards(config),
    ("loss",),
    "this loss uses no reward, from which the penalty is subtracted",
    "Use algorithm.overlong.mode=mask or drop",
)
_KL_REWARDS = Condition(
    lambda config: config.algorithm.kl.apply_to != "reward" or _uses_rewards(config),
    ("kl.apply_to", "loss"),
    "this loss uses no reward, from which the divergence is subtracted",
    "Use algorithm.kl.apply_to=loss",
)
_WHITENS = Condition(
    lambda config: getattr(config.algorithm.advantage, "whiten", "batch") == "batch",
    ("advantage.whiten",),
    "only the whitening divides by a deviation",
    "Use algorithm.advantage.whiten=batch",
)
_HAS_DEVIATION = Condition(
    lambda config: getattr(config.algorithm.advantage, "std", "none") != "none",
    ("advantage.std",),
    "there is no division that it keeps finite",
    "Use algorithm.advantage.std=sample",
)
_PENALTY = Condition(
    lambda config: config.algorithm.overlong.mode == "penalty",
    ("overlong.mode",),
    "only the penalty has a ramp",
    "Use algorithm.overlong.mode=penalty",
)
_WEIGHS_DIVERGENCE = Condition(
    _weighs_divergence,
    ("loss", "proximal"),
    "the correction weighs the divergence as it weighs the policy loss",
    "Use algorithm.proximal=behavior",
)
_CRITIC = Condition(
    lambda config: config.algorithm.needs_critic,
    ("advantage",),
    "there is no critic",
    "Use algorithm=ppo",
)
_MASKS = Condition(
    lambda config: (
        not set(config.algorithm.correction.chain) <= {"tis_token", "tis_seq"}
        or (config.algorithm.correction.renormalize == "weights" and bool(config.algorithm.correction.chain))
    ),
    ("correction",),
    "it rejects no token, so all of the batch is left",
    "Use a correction with a mask, such as decoupled or mis_seq_geo",
)
_KL_IS_COMPUTED = Condition(
    lambda config: config.algorithm.kl.coefficient > 0,
    ("kl.coefficient",),
    "a divergence of weight 0 is not computed",
    "Use algorithm.kl.coefficient above 0",
)
_KL_HAS_TARGET = Condition(
    lambda config: config.algorithm.kl.target is not None,
    ("kl.target",),
    "the coefficient is fixed",
    "Use algorithm.kl.target, the divergence that it should keep",
)
_ENTROPY_HAS_TARGET = _KL_HAS_TARGET._replace(
    holds=lambda config: config.algorithm.entropy.target is not None,
    keys=("entropy.target",),
    remedy="Use algorithm.entropy.target, the entropy that it should keep",
)
_TRAINS_CUT_ANSWERS = Condition(
    lambda config: config.algorithm.overlong.mode not in ("mask", "drop"),
    ("overlong.mode",),
    "answers that were cut off have no loss, so their returns are not used",
    "Use algorithm.overlong.mode=keep",
)
_IS_STALE = Condition(
    lambda config: config.dataflow.max_staleness > 0,
    ("dataflow.max_staleness",),
    "every token has staleness 0, so its factor is 1",
    "Use dataflow.max_staleness above 0",
)

CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "algorithm.advantage": (_ADVANTAGES,),
    "algorithm.advantage.std": (_ADVANTAGES, _WHITENS),
    "algorithm.advantage.epsilon": (_ADVANTAGES, _WHITENS, _HAS_DEVIATION),
    "algorithm.advantage.whiten": (_ADVANTAGES,),
    "algorithm.advantage.bootstrap": (_ADVANTAGES, _TRAINS_CUT_ANSWERS),
    "algorithm.reward_weights": (_ADVANTAGES,),
    "algorithm.loss": (_LOSS_IS_ITS_OWN,),
    "algorithm.loss.clip_low": (_RATIO_MOVES,),
    "algorithm.loss.clip_high": (_RATIO_MOVES,),
    "algorithm.loss.max_ratio": (_RATIO_MOVES,),
    "algorithm.loss.tau_positive": (_RATIO_MOVES,),
    "algorithm.loss.tau_negative": (_RATIO_MOVES,),
    "algorithm.proximal": (_PROXIMAL_IS_READ, _PROXIMAL_DIFFERS),
    "algorithm.correction.renormalize": (_MASKS,),
    "algorithm.kl.apply_to": (_KL_IS_COMPUTED,),
    "algorithm.kl.coefficient": (_KL_REWARDS,),
    "algorithm.kl.estimator": (_KL_IS_COMPUTED, _KL_REWARDS),
    "algorithm.kl.max_weight": (_KL_IS_COMPUTED, _WEIGHS_DIVERGENCE),
    "algorithm.kl.target": (_KL_IS_COMPUTED, _KL_REWARDS),
    "algorithm.kl.gain": (_KL_IS_COMPUTED, _KL_HAS_TARGET),
    "algorithm.entropy.step": (_ENTROPY_HAS_TARGET,),
    "algorithm.entropy.max_coefficient": (_ENTROPY_HAS_TARGET,),
    "algorithm.overlong.mode": (_REWARDS,),
    "algorithm.overlong.ramp_share": (_PENALTY, _REWARDS),
    "algorithm.staleness_decay": (_IS_STALE,),
    "critic.value_clip": (_CRITIC, _SEVERAL_UPDATES),
    "critic.warmup_steps": (_CRITIC,),
}
"""Setting -> conditions under which it is read."""


def check_without_effect(config: RunConfig) -> Iterator[Finding]:
    """Warn of each setting that differs from its default and is not read."""
    algorithm = config.algorithm
    refusals = [error(violation) for violation in algorithm_violations(algorithm)]
    for key, conditions in CONDITIONS.items():
        parent, _, name = key.rpartition(".")
        section = attrgetter(parent)(config)
        if name not in type(section).model_fields:
            continue
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        # For a variant only its choice is compared; its settings have their own entries.
        is_default = value.name == default.name if isinstance(value, Named | Custom) else value == default
        failed = next((condition for condition in conditions if not condition.holds(config)), None)
        if is_default or failed is None or any(refusal.touches([key]) for refusal in refusals):
            continue
        keys = [each if each.startswith("dataflow.") else f"algorithm.{each}" for each in failed.keys]
        combination = ", ".join(f"{each}={_shown(attrgetter(each)(config))}" for each in keys)
        yield warning(
            f"{key}={_shown(value)} has no effect with {combination}: {failed.why}. {failed.remedy}, or "
            f"leave {name} at {_shown(default)}."
        )


def _shown(value: Any) -> str:
    if isinstance(value, Named | Custom):
        return value.name
    return str(value) if isinstance(value, str | CorrectionConfig) else json.dumps(value)
