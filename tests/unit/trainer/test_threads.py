"""Trajectories of several threads train as their threads would alone; a reward counts once in its baseline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import TrainingError
from penstock.dataflow.filters import zero_variance
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import Reason
from penstock.dataflow.trajectory import Episode, GroupPayload, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span, concatenate_spans
from penstock.trainer.batches.samples import batch_samples, policy_sequences, reward_batch
from penstock.trainer.models.frozen_policy import FrozenPolicy
from tests.algorithms import resolved

from .test_policy_trainer import gradient_of
from .torch_trainer import MODEL, TEMPERATURE, VOCAB, logprobs_of, scored, trainer_of, trajectory

LENGTHS = {"plan": [4, 5], "left": [9, 3], "right": [9, 7]}
"""Prompt (of the forks: all of plan) and response of each thread."""


def thread_trajectories(name: str, rng, reward: float, version: int = 0) -> list[Trajectory]:
    """Three threads as ordinary trajectories; the last two begin with all of the first."""
    plan = trajectory(name, rng.integers(2, VOCAB, 4).tolist(), rng.integers(2, VOCAB, 5).tolist(), rng, reward)
    forks = [
        trajectory(name, plan.token_ids.tolist(), rng.integers(2, VOCAB, LENGTHS[side][1]).tolist(), rng, reward)
        for side in ("left", "right")
    ]
    ages = [version + 1, version + 2, version]  # the oldest is the last: order says nothing
    return [
        replace(one, spans=(Span(age, one.num_sampled_tokens),)) for one, age in zip([plan, *forks], ages, strict=True)
    ]


def joined(threads: list[Trajectory], rewards: dict[str, float] | None = None) -> Trajectory:
    names = list(LENGTHS)[: len(threads)]
    return replace(
        threads[0],
        token_ids=np.concatenate([one.token_ids for one in threads]),
        loss_mask=np.concatenate([one.loss_mask for one in threads]),
        behavior_logprobs=np.concatenate([one.behavior_logprobs for one in threads]),
        spans=concatenate_spans([one.spans for one in threads]),
        threads=tuple(
            Thread(name, len(one.token_ids), "", None if name == "plan" else "plan")
            for name, one in zip(names, threads, strict=True)
        ),
        reward_parts={f"thread/{name}": value for name, value in (rewards or {}).items()},
    )


@pytest.fixture
def threads() -> list[list[Trajectory]]:
    """Three members; the second has one thread only."""
    rng = np.random.default_rng(5)
    members = [thread_trajectories(f"0/{index}", rng, reward) for index, reward in enumerate([1.0, 0.0, 0.25])]
    return [members[0], members[1][:1], members[2]]


def group(*members: Trajectory) -> GroupPayload:
    return GroupPayload(GroupId(0), members)


def test_the_gradient_is_that_of_the_threads_as_sequences_of_their_own(policy, threads) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    advantages = np.array([1.0, 0.0, 0.25]) - 1.25 / 3  # each reward counts once, whatever its number of threads
    total = sum(one.num_sampled_tokens for member in threads for one in member)
    loss = torch.zeros(())
    for advantage, member in zip(advantages, threads, strict=True):
        for one in member:
            ids = torch.tensor(one.token_ids.astype(np.int64))
            logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE, -1)
            positions = torch.tensor(np.flatnonzero(one.loss_mask))
            loss = loss - float(advantage) / total * logprobs[positions - 1, ids[positions]].sum()
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    trainer = trainer_of(policy, advantage="dr_grpo", aggregation="token_mean", correction="none")
    found = gradient_of(trainer, [group(*(joined(member) for member in threads))])
    assert float((found - expected).norm() / expected.norm()) < 1e-5


SETTINGS = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "seq_mean_token_mean"},
    "constant_length": {"aggregation": "constant_length"},
    "a_loss_of_sequences": {"loss": "gspo", "aggregation": "seq_mean_token_mean", "correction": ["tis_seq"]},
    "whitened": {"advantage": "reinforce_pp"},
}


@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS.keys())
def test_threads_of_one_name_with_own_rewards_are_a_group_of_their_own(policy, threads, config) -> None:
    rewards = [{"plan": 1.0, "left": 0.0, "right": 2.0}, {"plan": 0.5}, {"plan": 0.0, "left": 1.0, "right": 0.0}]
    whole = group(*(joined(member, own) for member, own in zip(threads, rewards, strict=True)))
    apart = [
        group(
            *(
                replace(one, reward=own[name])
                for member, own in zip(threads, rewards, strict=True)
                for side, one in zip(LENGTHS, member, strict=False)
                if side == name
            )
        )
        for name in LENGTHS
    ]
    found = gradient_of(trainer_of(policy, **config), [whole])
    expected = gradient_of(trainer_of(policy, **config), apart)
    assert expected.norm() > 0
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_sampled_tokens_keep_their_order_versions_and_scores(policy, threads) -> None:
    from transformers import AutoModelForCausalLM

    whole = joined(threads[0])
    parts = whole.split_threads()
    assert [one.token_ids.tolist() for one in parts] == [one.token_ids.tolist() for one in threads[0]]
    assert [one.spans for one in parts] == [one.spans for one in threads[0]]
    assert (whole.oldest_version, whole.newest_version) == (0, 2)
    assert sum(one.num_sampled_tokens for one in parts) == whole.num_sampled_tokens
    found = FrozenPolicy.load(policy, MODEL, "cpu", 60, TEMPERATURE).logprobs(group(whole))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    expected = np.concatenate([logprobs_of(model, one) for one in threads[0]])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    payloads, count = [group(whole, joined(threads[1]))], whole.num_sampled_tokens + threads[1][0].num_sampled_tokens
    references = [np.arange(count, dtype=np.float32)]
    every = policy_sequences(scored(payloads, references), resolved(), 30)
    assert np.concatenate([one.reference_logprobs for one in every]).tolist() == list(range(count))
    sequences = policy_sequences(scored(payloads, references, min_versions=[1]), resolved(), 30, 3)
    staleness = [sorted(set(one.staleness.tolist())) for one in sequences]
    assert staleness == [[2], [1], [], [2]], "what is older than version 1 carries no loss, wherever it stands"


def test_the_baseline_counts_a_reward_once(threads) -> None:
    payload = group(*(joined(member) for member in threads))
    for estimator in ("dr_grpo", "rloo", "grpo"):
        config = resolved(advantage=estimator)
        found = [one.advantages[0] for one in policy_sequences([payload], config, 30)]
        alone = [one.advantages[0] for one in policy_sequences([group(*(member[0] for member in threads))], config, 30)]
        assert found == pytest.approx([alone[0]] * 3 + [alone[1]] + [alone[2]] * 3)


def test_the_overlong_penalty_is_of_the_longest_thread(threads) -> None:
    longest = max(one.num_sampled_tokens for one in threads[0])
    config = resolved(advantage="dr_grpo", overlong="penalty", overlong_ramp_share=4 / (longest + 4))
    assert longest < sum(one.num_sampled_tokens for one in threads[0])
    payload = group(joined(threads[0]), joined(threads[1]))
    mild = [one.advantages[0] for one in policy_sequences([payload], config, longest + 4)]
    assert mild == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_the_overlong_penalty_is_of_the_longest_turn_which_the_limit_is_of(threads) -> None:
    config = resolved(advantage="dr_grpo", overlong="penalty")
    four = replace(threads[0][0], episode=Episode((Turn("", "stop", 3),) * 4, "done"))
    assert reward_batch(batch_samples([group(four, four)], config), config, 10).rewards.tolist() == [1.0, 1.0]
    turns = [Turn("", "stop", num, thread=name) for name in LENGTHS for num in (1, 2, 1)]
    for rewards, longest in (({}, [3, 3, 3]), (dict.fromkeys(LENGTHS, 1.0), [2, 2, 3])):
        member = replace(
            joined(threads[0], rewards), episode=Episode((*turns, Turn("", "stop", 3, thread="right")), "done")
        )
        assert [one.num_overlong for one in batch_samples([group(member)], config)] == longest


def test_what_makes_no_sense_with_threads_is_refused(policy, threads) -> None:
    payload = group(*(joined(member, {"plan": 1.0}) for member in threads))
    with pytest.raises(TrainingError, match=r"group 0 has rewards by thread .* Use reward_weights"):
        policy_sequences([payload], resolved(reward_weights={"a": 1.0}), 30)
    pairs = resolved(loss="online_dpo")
    with pytest.raises(TrainingError, match=r"0/0 of task t has threads \('plan', ...\), so it is no single answer"):
        policy_sequences([payload], pairs, 30)


def test_a_group_has_signal_if_threads_of_one_name_differ(threads) -> None:
    members = [replace(joined(member), reward=0.0) for member in threads]
    assert zero_variance()(members) is Reason.ZERO_VARIANCE
    equal = [replace(one, reward_parts={"thread/plan": 1.0}) for one in members]
    assert zero_variance()(equal) is Reason.ZERO_VARIANCE
    assert zero_variance()([replace(equal[0], reward_parts={"thread/plan": 0.0}), *equal[1:]]) is None
