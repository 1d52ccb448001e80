"""A setting that nothing reads is named, and what is trained with it is to the last bit what is trained without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from penstock.dataflow.trajectory import GroupPayload
from penstock.platform.checks.algorithm import check_without_effect
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config
from penstock.platform.config.compose import compose_all
from penstock.platform.config.field_errors import sections_of
from penstock.platform.config.schema import RunConfig
from penstock.trainer.algorithms.conditions import Condition
from penstock.trainer.config import AlgorithmConfig, CriticConfig
from tests.algorithms import algorithm_config
from tests.unit.trainer.torch_trainer import scored, trainer_of

OWN = "tests.unit.trainer.algorithms.own"
EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[4] / "conf" / "experiment").glob("*.yaml"))
BEHAVIOR = {"proximal": "behavior", "correction": "none"}
PAIRS = {"loss": "ipo", "correction": "none"}
CRITIC = {"advantage": "gae"}
TEACHER = {"loss": "distill"}
SFT = {"loss": "sft", "correction": "none"}


class Case(NamedTuple):
    """`key=value` has no effect in combination with `rest`; the warning contains `because`."""

    key: str
    value: Any
    rest: dict[str, Any]
    because: str

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.rest, self.key: self.value}


ONE_UPDATE = "the ratio to the proximal policy is 1"
CASES = [
    Case("advantage", "rloo", SFT, "uses no advantage"),
    Case("advantage_std", "none", {"advantage": "gae", "whiten": "none"}, "whiten=none: only the whitening"),
    Case("advantage_std", "none", TEACHER, "uses no advantage"),
    Case("std_epsilon", 0.5, {"advantage_std": "none"}, "no division that it keeps finite"),
    Case("reward_weights", {"right": 2.0}, TEACHER, "uses no advantage"),
    Case("whiten", "none", {"advantage": "gae", "loss": "sft", "correction": "none"}, "uses no advantage"),
    Case("loss", "dual_clip", {}, ONE_UPDATE),
    Case("loss", "sapo", {"sapo_tau_negative": 1.0}, ONE_UPDATE),
    Case("loss", "cispo", {"proximal": "interpolate"}, "algorithm.proximal=interpolate"),
    Case("loss", "gspo_token", {"aggregation": "seq_mean_token_mean"}, ONE_UPDATE),
    Case("clip_low", 0.01, {}, ONE_UPDATE),
    Case("clip_high", 0.01, {}, ONE_UPDATE),
    Case("dual_clip", 1.01, {"loss": "dual_clip"}, ONE_UPDATE),
    Case("cispo_low", 0.01, {"loss": "cispo"}, ONE_UPDATE),
    Case("sapo_tau_positive", 2.0, {"loss": "sapo"}, ONE_UPDATE),
    Case("sapo_tau_negative", 2.1, {"loss": "sapo"}, ONE_UPDATE),
    Case("value_clip", 0.001, {"advantage": "gae"}, "with one update per batch"),
    Case("proximal", "interpolate", {}, "it equals proximal=target"),
    Case("proximal", "recompute", {"loss": "reinforce", "correction": "opsm", "epochs": 2}, "uses the proximal policy"),
    Case("proximal", "behavior", {"loss": "dppo", "correction": "none"}, "with algorithm.loss=dppo"),
    Case("kl_max_weight", 1.0, {"kl_coefficient": 0.1}, "the correction weighs the divergence"),
    Case("renormalize", "kept", {"correction": "tis_token"}, "rejects no token"),
    Case("kl_in", "reward", {}, "weight 0 is not computed"),
    Case("kl_coefficient", 0.5, {"kl_in": "reward", "kl_estimator": "k1"} | TEACHER, "uses no reward"),
    Case("kl_estimator", "k3", {}, "weight 0 is not computed"),
    Case("kl_target", 0.5, {}, "weight 0 is not computed"),
    Case("kl_gain", 0.5, {"kl_coefficient": 0.1}, "the coefficient is fixed"),
    Case("entropy_step", 0.5, {"entropy_coefficient": 0.1}, "the coefficient is fixed"),
    Case("entropy_max_coefficient", 0.5, {"entropy_coefficient": 0.1}, "the coefficient is fixed"),
    Case("bootstrap", True, {"advantage": "gae", "overlong": "mask"}, "answers that were cut off have no loss"),
    Case("critic_warmup", 9, {}, "there is no critic"),
    Case("overlong", "penalty", SFT, "uses no reward"),
    Case("overlong_ramp_share", 0.9, {"overlong": "mask"}, "only the penalty has a ramp"),
    Case("overlong_ramp_share", 0.9, {"overlong": "penalty"} | TEACHER, "uses no reward"),
    Case("staleness_decay", 0.1, {}, "with dataflow.max_staleness=0"),
]  # fmt: skip


ACTING: dict[str, tuple[Any, dict[str, Any]]] = {
    "advantage": ("rloo", {}),
    "advantage_std": ("population", {}),
    "std_epsilon": (0.5, {"advantage": "reinforce_pp"}),
    "reward_weights": ({"right": 1.0, "short": 0.5}, {}),
    "whiten": ("none", CRITIC),
    "loss": ("sapo", BEHAVIOR),
    "clip_low": (0.01, BEHAVIOR),
    "clip_high": (0.01, {"loss": "cispo"} | BEHAVIOR),
    "dual_clip": (1.01, {"loss": "dual_clip", "clip_high": 9.0} | BEHAVIOR),
    "sapo_tau_positive": (2.0, {"loss": "sapo"} | BEHAVIOR),
    "sapo_tau_negative": (2.0, {"loss": "sapo"} | BEHAVIOR),
    "value_clip": (0.0001, CRITIC | {"epochs": 2, "proximal": "recompute"}),
    "proximal": ("behavior", {"correction": "none"}),
    "kl_max_weight": (1.0, {"kl_coefficient": 0.1} | BEHAVIOR),
    "renormalize": ("weights", {"correction": "tis_token"}),
    "kl_coefficient": (0.5, {}),
    "kl_estimator": ("k3", {"kl_coefficient": 0.5}),
    "kl_target": (0.5, {"kl_coefficient": 0.1}),
    "kl_gain": (1.0, {"kl_coefficient": 0.1, "kl_target": 0.5}),
    "entropy_step": (0.002, {"entropy_target": 9.0}),
    "entropy_max_coefficient": (0.00005, {"entropy_target": 9.0}),
    "bootstrap": (True, CRITIC),
    "critic_warmup": (9, CRITIC),
    "overlong": ("penalty", {"overlong_ramp_share": 0.9}),
    "overlong_ramp_share": (0.9, {"overlong": "penalty"}),
    "staleness_decay": (0.1, {}),
}  # fmt: skip
"""Setting -> a value that has an effect, and the settings that it needs for this."""


PATHS = {
    "advantage_std": "algorithm.advantage.std",
    "std_epsilon": "algorithm.advantage.epsilon",
    "whiten": "algorithm.advantage.whiten",
    "clip_low": "algorithm.loss.clip_low",
    "clip_high": "algorithm.loss.clip_high",
    "cispo_low": "algorithm.loss.clip_low",
    "dual_clip": "algorithm.loss.max_ratio",
    "sapo_tau_positive": "algorithm.loss.tau_positive",
    "sapo_tau_negative": "algorithm.loss.tau_negative",
    "value_clip": "critic.value_clip",
    "critic_warmup": "critic.warmup_steps",
    "bootstrap": "algorithm.advantage.bootstrap",
    "kl_target": "algorithm.kl.target",
    "kl_gain": "algorithm.kl.gain",
    "entropy_step": "algorithm.entropy.step",
    "entropy_max_coefficient": "algorithm.entropy.max_coefficient",
    "renormalize": "algorithm.correction.renormalize",
    "kl_in": "algorithm.kl.apply_to",
    "kl_coefficient": "algorithm.kl.coefficient",
    "kl_estimator": "algorithm.kl.estimator",
    "kl_max_weight": "algorithm.kl.max_weight",
    "overlong": "algorithm.overlong.mode",
    "overlong_ramp_share": "algorithm.overlong.ramp_share",
}
"""Flat setting (tests/algorithms.py) -> its key; other settings have their own name in `algorithm`."""


def path_of(key: str) -> str:
    return PATHS.get(key, f"algorithm.{key}")


CONFIG = compose_config(["experiment=arithmetic"])
SYNCHRONOUS = compose_config(["experiment=arithmetic", "dataflow=synchronous"])


def without_effect(settings: dict[str, Any], config: RunConfig = CONFIG) -> dict[str, str]:
    """Key -> the warning that it has no effect, of the demo with these settings."""
    of_critic = {"value_clip": settings.get("value_clip", 0.2), "warmup_steps": settings.get("critic_warmup", 0)}
    critic = config.critic.model_copy(update=of_critic)
    update = {"algorithm": algorithm_config(**settings), "critic": critic}
    return {one.keys[0]: one.message for one in check_without_effect(config.model_copy(update=update))}


class Trained:
    """All weights of policy and critic after two steps; those of equal settings are trained once."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.known: dict[str, torch.Tensor] = {}

    def __call__(self, batch: list[GroupPayload], version: int, scores: list[np.ndarray], settings: dict):
        key = json.dumps([version, settings])
        if key not in self.known:
            trainer = trainer_of(self.policy, 60, **settings)
            for _ in range(2):
                trainer.step(scored(batch, scores, scores), version)
            backends = [trainer.backend, *([trainer.critic.backend] if trainer.critic else [])]
            weights = [tensor.flatten() for backend in backends for _, tensor in backend.export_weights()]
            self.known[key] = torch.cat(weights)
        return self.known[key]


