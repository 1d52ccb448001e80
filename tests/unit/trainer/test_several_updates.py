"""A batch of several optimizer steps, against a loop over single unpacked sequences in plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import TrainingError
from penstock.dataflow.trajectory import GroupPayload
from penstock.dataflow.versions import Span
from tests.unit.trainer.torch_trainer import TEMPERATURE, trainer_of

# ε of AdamW far above the gradient: updates are proportional to it, so that weights compare gradients.
PLAIN = {"lr": 1.0, "adam_epsilon": 1.0, "correction": "none", "mini_batches": 3, "epochs": 2}
VERSION = 6


@pytest.fixture
def aged(batch: list[GroupPayload]) -> list[GroupPayload]:
    """The first half of every answer is from version 3, the rest from version 6; no group is silent."""

    def age(place: int, one):
        old = one.num_sampled_tokens // 2
        spans = tuple(span for span in (Span(3, old), Span(6, one.num_sampled_tokens - old)) if span.num_tokens)
        return replace(one, spans=spans, reward=float(place == 1))

    return [GroupPayload(group.group_id, tuple(map(age, range(3), group.trajectories))) for group in batch]


def logprobs(model, one) -> torch.Tensor:
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    positions = np.flatnonzero(one.loss_mask)
    scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / TEMPERATURE, -1)
    return scores[positions - 1, one.token_ids[positions]]


def oracle(policy: str, batch: list[GroupPayload], proximal: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms after 2 epochs of one group per update, PPO's clipped loss, token mean."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    with torch.no_grad():
        start = {one.trajectory_id: logprobs(model, one) for group in batch for one in group.trajectories}
    norms = []
    for epoch in range(2):
        for place in np.random.default_rng([VERSION, epoch]).permutation(3):
            members = batch[place].trajectories
            rewards = np.array([one.reward for one in members])
            total = sum(int(one.loss_mask.sum()) for one in members)
            for one, reward in zip(members, rewards, strict=True):
                advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                c, b = logprobs(model, one), torch.tensor(one.behavior_logprobs[one.loss_mask])
                proximal_logprobs = {"recompute": start[one.trajectory_id], "behavior": b}.get(proximal)
                if proximal_logprobs is None:
                    old = len(c) // 2
                    alpha = torch.tensor([3 / 4] * old + [0.0] * (len(c) - old))
                    proximal_logprobs = c.detach() if not norms else b + alpha * (c.detach() - b)
                ratio = (c - proximal_logprobs).exp()
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum() / total
                loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.mark.parametrize("proximal", ["recompute", "interpolate", "behavior"])
@pytest.mark.parametrize("max_tokens", [40, 1000])
def test_mini_batches_and_epochs_equal_a_plain_loop(policy, aged, proximal, max_tokens) -> None:
    trainer = trainer_of(policy, max_tokens, proximal=proximal, **PLAIN)
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    report = trainer.step(aged, VERSION)
    expected, norms = oracle(policy, aged, proximal)
    moved = sum(float((expected[name] - old).square().sum()) for name, old in before.items())
    error = sum(float((tensor - expected[name]).square().sum()) for name, tensor in trainer.export_weights())
    assert error**0.5 < 1e-4 * moved**0.5
    assert report.metrics["loss/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert (report.version, report.metrics["trainer/updates"], report.metrics["trainer/skipped_updates"]) == (7, 6, 0)
    assert report.metrics["ratio/policy_clip_share"] > 0, "the ratio moves away from 1"


def test_staleness_is_measured_once_per_token_against_the_start_of_the_batch(policy, aged) -> None:
    whole = trainer_of(policy, correction="none").step(aged, VERSION).metrics
    found = trainer_of(policy, proximal="recompute", **PLAIN).step(aged, VERSION).metrics
    names = [
        name for name in whole if name.startswith(("ratio/behavior", "ratio/staleness", "mismatch/", "ratio/effective"))
    ]
    assert len(names) >= 10
    assert {name: found[name] for name in names} == pytest.approx({name: whole[name] for name in names}, rel=1e-5)


def test_without_a_forward_at_the_start_only_the_first_update_is_measured(policy, aged) -> None:
    first = aged[np.random.default_rng([VERSION, 0]).permutation(3)[0]]
    alone = trainer_of(policy, correction="none").step([first], VERSION).metrics
    found = trainer_of(policy, proximal="interpolate", **PLAIN).step(aged, VERSION).metrics
    names = [name for name in alone if name.startswith(("ratio/behavior", "ratio/staleness", "mismatch/"))]
    assert {name: found[name] for name in names} == pytest.approx({name: alone[name] for name in names}, rel=1e-5)


def test_a_mini_batch_that_is_not_finite_is_skipped_and_the_others_go_on(policy, aged) -> None:
    settings = PLAIN | {"correction": "decoupled", "epochs": 1, "proximal": "recompute"}
    order = np.random.default_rng([VERSION, 0]).permutation(3)
    aged[order[1]].trajectories[0].behavior_logprobs[-1] = np.nan
    trainer = trainer_of(policy, **settings)
    report = trainer.step(aged, VERSION)
    assert (report.version, report.skipped) == (VERSION + 1, False)
    assert (report.metrics["trainer/updates"], report.metrics["trainer/skipped_updates"]) == (3, 1)
    assert np.isfinite(list(report.metrics.values())).all()


def test_a_batch_whose_updates_are_all_not_finite_is_skipped(policy, aged) -> None:
    for group in aged:
        group.trajectories[0].behavior_logprobs[-1] = np.nan
    trainer = trainer_of(policy, proximal="recompute", **(PLAIN | {"correction": "decoupled"}))
    report = trainer.step(aged, VERSION)
    assert (report.version, report.skipped, report.metrics["trainer/skipped_updates"]) == (VERSION, True, 6)


def test_parts_of_a_batch_and_batches_of_too_few_groups_are_refused(policy, aged) -> None:
    trainer = trainer_of(policy, proximal="recompute", **PLAIN)
    with pytest.raises(TrainingError, match="a batch is 6 updates"):
        trainer.accumulate(aged[:1], VERSION)
    with pytest.raises(TrainingError, match=r"batch of 2 groups .*mini_batches=3"):
        trainer.step(aged[:2], VERSION)


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_mini_batch_whose_answers_are_all_dropped_takes_no_step_and_the_others_do(policy, aged, advantage) -> None:
    cut = tuple(replace(one, finish_reason="length") for one in aged[1].trajectories)
    whole = [replace(one, finish_reason="stop") for group in aged for one in group.trajectories]
    batch = [replace(group, trajectories=tuple(whole[3 * place : 3 * place + 3])) for place, group in enumerate(aged)]
    batch[1] = replace(batch[1], trajectories=cut)
    settings = PLAIN | {"epochs": 1, "advantage": advantage, "overlong": "drop", "proximal": "recompute"}
    report = trainer_of(policy, **settings).step(batch, VERSION)
    assert (report.version, report.metrics["trainer/updates"], report.metrics["trainer/silent_updates"]) == (7, 3, 1)
    assert np.isfinite(list(report.metrics.values())).all()
