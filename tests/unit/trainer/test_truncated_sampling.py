"""A whole step on tokens of a truncated sampler, against an unpacked forward that is renormalised in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.dataflow.trajectory import Alternatives, GroupPayload, Trajectory

from .torch_trainer import TEMPERATURE, VOCAB, scored, trainer_of

MOST = 4


@pytest.fixture
def truncated_batch(batch: list[GroupPayload]) -> list[GroupPayload]:
    """The batch, with up to `MOST` alternatives of every sampled token."""
    rng = np.random.default_rng(5)
    groups = []
    for group in batch:
        members = []
        for one in group.trajectories:
            sampled = one.token_ids[one.loss_mask].tolist()
            rows = [
                rng.permutation([other for other in range(VOCAB) if other != token])[: rng.integers(0, MOST + 1)]
                for token in sampled
            ]
            members.append(dataclasses.replace(one, alternatives=Alternatives.of([row.tolist() for row in rows])))
        groups.append(dataclasses.replace(group, trajectories=tuple(members)))
    return groups


def renormalised(model: torch.nn.Module, one: Trajectory) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logprobs and entropies over the support of each sampled token."""
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double().numpy() / TEMPERATURE
    assert one.alternatives is not None
    logprobs, entropies = [], []
    for position, others in zip(np.flatnonzero(one.loss_mask), one.alternatives.rows(), strict=True):
        kept = logits[position - 1, [one.token_ids[position], *others]]
        chances = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
        logprobs.append(np.log(chances[0]))
        entropies.append(-(chances * np.log(chances)).sum())
    return np.array(logprobs), np.array(entropies)


@pytest.mark.parametrize("max_tokens", [32, 1000])
def test_ratios_and_entropies_are_over_the_recorded_support(policy, truncated_batch, max_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    members = [one for group in truncated_batch for one in group.trajectories]
    results = [renormalised(model, one) for one in members]
    differences = np.concatenate(
        [logprobs - one.behavior_logprobs[one.loss_mask] for one, (logprobs, _) in zip(members, results, strict=True)]
    )
    metrics = trainer_of(policy, max_tokens).step(truncated_batch, 0).metrics
    assert metrics["mismatch/abs_logprob_mean"] == pytest.approx(np.abs(differences).mean(), rel=1e-4)
    assert metrics["ratio/behavior_max"] == pytest.approx(np.exp(differences.max()), rel=1e-4)
    entropies = np.concatenate([entropies for _, entropies in results])
    assert metrics["loss/entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    assert entropies.max() <= np.log(1 + MOST)


def test_what_the_sampler_recorded_is_what_the_trainer_computes_before_the_first_step(policy, truncated_batch) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    on_policy = []
    for group in truncated_batch:
        members = []
        for one in group.trajectories:
            behavior = one.behavior_logprobs.copy()
            behavior[one.loss_mask] = renormalised(model, one)[0]
            members.append(dataclasses.replace(one, behavior_logprobs=behavior))
        on_policy.append(dataclasses.replace(group, trajectories=tuple(members)))
    trainer = trainer_of(policy, mini_batches=2, proximal="recompute")
    metrics = trainer.step(on_policy, 0).metrics
    assert metrics["mismatch/abs_logprob_mean"] < 1e-6
    assert metrics["ratio/behavior_max"] == pytest.approx(1.0, abs=1e-5)
    forgotten = [
        dataclasses.replace(
            group, trajectories=tuple(dataclasses.replace(one, alternatives=None) for one in group.trajectories)
        )
        for group in on_policy
    ]
    metrics = trainer_of(policy, mini_batches=2, proximal="recompute").step(forgotten, 0).metrics
    assert metrics["mismatch/abs_logprob_mean"] > 1, "the oracle must tell supports apart"


def test_a_reference_of_equal_weights_has_no_divergence(policy, truncated_batch) -> None:
    reference = trainer_of(policy)._passes.per_sampled_token(truncated_batch)
    trainer = trainer_of(policy, kl_coefficient=0.1)
    metrics = trainer.step(scored(truncated_batch, references=reference), 0).metrics
    assert metrics["loss/reference_kl"] == pytest.approx(0.0, abs=1e-9)


def test_tokens_without_alternatives_move_nothing(policy, batch) -> None:
    certain = [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(one, alternatives=Alternatives.of([()] * one.num_sampled_tokens))
                for one in group.trajectories
            ),
        )
        for group in batch
    ]
    metrics = trainer_of(policy).step(certain, 0).metrics
    assert metrics["loss/grad_norm"] == metrics["loss/entropy"] == 0.0