@pytest.fixture(scope="module")
def trained(policy: str) -> Trained:
    return Trained(policy)


@pytest.mark.some(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key}={case.value}-{case.rest}")
def test_it_is_named_and_changes_no_bit_of_what_is_trained(case: Case, trained, batch, aged, references) -> None:
    is_synchronous = case.key == "staleness_decay"  # then all tokens are of the newest version
    message = without_effect(case.settings, SYNCHRONOUS if is_synchronous else CONFIG)[path_of(case.key)]
    shown = case.value if isinstance(case.value, str) else json.dumps(case.value)
    assert message.startswith(f"{path_of(case.key)}={shown} has no effect with ")
    assert case.because in message
    assert f", or leave {path_of(case.key).rpartition('.')[2]} at " in message
    data, version = (batch, 0) if is_synchronous else (aged, 5)
    mine, theirs = (trained(data, version, references, settings) for settings in (case.settings, case.rest))
    assert torch.equal(mine, theirs)


@pytest.mark.some(8)
@pytest.mark.parametrize("key", ACTING)
def test_a_setting_without_a_warning_has_an_effect(key: str, trained, aged, references) -> None:
    value, rest = ACTING[key]
    settings = {**rest, key: value}
    assert path_of(key) not in without_effect(settings)
    mine, theirs = (trained(aged, 5, references, one) for one in (settings, rest))
    assert not torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "rest"),
    [({"loss": "gspo", "correction": "tis_seq"}, {"correction": "tis_seq"}), ({"loss": "sapo"}, {})],
    ids=["gspo", "sapo"],
)
def test_a_loss_without_effect_has_the_gradient_of_reinforce_up_to_rounding(settings, rest, trained, aged) -> None:
    """Where it is composed of other operations: a mean over the sequence, a gate of slope 4/τ · τ/4."""
    shared = {"aggregation": "seq_mean_token_mean"}
    assert set(without_effect(settings | shared)) == {"algorithm.loss"}
    shared |= {"adam_epsilon": 1.0, "lr": 1.0}  # then updates are proportional to the gradient
    start = trained(aged, 5, [], {"lr": 1e-30})
    mine = trained(aged, 5, [], settings | shared) - start
    theirs = trained(aged, 5, [], {"loss": "reinforce"} | rest | shared) - start
    assert float((mine - theirs).norm()) < 1e-5 * float(theirs.norm())


