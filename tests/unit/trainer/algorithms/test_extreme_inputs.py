"""Any sound combination gives a finite loss and a finite gradient, whatever a batch holds.

Policies that are 90 nats apart, logprobs that one side has rounded to bfloat16, rows without a loss token or with one
alone, groups of one member or of equal rewards. All of it goes the way of a training step, without a model: rewards to
advantages and token weights, collation, loss, correction, divergence, backward, metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice

import numpy as np
import pytest
import torch

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.dataflow.versions import Span
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.catalog import names
from penstock.trainer.algorithms.losses.value import value
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.algorithms.rules import algorithm_violations
from penstock.trainer.algorithms.tokens import LossTokens
from penstock.trainer.batches.collate import MicroBatch, collate
from penstock.trainer.batches.packing import MicroBatchPlan
from penstock.trainer.batches.samples import policy_sequences
from penstock.trainer.config import AlgorithmConfig, CriticConfig
from penstock.trainer.optimizer_steps import OpenOptimizerStep
from tests.algorithms import algorithm_config
from tests.tiers import by_tier
from tests.unit.trainer.torch_trainer import scored, trajectory

CPU = torch.device("cpu")
VERSION, OLDEST = 6, 3
NUM_INPUTS = 60
LENGTHS = [[1, 4, 6], [5], [3, 1, 1, 2], [8, 2]]
"""Sampled tokens or one more of each member; the second member of the first group is older than allowed."""
POOLS = {
    "far": np.array([0.0, -1e-7, -0.7, -20.0, -45.0, -90.0]),
    "near": np.array([-0.7, -0.7 - 1e-7, -0.70001, -0.69]),
    "just past the clamps": np.array([0.0, -9.999, -10.001, -19.999, -20.001]),
}
CHAINS = (
    (), *((name,) for name in names("correction")), ("decoupled", "opsm"), ("tis_token", "mis_seq_geo", "veto"),
    ("mis_token", "veto"), ("tis_seq", "opsm"), ("mis_seq_geo", "veto"), ("tis_token", "m2po"),
)  # fmt: skip
CHOICES = {
    "loss": [name for name in names("loss") if name != "value"],
    "correction": CHAINS,
    "advantage": names("advantage"),
    "kl": [("loss", "k2", 0.0), ("loss", "k2", 0.1), ("loss", "k3", 0.1), ("reward", "k1", 0.1)],
    "aggregation": names("aggregation"),
    "proximal": names("proximal"),
    "advantage_std": ["sample", "population", "none"],
    "pairs": ["best_worst", "all"],
    "ipo_length": ["mean", "sum"],
    "cispo_low": [None, 0.2],
    "dpo_length": ["mean", "sum"],
    "label_smoothing": [0.0, 0.2],
    "tis_low": [0.0, 0.5],
    "renormalize": ["none", "kept", "weights"],
    "teacher_coefficient": [0.0, 0.0, 1.0],
    "nll_coefficient": [0.0, 0.0, 0.5],
    "clip_cov_share": [2e-4, 0.5],
    "kl_cov_share": [2e-4, 0.5],
    "staleness_decay": [1.0, 1.0, 0.5],
    "entropy_top_share": [1.0, 1.0, 0.2],
    "entropy_coefficient": [0.0, 0.0, 0.1],
    "overlong": ["keep", "mask", "penalty"],
}
OF_PAIRS = {
    "correction": (), "advantage": "grpo", "kl": ("loss", "k2", 0.0), "aggregation": "token_mean",
    "proximal": "target", "staleness_decay": 1.0, "entropy_top_share": 1.0, "teacher_coefficient": 0.0,
    "entropy_coefficient": 0.0,
}  # fmt: skip
"""All that goes with a loss of pairs: rarely drawn otherwise."""


def sound_combinations(seed: int) -> Iterator[AlgorithmConfig]:
    """Endless, each of them once; of an unsound one another is drawn."""
    rng, seen = np.random.default_rng(seed), set()
    while True:
        chosen = {key: options[rng.integers(len(options))] for key, options in CHOICES.items()}
        if chosen["loss"] in ("online_dpo", "ipo"):
            chosen |= OF_PAIRS
        if tuple(chosen.values()) in seen:
            continue
        seen.add(tuple(chosen.values()))
        kl_in, kl_estimator, kl_coefficient = chosen.pop("kl")
        config = algorithm_config(
            **chosen, kl_in=kl_in, kl_estimator=kl_estimator, kl_coefficient=kl_coefficient, overlong_ramp_share=0.3
        )
        if not algorithm_violations(config):
            yield config


@dataclass(frozen=True)
class Inputs:
    """One batch, and per group and sampled token the logprobs of policies that have nothing in common."""

    payloads: list[GroupPayload]
    target: list[np.ndarray]
    reference: list[np.ndarray]
    teacher: list[np.ndarray]
    values: list[np.ndarray]


@cache
def inputs(seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    pool = list(POOLS.values())[seed % len(POOLS)]
    rounds = seed % 2 == 1

    def logprobs(num_tokens: int, *, of_engine: bool = False) -> np.ndarray:
        drawn = torch.tensor(rng.choice(pool, num_tokens), dtype=torch.float32)
        return (drawn.bfloat16().float() if of_engine and rounds else drawn).numpy()

    def member(group: int, place: int, length: int) -> object:
        reward = float(rng.choice([0.0, 1.0, 1.0 + 1e-12, -1e6])) if group != 3 else 0.5
        one = trajectory(f"{group}/{place}", [2, 3], [4] * length, rng, reward)
        behavior = np.zeros(len(one.token_ids), np.float32)
        behavior[one.loss_mask] = logprobs(one.num_sampled_tokens, of_engine=True)
        version = 0 if (group, place) == (0, 1) else int(rng.integers(OLDEST, VERSION + 1))
        finish_reason = "length" if rng.random() < 0.2 else "stop"
        spans = (Span(version, one.num_sampled_tokens),)
        return replace(one, behavior_logprobs=behavior, spans=spans, finish_reason=finish_reason)

    payloads = [
        GroupPayload(GroupId(group), tuple(member(group, place, length) for place, length in enumerate(lengths)))
        for group, lengths in enumerate(LENGTHS)
    ]
    sizes = [sum(one.num_sampled_tokens for one in payload.trajectories) for payload in payloads]
    target, reference, teacher = ([logprobs(size) for size in sizes] for _ in range(3))
    values = [rng.choice([0.0, -90.0, 90.0, 1e6], size).astype(np.float32) for size in sizes]
    return Inputs(payloads, target, reference, teacher, values)


def micro_batch_of(config: AlgorithmConfig, given: Inputs) -> tuple[MicroBatch, torch.Tensor]:
    """All of the batch in one micro-batch, and the logprobs of the policy at its loss tokens."""
    payloads = given.payloads
    if config.advantage.type == "maxrl":  # which refuses negative rewards
        payloads = [
            replace(group, trajectories=tuple(replace(one, reward=abs(one.reward)) for one in group.trajectories))
            for group in payloads
        ]
    sequences = policy_sequences(
        scored(
            payloads,
            references=given.reference if config.needs_reference else (),
            teachers=given.teacher if config.needs_teacher else (),
            min_versions=[OLDEST] * len(LENGTHS),
            values=given.values if config.needs_critic else (),
            proximals=given.target,
        ),
        Algorithm(config),
        7,
        VERSION,
    )
    sequences = Algorithm(config).select(sequences, VERSION)
    plan = MicroBatchPlan(tuple((index,) for index, one in enumerate(sequences) if one.num_inputs), 16)
    micro_batch = collate(plan, sequences, device=CPU, needs_mask=False)
    # The policy's logprobs were laid out as the proximal ones, which are those of other tokens instead.
    target = torch.zeros(1) if micro_batch.proximal_logprobs is None else micro_batch.proximal_logprobs
    proximal = target.flip(0) if config.proximal == "recompute" else None
    return replace(micro_batch, proximal_logprobs=proximal), target


def not_finite(config: AlgorithmConfig, seed: int) -> str | None:
    """What is not finite; None if all is."""
    micro_batch, target = micro_batch_of(config, inputs(seed % NUM_INPUTS))
    target = target.clone().requires_grad_()
    entropies = torch.linspace(0.0, 12.0, len(target), requires_grad=True)
    update = OpenOptimizerStep(TokenMetrics(CPU), is_first=seed % 4 < 2)
    loss = Objective(Algorithm(config))(target, entropies, micro_batch, update)
    loss.backward()
    sums = update.metrics.reduce(lambda values, _: values)
    metrics = sums.metrics() | {"kept_share": sums.kept_share}
    if not torch.isfinite(loss):
        return f"loss {float(loss.detach())}"
    if not torch.isfinite(target.grad).all():
        return f"gradient {target.grad.tolist()}"
    if entropies.grad is not None and not torch.isfinite(entropies.grad).all():
        return f"gradient of the entropies {entropies.grad.tolist()}"
    wrong = {name: value for name, value in metrics.items() if not np.isfinite(value)}
    return f"metrics {wrong}" if wrong else None


def findings(num_combinations: int) -> dict[str, str]:
    """Combination and seed of its inputs -> what is not finite."""
    drawn = islice(zip(count(), sound_combinations(seed=18)), num_combinations)
    found = {f"{seed} {config.model_dump(exclude_defaults=True)}": not_finite(config, seed) for seed, config in drawn}
    return {combination: what for combination, what in found.items() if what is not None}


@pytest.mark.full
def test_losses_and_gradients_of_all_combinations_are_finite() -> None:
    assert findings(by_tier(1_000, full=5_000)) == {}


@pytest.mark.parametrize("value_clip", [1e-6, 0.2, 1e6])
def test_loss_and_gradient_of_a_critic_are_finite(value_clip: float) -> None:
    pool = torch.tensor([0.0, 1e-7, -90.0, 90.0, -1e6, 1e6])
    new, old, returns = (one.flatten() for one in torch.meshgrid(pool, pool, pool, indexing="ij"))
    values, none = new.clone().requires_grad_(), torch.zeros(len(new))
    tokens = LossTokens(
        target=none, proximal=none, behavior=none, reference=none, advantages=none,
        segments=torch.zeros(len(new), dtype=torch.int64), num_segments=1, pairs=torch.zeros((0, 2), dtype=torch.int64),
        values=values, old_values=old, returns=returns,
    )  # fmt: skip
    terms = value(tokens, CriticConfig(value_clip=value_clip)).terms
    terms.sum().backward()
    assert torch.isfinite(terms).all()
    assert torch.isfinite(values.grad).all()


def test_the_combinations_hold_everything_there_is() -> None:
    drawn = list(islice(sound_combinations(seed=18), 1_000))
    assert {one.loss.type for one in drawn} == set(CHOICES["loss"])
    assert {frozenset(one.correction.chain) for one in drawn} == set(map(frozenset, CHAINS))
    assert {one.advantage.type for one in drawn} == set(names("advantage"))
    assert {one.aggregation for one in drawn} == set(names("aggregation"))
    assert {one.proximal for one in drawn} == set(names("proximal"))
    assert {(one.kl.apply_to, one.kl.estimator) for one in drawn} == {kl[:2] for kl in CHOICES["kl"]}


def test_the_inputs_hold_rows_without_and_with_one_loss_token_and_ratios_of_90_nats() -> None:
    distances = []
    for given in map(inputs, range(NUM_INPUTS)):
        sequences = policy_sequences(
            scored(given.payloads, min_versions=[OLDEST] * len(LENGTHS)), Algorithm(AlgorithmConfig()), 7, VERSION
        )
        assert {0, 1} < {len(one.targets) for one in sequences}
        members = [one for payload in given.payloads for one in payload.trajectories]
        behavior = np.concatenate([one.behavior_logprobs[one.loss_mask] for one in members])
        distances.append(np.concatenate(given.target) - behavior)
    assert (np.concatenate(distances).min(), np.concatenate(distances).max()) == (-90.0, 90.0)
