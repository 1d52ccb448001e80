"""Settings of `algorithm` that have no effect in their combination: each is named, with what would let it act.

One table: for each setting, the conditions under which something reads it. A setting that differs from its default
while a condition fails gets a warning that names the first one that does. Settings at their default say nothing. What
is refused as an error is not named twice. A loss or an advantage of the user's own gets the whole section, so beside it
any setting may have an effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.rules import LOSSES_OF_RATIO, algorithm_violations
from penstock.trainer.config import AlgorithmConfig


class Condition(NamedTuple):
    """What has to hold for a setting to act.

    Attributes:
        holds: Whether it does.
        keys: Keys that decide it; those of `algorithm` without that word.
        why: What is so where it does not hold.
        remedy: What to do to have it hold.
    """

    holds: Callable[[RunConfig], bool]
    keys: tuple[str, ...]
    why: str
    remedy: str


def _chosen(key: str, *choices: str) -> Condition:
    """One of these is the value of the key, or in its chain."""

    def holds(config: RunConfig) -> bool:
        value = getattr(config.algorithm, key)
        return not set(choices).isdisjoint(value if isinstance(value, tuple) else (value,))

    readers = f"only {choices[0]} reads it" if len(choices) == 1 else f"only {', '.join(choices)} read it"
    return Condition(holds, (key,), readers, f"Use algorithm.{key}={choices[0]}")


_WHITENED = ("gae", "reinforce_pp", "reinforce_pp_baseline")
_TRUNCATED = ("tis_token", "tis_seq", "f_tis")


def _ratio_moves(config: RunConfig) -> bool:
    return config.algorithm.updates_per_batch > 1 or config.algorithm.proximal == "behavior"


def _uses_rewards(config: RunConfig) -> bool:
    return find("loss", config.algorithm.loss).needs_advantages


def _loss_is_its_own(config: RunConfig) -> bool:
    """A loss of a ratio is not `−A c`; gspo never is where advantages differ within a sequence: it averages them."""
    algorithm = config.algorithm
    averages = algorithm.loss == "gspo" and (algorithm.needs_critic or algorithm.kl_in_reward > 0)
    return algorithm.loss not in LOSSES_OF_RATIO or _ratio_moves(config) or averages


def _reads_tis_cap(config: RunConfig) -> bool:
    """A truncated weight, or that of a divergence in a loss that carries the step from the behavior policy itself."""
    algorithm = config.algorithm
    is_inside = algorithm.proximal == "behavior" or not find("loss", algorithm.loss).takes_weight
    return not set(_TRUNCATED).isdisjoint(algorithm.correction) or (algorithm.kl_in_loss > 0 and is_inside)


_RATIO_MOVES = Condition(
    _ratio_moves,
    ("proximal", "mini_batches", "epochs"),
    "one optimizer update per batch is around the policy itself, so that the ratio is 1 and no bound acts",
    "Use algorithm.proximal=behavior with correction=none, or several updates with proximal=recompute",
)
_LOSS_IS_ITS_OWN = _RATIO_MOVES._replace(
    holds=_loss_is_its_own,
    why="one optimizer update per batch is around the policy itself, so that the ratio is 1 and the gradient is that "
    "of ppo_clip and of reinforce",
)
_PROXIMAL_IS_READ = Condition(
    lambda config: config.algorithm.loss in LOSSES_OF_RATIO or not set(config.algorithm.correction) <= {"none", "opsm"},
    ("loss", "correction"),
    "neither this loss nor this correction looks at the proximal policy",
    "Use algorithm.proximal=target",
)
_SEVERAL_UPDATES = Condition(
    lambda config: config.algorithm.updates_per_batch > 1,
    ("mini_batches", "epochs"),
    "at the one update of a batch the value is what it was when the batch began",
    "Use several updates",
)
_PROXIMAL_DIFFERS = _SEVERAL_UPDATES._replace(
    holds=lambda config: _ratio_moves(config) or config.algorithm.proximal == "target",
    why="with one optimizer update per batch it is proximal=target, and recompute costs a forward more",
)
_ADVANTAGES = Condition(
    lambda config: _uses_rewards(config) and not config.algorithm.compares_pairs,
    ("loss",),
    "this loss looks at no advantage",
    "Use a loss of advantages, such as ppo_clip",
)
_REWARDS = Condition(
    lambda config: config.algorithm.overlong != "penalty" or _uses_rewards(config),
    ("loss",),
    "this loss looks at no reward, which is what the penalty is taken from",
    "Use algorithm.overlong=mask or drop",
)
_KL_REWARDS = Condition(
    lambda config: config.algorithm.kl_in != "reward" or _uses_rewards(config),
    ("kl_in", "loss"),
    "this loss looks at no reward, which is what the divergence is taken from",
    "Use algorithm.kl_in=loss",
)
_DIVIDES = Condition(
    lambda config: (
        config.algorithm.advantage == "grpo"
        or (config.algorithm.advantage in _WHITENED and config.algorithm.whiten == "batch")
    ),
    ("advantage", "whiten"),
    "only grpo and the whitening of gae and reinforce_pp divide by a deviation",
    "Use algorithm.advantage=grpo",
)
_HAS_DEVIATION = Condition(
    lambda config: config.algorithm.advantage_std != "none",
    ("advantage_std",),
    "there is no division that it could keep finite",
    "Use algorithm.advantage_std=sample",
)
_MASKS = Condition(
    lambda config: not set(config.algorithm.correction) <= {"none", "tis_token", "tis_seq"},
    ("correction",),
    "it rejects no token, so that all of the batch is kept",
    "Use a correction with a mask, such as decoupled or mis_seq_geo",
)
_TIS_CAP = Condition(
    _reads_tis_cap,
    ("correction",),
    "only tis_token, tis_seq and f_tis read it, and a divergence in a loss without a weight",
    "Use algorithm.correction=tis_token",
)
_KL_IS_ON = Condition(
    lambda config: config.algorithm.kl_in != "off",
    ("kl_in",),
    "the divergence goes nowhere, and no reference is started for it",
    "Use algorithm.kl_in=loss",
)
_KL_IS_COMPUTED = Condition(
    lambda config: config.algorithm.kl_coefficient > 0,
    ("kl_coefficient",),
    "a divergence of weight 0 is not computed",
    "Use algorithm.kl_coefficient above 0",
)
_KL_COUNTS = _KL_IS_COMPUTED._replace(
    holds=lambda config: config.algorithm.kl_coefficient > 0 or config.algorithm.kl_in == "off"
)
_IS_STALE = Condition(
    lambda config: config.dataflow.max_staleness > 0,
    ("dataflow.max_staleness",),
    "every token is of the newest version, and its factor is 1",
    "Use dataflow.max_staleness above 0",
)

CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "advantage": (_ADVANTAGES,),
    "advantage_std": (_ADVANTAGES, _DIVIDES),
    "std_epsilon": (_ADVANTAGES, _DIVIDES, _HAS_DEVIATION),
    "reward_weights": (_ADVANTAGES,),
    "gae_gamma": (_chosen("advantage", "gae"),),
    "gae_lambda": (_chosen("advantage", "gae"),),
    "whiten": (_ADVANTAGES, _chosen("advantage", *_WHITENED)),
    "loss": (_LOSS_IS_ITS_OWN,),
    "clip_low": (_chosen("loss", "ppo_clip", "dual_clip", "gspo", "gspo_token"), _RATIO_MOVES),
    "clip_high": (_chosen("loss", "ppo_clip", "dual_clip", "gspo", "gspo_token", "cispo"), _RATIO_MOVES),
    "dual_clip": (_chosen("loss", "dual_clip"), _RATIO_MOVES),
    "cispo_low": (_chosen("loss", "cispo"), _RATIO_MOVES),
    "sapo_tau_positive": (_chosen("loss", "sapo"), _RATIO_MOVES),
    "sapo_tau_negative": (_chosen("loss", "sapo"), _RATIO_MOVES),
    "dppo_delta": (_chosen("loss", "dppo"),),
    "dppo_cap": (_chosen("loss", "dppo"),),
    "pairs": (_chosen("loss", "online_dpo", "ipo"),),
    "pair_margin": (_chosen("loss", "online_dpo", "ipo"),),
    "pair_beta": (_chosen("loss", "online_dpo", "ipo"),),
    "ipo_length": (_chosen("loss", "ipo"),),
    "value_clip": (_chosen("advantage", "gae"), _SEVERAL_UPDATES),
    "proximal": (_PROXIMAL_IS_READ, _PROXIMAL_DIFFERS),
    "correction_cap": (_chosen("correction", "decoupled"),),
    "tis_cap": (_TIS_CAP,),
    "mis_low": (_chosen("correction", "mis_token"),),
    "mis_high": (_chosen("correction", "mis_token"),),
    "geo_low": (_chosen("correction", "mis_seq_geo"),),
    "geo_high": (_chosen("correction", "mis_seq_geo"),),
    "opsm_delta": (_chosen("correction", "opsm"),),
    "f_tis_max_kl": (_chosen("correction", "f_tis"),),
    "veto_floor": (_chosen("correction", "veto"),),
    "renormalise": (_MASKS,),
    "kl_in": (_KL_COUNTS,),
    "kl_coefficient": (_KL_IS_ON, _KL_REWARDS),
    "kl_estimator": (_KL_IS_ON, _KL_IS_COMPUTED, _KL_REWARDS),
    "overlong": (_REWARDS,),
    "overlong_cache_share": (_chosen("overlong", "penalty"), _REWARDS),
    "lag_decay": (_IS_STALE,),
}
"""Setting -> what has to hold for it to act."""


def check_without_effect(config: RunConfig) -> Iterator[Finding]:
    """A warning for each setting that differs from its default and that nothing reads."""
    algorithm = config.algorithm
    if find("loss", algorithm.loss).is_own or find("advantage", algorithm.advantage).is_own:
        return
    refusals = [error(violation) for violation in algorithm_violations(algorithm)]
    for name, conditions in CONDITIONS.items():
        value = getattr(algorithm, name)
        default = AlgorithmConfig.model_fields[name].get_default(call_default_factory=True)
        failed = next((condition for condition in conditions if not condition.holds(config)), None)
        is_refused = any(refusal.touches([f"algorithm.{name}"]) for refusal in refusals)
        if value == default or failed is None or is_refused:
            continue
        keys = [key if "." in key else f"algorithm.{key}" for key in failed.keys]
        combination = ", ".join(f"{key}={_shown(attrgetter(key)(config))}" for key in keys)
        yield warning(
            f"algorithm.{name}={_shown(value)} has no effect with {combination}: {failed.why}. {failed.remedy}, or "
            f"leave {name} at {_shown(default)}."
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