def conditional(section: type[BaseModel], path: str) -> Iterator[str]:
    """Keys with conditions, of all variants."""
    for name, field in section.model_fields.items():
        if any(isinstance(one, Condition) for one in field.metadata):
            yield f"{path}.{name}"
        for inner in sections_of(field.annotation):
            yield from conditional(inner, f"{path}.{name}")


CONDITIONS = {*conditional(AlgorithmConfig, "algorithm"), *conditional(CriticConfig, "critic")}
CONDITIONS |= {"algorithm.staleness_decay"}  # whose condition is a setting of another section


def test_every_row_is_tried_where_it_holds_and_where_it_does_not() -> None:
    assert {path_of(case.key) for case in CASES} == CONDITIONS
    # Where the divergence goes cannot be changed alone: loss and reward have estimators of their own.
    assert {path_of(key) for key in ACTING} == CONDITIONS - {"algorithm.kl.apply_to"}


@pytest.mark.some(8)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_experiment_has_a_setting_without_effect(experiment: str) -> None:
    config = compose_all([f"experiment={experiment}"]).config
    assert config is not None
    assert [one.message for one in check_without_effect(config)] == []


def test_a_preset_whose_loss_has_no_effect_is_a_warning_with_key_value_and_advice() -> None:
    typed = ["experiment=arithmetic", "algorithm=sapo", "algorithm.proximal=target", "dataflow=synchronous"]
    (finding,) = check_config(compose_config(typed), "train")
    assert finding.severity == "warning"
    assert finding.message == (
        "algorithm.loss=sapo has no effect with algorithm.proximal=target, algorithm.mini_batches=1, "
        "algorithm.epochs=1: with one optimizer update per batch the ratio to the proximal policy is 1, so the "
        "gradient equals that of ppo_clip and of reinforce. Use algorithm.proximal=behavior with "
        "algorithm/correction=none, or several updates with proximal=recompute, or leave loss at ppo_clip."
    )


