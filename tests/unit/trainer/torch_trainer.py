"""What the trainer tests share: a tiny policy, a trainer of it on plain torch, and one trajectory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.trainer.build import build_trainer
from penstock.trainer.config import (
    AlgorithmConfig,
    CriticConfig,
    CriticOptimizerConfig,
    LoraConfig,
    OptimizerConfig,
    TrainerConfig,
)
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec
from penstock.weights.model_config import ModelConfig
from tests.algorithms import algorithm_config
from tests.tiny_policy import tiny_shape

VOCAB, TEMPERATURE = 20, 0.8
MODEL = ModelConfig(max_context_tokens=32, shape=tiny_shape(VOCAB))


def trainer_of(
    policy: str,
    max_tokens: int = 100,
    lr: float = 1e-3,
    warmup_steps: int = 0,
    adam_epsilon: float = 1e-8,
    critic_path: str | None = None,
    critic: CriticConfig | None = None,
    kind: str = "policy",
    lora: LoraConfig | None = None,
    share_prompts: bool = False,
    preset: AlgorithmConfig | None = None,
    value_clip: float = 0.2,
    critic_warmup: int = 0,
    critic_ratio: float = 1.0,
    record_every: int = 0,
    optimizer: OptimizerConfig | None = None,
    **algorithm,
) -> PolicyTrainer:
    spec = TrainerSpec(
        model_path=policy,
        model=MODEL,
        trainer=TrainerConfig(
            backend="torch",
            max_tokens_per_micro_batch=max_tokens,
            lora=lora,
            share_prompts=share_prompts,
            optimizer=optimizer or OptimizerConfig(lr=lr, warmup_steps=warmup_steps, eps=adam_epsilon),
        ),
        algorithm=preset or algorithm_config(**algorithm),
        device="cpu",
        threads=1,
        seed=0,
        temperature=TEMPERATURE,
        max_new_tokens=30,
        kind=kind,
        record_every=record_every,
        critic=critic
        or CriticConfig(
            path=critic_path,
            optimizer=CriticOptimizerConfig(lr=lr, eps=adam_epsilon),
            value_clip=value_clip,
            warmup_steps=critic_warmup,
            updates_per_policy_update=critic_ratio,
        ),
    )
    return build_trainer(spec)


def scored(batch, references=(), teachers=(), min_versions=(), values=(), proximals=()) -> list[GroupPayload]:
    """Groups with the scores of their sampled tokens, and the oldest version that is trained."""
    groups = list(batch)
    given = {"reference": references, "teacher": teachers, "values": values, "proximal": proximals}
    for name, of_groups in (given | {"min_version": min_versions}).items():
        if len(of_groups):
            groups = [replace(group, **{name: one}) for group, one in zip(groups, of_groups, strict=True)]
    return groups


def trajectory(name: str, prompt: list[int], response: list[int], rng, reward: float | None) -> Trajectory:
    """One trajectory whose second response token, if it has more than two, was not sampled (an observation)."""
    mask = np.array([False] * len(prompt) + [True] * len(response))
    if len(response) > 2:
        mask[len(prompt) + 1] = False
    behavior = np.where(mask, rng.normal(-3.0, 0.4, len(mask)), 0.0).astype(np.float32)
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        task_id=TaskId("t"),
        token_ids=np.array(prompt + response, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=behavior,
        spans=(Span(0, int(mask.sum())),),
        prompt="",
        response="",
        finish_reason="length" if len(response) > 10 else "stop",
        reward=reward,
    )


def logprobs_of(model, one: Trajectory) -> np.ndarray:
    """`[sampled] float64` logprobs by an unpacked forward of one sequence."""
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double().numpy() / TEMPERATURE
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    positions = np.flatnonzero(one.loss_mask)
    return logprobs[positions - 1, one.token_ids[positions]]
