"""Run by test_triton_kernels.py with TRITON_INTERPRET=1: a step of the fused loss is the step of the composed one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.ids import PARTNER
from penstock.dataflow.versions import Span
from penstock.trainer.algorithms import objective

from .torch_trainer import scored, trainer_of

# ε of AdamW far above the gradient: updates are proportional to it, so that weights compare gradients.
PLAIN = {"lr": 1.0, "adam_epsilon": 1.0, "correction_cap": 1.3}
VERSION = 6


def of_every_age(batch):
    """From versions 0 to 6, and one member of another policy; no group is without signal."""

    def age(place: int, one):
        old = one.num_sampled_tokens // 2
        spans = tuple(span for span in (Span(2 * place, old), Span(6, one.num_sampled_tokens - old)) if span.num_tokens)
        return replace(one, spans=spans, reward=float(place == 1))

    groups = [replace(group, trajectories=tuple(map(age, range(3), group.trajectories))) for group in batch]
    first, *others = groups[0].trajectories
    return [replace(groups[0], trajectories=(replace(first, policy_id=PARTNER), *others)), *groups[1:]]


def references(batch):
    rng = np.random.default_rng(8)
    sizes = [sum(int(one.loss_mask.sum()) for one in group.trajectories) for group in batch]
    return [rng.normal(-3.0, 0.4, size).astype(np.float32) for size in sizes]


def step(policy: str, batch, *, in_parts: bool, **algorithm) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer = trainer_of(policy, 40, **PLAIN, **algorithm)
    given = references(batch) if algorithm.get("kl_coefficient") else []
    if in_parts:
        trainer.accumulate(scored(batch[:1], given[:1]), VERSION)
        batch, given = batch[1:], given[1:]
    metrics = trainer.step(scored(batch, given), VERSION).metrics
    weights = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    timed = ("trainer/step_s", "trainer/tokens_per_s_per_device", "trainer/tflops_per_device")
    return {name: value for name, value in metrics.items() if name not in timed}, weights


@pytest.mark.parametrize(
    ("in_parts", "algorithm"),
    [
        (False, {"kl_coefficient": 0.1, "kl_estimator": "k2"}),
        (False, {"renormalize": "kept"}),
        (True, {"correction": "none", "kl_coefficient": 0.1, "kl_estimator": "k3"}),
        (False, {"correction": "tis_token", "proximal": "recompute", "mini_batches": 3, "epochs": 2}),
    ],
    ids=["one update", "renormalised", "in parts", "six updates"],
)
def test_a_step_reports_and_learns_the_same(policy, batch, in_parts, algorithm, monkeypatch) -> None:
    aged, calls = of_every_age(batch), []
    fused_loss = objective.fused_loss
    monkeypatch.setattr(objective, "fused_loss", lambda *given: calls.append(1) or fused_loss(*given))
    metrics, weights = step(policy, aged, in_parts=in_parts, **algorithm)
    num_fused = len(calls)
    monkeypatch.setattr(objective, "can_fuse", lambda target: False)
    composed_metrics, composed_weights = step(policy, aged, in_parts=in_parts, **algorithm)
    assert num_fused == len(calls) >= 3, "every micro-batch of the first run, none of the second"
    assert {
        "ratio/staleness_tokens/other_policy",
        "ratio/staleness_tokens/0",
        "ratio/staleness_tokens/4_plus",
    } <= metrics.keys()
    assert metrics == pytest.approx(composed_metrics, rel=1e-5, abs=1e-7)
    before = dict(trainer_of(policy, 40).export_weights())
    moved = sum(float((composed_weights[name] - old).double().square().sum()) for name, old in before.items())
    error = sum(float((weights[name] - composed_weights[name]).double().square().sum()) for name in before)
    assert moved > 0
    assert error**0.5 < 1e-5 * moved**0.5