OWN_LOSS, OWN_ADVANTAGE = {"loss": f"{OWN}:squared"}, {"advantage": f"{OWN}:half_of_the_reward"}


def test_what_a_users_own_loss_or_advantage_replaces_is_not_named_and_all_else_is() -> None:
    settings = {"clip_high": 0.5, "std_epsilon": 0.1, "advantage_std": "none", "kl_target": 0.5}
    of_loss, of_advantage, of_both = "algorithm.loss.clip_high", "algorithm.advantage.epsilon", "algorithm.kl.target"
    assert set(without_effect(settings)) == {of_loss, of_advantage, of_both}
    assert set(without_effect(settings | OWN_LOSS)) == {of_advantage, of_both}
    assert set(without_effect(settings | OWN_ADVANTAGE)) == {of_loss, of_both}
    assert set(without_effect(settings | OWN_LOSS | OWN_ADVANTAGE)) == {of_both}


INDEPENDENT = [
    case
    for case in CASES
    if case.because in ("weight 0 is not computed", "the coefficient is fixed", "only the penalty has a ramp",
                        "rejects no token", "there is no critic", "it equals proximal=target",
                        "the correction weighs the divergence", "with dataflow.max_staleness=0")
]  # fmt: skip


@pytest.mark.parametrize("own", [OWN_LOSS, OWN_ADVANTAGE, OWN_LOSS | OWN_ADVANTAGE], ids=["loss", "advantage", "both"])
@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: f"{case.key}={case.value}-{case.rest}")
def test_a_setting_that_a_custom_part_does_not_read_is_named_beside_it(case: Case, own: dict[str, Any]) -> None:
    config = SYNCHRONOUS if case.key == "staleness_decay" else CONFIG
    assert case.because in without_effect(case.settings | own, config)[path_of(case.key)]


def test_a_custom_loss_may_read_the_proximal_policy_and_an_advantage_of_an_own_function_may_be_unread() -> None:
    recompute = {"proximal": "recompute", "correction": "none", "epochs": 2}
    assert set(without_effect(recompute | {"loss": "reinforce"})) == {"algorithm.proximal"}
    assert without_effect(recompute | OWN_LOSS) == {}
    (message,) = without_effect(SFT | OWN_ADVANTAGE).values()
    assert message.startswith(f"algorithm.advantage={OWN}:half_of_the_reward has no effect with algorithm.loss=sft: ")


def test_what_is_refused_is_not_named_again() -> None:
    settings = {"loss": "distill", "advantage": "rloo", "advantage_std": "none"}
    assert set(without_effect(settings)) == set(), "advantage=rloo is an error"
