"""A critic with the demo's settings learns what a return depends on, on fresh batches, and its weights are saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.platform.checks.load import compose_config
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.batches.examples import Preference
from penstock.trainer.batches.mini_batches import mini_batches
from penstock.trainer.batches.samples import policy_sequences
from penstock.trainer.build import save_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step_stop import StepStop

from .torch_trainer import VOCAB, scored, trainer_of, trajectory

PPO = compose_config(["experiment=arithmetic", "algorithm=ppo"])


def fresh_batch(rng: np.random.Generator) -> list[GroupPayload]:
    """16 groups of 4 random answers to a prompt of high or of low tokens; high ones earn 1, whatever the answer."""
    groups = []
    for group in range(16):
        is_high = bool(rng.random() < 0.5)
        low, high = (VOCAB // 2, VOCAB) if is_high else (2, VOCAB // 2)
        prompt = rng.integers(low, high, 4).tolist()
        answers = [rng.integers(2, VOCAB, int(rng.integers(4, 10))).tolist() for _ in range(4)]
        members = (trajectory(f"{group}/{i}", prompt, one, rng, float(is_high)) for i, one in enumerate(answers))
        groups.append(GroupPayload(GroupId(group), tuple(members)))
    return groups


def trained_on(trainer: PolicyTrainer, num_batches: int, rng: np.random.Generator) -> list[float]:
    """Explained variance of each batch, by the critic before it has seen it."""
    critic, algorithm, found = trainer.critic, Algorithm(PPO.algorithm), []
    assert critic is not None
    for version in range(num_batches):
        batch = fresh_batch(rng)
        sequences = policy_sequences(scored(batch, values=critic.values(batch)), algorithm, 64)
        for part in mini_batches(sequences, len(batch), algorithm, 64, version):
            critic.update(part, StepStop(), is_last=True)
        found.append(critic.take_metrics(sequences)["critic/explained_variance"])
    return found


@pytest.mark.full
def test_a_return_that_the_prompt_decides_is_foreseen_and_the_critic_goes_on_from_where_it_was_saved(
    policy: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    settings = {"critic": PPO.critic, "preset": PPO.algorithm}
    trainer = trainer_of(policy, 1000, **settings)
    explained = trained_on(trainer, 30, rng)
    assert explained[0] == 0.0, "a head of zeros"
    assert np.mean(explained[-5:]) > 0.9
    save_policy(trainer, str(tmp_path / "policy"), policy)
    saved = PPO.critic.model_copy(update={"path": str(tmp_path / "critic")})
    resumed = trainer_of(str(tmp_path / "policy"), 1000, **(settings | {"critic": saved}))
    assert trained_on(resumed, 1, rng)[0] > 0.9
    batch = fresh_batch(rng)
    for mine, theirs in zip(trainer.critic.values(batch), resumed.critic.values(batch), strict=True):
        assert mine.std() > 0
        assert np.abs(mine - theirs).max() < 0.3, "one batch further"


def test_a_critic_begins_with_the_scores_of_a_reward_model(policy: str, tmp_path: Path) -> None:
    judge = trainer_of(policy, 400, lr=3e-3, kind="reward", loss="online_dpo", correction="none")
    judge.preference_step([Preference((5, 6), (7, 3), (7, 4))])
    save_policy(judge, str(tmp_path / "reward_model"), policy)
    critic = PPO.critic.model_copy(update={"path": str(tmp_path / "reward_model")})
    values = trainer_of(policy, 400, critic=critic, preset=PPO.algorithm).critic.values(
        fresh_batch(np.random.default_rng(0))
    )
    assert all(np.abs(one).max() > 0 for one in values)


def test_without_a_critic_none_is_saved(policy: str, tmp_path: Path) -> None:
    save_policy(trainer_of(policy), str(tmp_path / "policy"), policy)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
