"""Run by test_triton_kernels.py with TRITON_INTERPRET=1: the fused policy loss against the composed one in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.kernels.policy_loss import MAXIMA, SUMS, ClippedTokens, clipped_policy_loss
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.metrics import OF_ANOTHER_POLICY, TokenMetrics, TokenSums
from penstock.trainer.algorithms.objective import Objective, can_fuse
from penstock.trainer.batches.collate import MicroBatch, ModelInputs, empty_micro_batch
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.optimizer_steps import OpenOptimizerStep
from tests.algorithms import algorithm_config, resolved
from tests.tiers import by_tier, each_of

CORRECTIONS, PROXIMALS = ("none", "decoupled", "tis_token"), ("target", "recompute", "interpolate", "behavior")
IN_FLOAT32 = 1e-5
CPU = torch.device("cpu")
TIGHT = {"clip_low": 0.2, "clip_high": 0.28, "correction_cap": 1.2, "tis_cap": 1.1}


def micro_batch(num_tokens: int, seed: int, *, spread: float = 0.4, has_teacher: bool = False) -> MicroBatch:
    """Of tokens of every staleness, some of them another policy's."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -3.0 + torch.randn(num_tokens, generator=generator)
    proximal, reference, teacher = behavior + spread * torch.randn(3, num_tokens, generator=generator)
    advantages, weights = torch.randn(2, num_tokens, generator=generator)
    index = torch.arange(num_tokens)
    return MicroBatch(
        inputs=ModelInputs(index, index, None, index, index),
        behavior_logprobs=behavior,
        advantages=advantages,
        token_weights=weights.abs() / max(num_tokens, 1),
        reference_logprobs=reference,
        staleness=torch.randint(OF_ANOTHER_POLICY, 7, (num_tokens,), generator=generator),
        segments=torch.zeros(num_tokens, dtype=torch.int64),
        pairs=torch.zeros(0, 2, dtype=torch.int64),
        sequence_index=np.zeros(num_tokens, np.int64),
        token_index=np.arange(num_tokens),
        num_segments=1,
        num_tokens=num_tokens,
        proximal_logprobs=proximal,
        teacher_logprobs=teacher if has_teacher else None,
    )


def policy(batch: MicroBatch, seed: int, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies under the policy in training."""
    noise = torch.randn(2, len(batch.behavior_logprobs), generator=torch.Generator().manual_seed(1000 + seed))
    assert batch.proximal_logprobs is not None
    return batch.proximal_logprobs + spread * noise[0], noise[1].abs()


def in_float64(batch: MicroBatch) -> MicroBatch:
    columns = {name: getattr(batch, name) for name in MicroBatch.__slots__}
    return replace(
        batch,
        **{
            name: column.double()
            for name, column in columns.items()
            if isinstance(column, Tensor) and column.is_floating_point()
        },
    )


def run(
    config: AlgorithmConfig,
    batch: MicroBatch,
    target: Tensor,
    entropies: Tensor,
    upstream: float = 1.0,
    is_first: bool = True,
    is_first_epoch: bool = True,
) -> tuple[Tensor, Tensor, TokenSums]:
    """Loss, gradient and what was measured."""
    leaf = target.clone().requires_grad_()
    update = OpenOptimizerStep(TokenMetrics(CPU), None, is_first, is_first_epoch)
    loss = Objective(Algorithm(config))(leaf, entropies, batch, update)
    (loss * upstream).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, update.metrics.reduce(lambda values, _: values)


def distance(mine: np.ndarray | Tensor, theirs: np.ndarray | Tensor) -> float:
    """Relative by norm; NaN and infinity count as equal where both have them."""
    left, right = (np.asarray(each, dtype=np.float64).ravel() for each in (mine, theirs))
    is_finite = np.isfinite(right)
    np.testing.assert_array_equal(left[~is_finite], right[~is_finite])
    error = np.linalg.norm(left[is_finite] - right[is_finite])
    return float(error / max(np.linalg.norm(right[is_finite]), 1e-12)) if error else 0.0


def check(config: AlgorithmConfig, batch: MicroBatch, target: Tensor, entropies: Tensor, **how) -> TokenSums:
    assert Algorithm(config).fused is not None
    assert can_fuse(target)
    assert not can_fuse(target.double()), "which is composed"
    loss, gradient, found = run(config, batch, target, entropies, **how)
    exact_loss, exact_gradient, exact = run(config, in_float64(batch), target.double(), entropies.double(), **how)
    # A sum of terms of both signs is compared by their size.
    size = max(float(exact_gradient.norm()), abs(float(exact_loss)), 1e-3)
    if math.isfinite(float(exact_loss)):
        assert float(loss) == pytest.approx(float(exact_loss), abs=IN_FLOAT32 * size)
        assert distance(gradient, exact_gradient) <= IN_FLOAT32
    else:
        assert not math.isfinite(float(loss))
    for name, mine, theirs in zip(SUMS, found.sums, exact.sums, strict=True):
        if name == "loss":
            assert mine == pytest.approx(theirs, abs=IN_FLOAT32 * size, nan_ok=True)
        else:
            assert distance(mine, theirs) <= IN_FLOAT32, name
    assert distance(found.maxima, exact.maxima) <= IN_FLOAT32
    for bucket, (mine, theirs) in enumerate(zip(found.by_staleness, exact.by_staleness, strict=True)):
        for place in range(3):
            assert distance(mine[place], theirs[place]) <= IN_FLOAT32, (bucket, place)
    return found


def test_this_process_interprets() -> None:
    assert is_interpreted()


@pytest.mark.parametrize(("correction", "kl"), each_of(CORRECTIONS, ["none", "k2", "k3"]))
def test_loss_gradient_and_everything_measured_are_those_of_the_composed_path(correction, kl) -> None:
    divergence = {} if kl == "none" else {"kl_coefficient": 0.1, "kl_estimator": kl}
    config = algorithm_config(correction=correction, proximal="recompute", **TIGHT, **divergence)
    batch = micro_batch(77, seed=0, has_teacher=True)
    found = check(config, batch, *policy(batch, 0), upstream=2.5)
    sums = dict(zip(SUMS, found.sums, strict=True))
    assert min(sums["clipped_low"], sums["clipped_high"]) > 3
    assert (5 < sums["masked"] < 70) == (correction == "decoupled")
    assert sums["measured_tokens"] < sums["tokens"] == found.by_staleness[:, 0].sum()
    assert (found.by_staleness[:, 0] > 3).all()


@pytest.mark.parametrize("proximal", PROXIMALS)
@pytest.mark.parametrize(
    ("is_first", "is_first_epoch"), [(True, True), (False, True), (False, False)], ids=["first", "later", "next epoch"]
)
def test_any_centre_and_any_update_of_a_batch(proximal, is_first, is_first_epoch) -> None:
    correction = "none" if proximal == "behavior" else "decoupled"
    config = algorithm_config(correction=correction, proximal=proximal, **TIGHT)
    batch = micro_batch(50, seed=4)
    batch = replace(batch, staleness=batch.staleness.clamp(min=0))  # interpolate knows no other policy
    target, entropies = policy(batch, 4)
    if proximal != "recompute":
        batch = replace(batch, proximal_logprobs=None)
    found = check(config, batch, target, entropies, is_first=is_first, is_first_epoch=is_first_epoch)
    is_known = is_first or (is_first_epoch and proximal == "recompute")
    assert found.sums[SUMS.index("measured_tokens")] == (50 if is_known else 0)
    assert found.by_staleness.any() == is_known


@settings(max_examples=by_tier(5, full=20), deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 90),
    seed=st.integers(0, 999),
    correction=st.sampled_from(CORRECTIONS),
    kl=st.sampled_from(["k2", "k3"]),
    clip_low=st.floats(0.05, 0.5),
    clip_high=st.floats(0.05, 0.5),
    cap=st.floats(1.0, 3.0),
)
def test_any_number_of_tokens_and_any_settings(num_tokens, seed, correction, kl, clip_low, clip_high, cap) -> None:
    config = algorithm_config(
        correction=correction, proximal="recompute", clip_low=clip_low, clip_high=clip_high, correction_cap=cap,
        tis_cap=cap, kl_coefficient=0.05, kl_estimator=kl,
    )  # fmt: skip
    batch = micro_batch(num_tokens, seed)
    check(config, batch, *policy(batch, seed))


def test_engines_that_hardly_differ_keep_their_digits() -> None:
    batch = micro_batch(64, seed=7, spread=1e-3)
    check(AlgorithmConfig(), batch, *policy(batch, 7, spread=0.0))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_log_ratios_beyond_twenty_are_clamped_and_carry_no_gradient(correction) -> None:
    batch = micro_batch(8, seed=1)
    far = torch.tensor([30.0, -30.0, 30.0, -30.0, 21.0, -21.0, 19.0, -19.0])
    target, entropies = policy(batch, 1)
    batch = replace(
        batch, advantages=torch.tensor([1.0, 1.0, -1.0, -1.0] * 2), behavior_logprobs=target - far.flip(0),
        proximal_logprobs=target + far, reference_logprobs=target + far,
    )  # fmt: skip
    for kl in ("k2", "k3"):
        config = algorithm_config(correction=correction, proximal="recompute", kl_coefficient=0.1, kl_estimator=kl)
        check(config, batch, target, entropies)


@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_k3_never_pushes_away_from_the_reference_and_never_explodes(upstream) -> None:
    """The kernel itself, against a closed form: k3 = exp(d) − d − 1 with d = clamp(r − c, ±10) in both terms."""
    d = np.array([-90.0, -20.1, -10.001, -9.999, -0.5, 0.0, 0.5, 9.999, 10.001, 19.9, 20.1, 90.0])
    batch = micro_batch(len(d), seed=6)
    target, entropies = policy(batch, 6)
    exact = target.double().numpy()
    reference = torch.tensor(exact + d).float()
    d = reference.double().numpy() - exact
    batch = replace(batch, reference_logprobs=reference, advantages=torch.zeros(len(d)))
    config = algorithm_config(correction="none", proximal="recompute", kl_coefficient=0.5, kl_estimator="k3")
    loss, gradient, found = run(config, batch, target, entropies, upstream=upstream)
    weights, near = batch.token_weights.double().numpy(), np.clip(d, -10, 10)
    terms = np.exp(near) - near - 1
    slopes = np.where(np.abs(d) > 10, 0.0, 1 - np.exp(d))
    assert float(loss) == pytest.approx(0.5 * float(weights @ terms), rel=IN_FLOAT32)
    assert distance(gradient, upstream * 0.5 * weights * slopes) <= IN_FLOAT32
    assert (gradient.numpy() * upstream * -d >= 0).all()
    assert found.sums[SUMS.index("reference_kl")] == pytest.approx(terms.sum(), rel=IN_FLOAT32)


@pytest.mark.parametrize(("correction", "kl"), each_of(CORRECTIONS, ["k2", "k3"]))
def test_the_cap_rejects_the_policy_loss_and_leaves_the_divergence(correction, kl) -> None:
    """Of the kernel itself, against a closed form; a token that decoupled masks weighs 1 in the divergence."""
    batch = micro_batch(60, seed=9)
    target, entropies = policy(batch, 9, spread=0.0)  # ρ = 1: the slope of the policy term is −A
    config = algorithm_config(correction=correction, proximal="recompute", **TIGHT, kl_coefficient=0.5, kl_estimator=kl)
    _, gradient, found = run(config, batch, target, entropies)
    columns = (target, batch.behavior_logprobs, batch.reference_logprobs, batch.advantages, batch.token_weights)
    c, b, r, a, share = (column.double().numpy() for column in columns)
    w, slope = np.exp(c - b), {"k2": c - r, "k3": 1 - np.exp(r - c)}[kl]
    weigh, hold = {
        "none": (np.ones(60), np.ones(60)),
        "decoupled": (np.where(w > 1.2, 0.0, w), np.where(w > 1.2, 1.0, w)),
        "tis_token": (np.minimum(w, 1.1), np.minimum(w, 1.1)),
    }[correction]
    assert 10 < (w > 1.2).sum() < 50
    assert distance(gradient, share * (-a * weigh + 0.5 * hold * slope)) <= IN_FLOAT32
    assert found.sums[SUMS.index("masked")] == (int((w > 1.2).sum()) if correction == "decoupled" else 0)


def test_all_tokens_masked_give_no_gradient() -> None:
    batch = micro_batch(40, seed=2)
    assert batch.proximal_logprobs is not None
    batch = replace(batch, behavior_logprobs=batch.proximal_logprobs - 3.0)
    target, entropies = policy(batch, 2)
    config = algorithm_config(proximal="recompute")
    found = check(config, batch, target, entropies)
    assert not run(config, batch, target, entropies)[1].any()
    assert found.sums[SUMS.index("masked")] == 40
    assert found.kept_share == 0.0


def test_only_another_policys_tokens_measure_no_behavior_weight() -> None:
    batch = micro_batch(40, seed=3)
    batch = replace(batch, staleness=torch.full_like(batch.staleness, OF_ANOTHER_POLICY))
    found = check(AlgorithmConfig(), batch, *policy(batch, 3))
    assert found.sums[SUMS.index("measured_tokens")] == 0
    assert not found.maxima[: len(MAXIMA)].any()
    assert found.by_staleness[0, 0] == 40


@pytest.mark.parametrize(
    ("column", "value"),
    each_of(["target", "proximal_logprobs", "behavior_logprobs", "advantages", "token_weights"], [math.nan, math.inf]),
)
def test_what_is_not_finite_reaches_the_loss_and_the_metrics_as_composed(column, value) -> None:
    batch = micro_batch(40, seed=5)
    target, entropies = policy(batch, 5)
    poisoned = (target if column == "target" else getattr(batch, column)).clone()
    poisoned[37] = value
    config = algorithm_config(proximal="recompute")
    target, batch = (poisoned, batch) if column == "target" else (target, replace(batch, **{column: poisoned}))
    check(config, batch, target, entropies)


@pytest.mark.parametrize("column", ["behavior_logprobs", "reference_logprobs", "proximal_logprobs", "teacher_logprobs"])
def test_a_recorded_logprob_that_is_not_finite_reaches_the_loss_even_if_nothing_reads_it(column) -> None:
    config, batch = algorithm_config(correction="none"), micro_batch(40, seed=5, has_teacher=True)
    target, entropies = policy(batch, 5)
    assert Algorithm(config).fused is not None
    assert can_fuse(target)
    assert math.isfinite(float(run(config, batch, target, entropies)[0]))
    poisoned = getattr(batch, column).clone()
    poisoned[37] = -math.inf
    assert math.isnan(float(run(config, replace(batch, **{column: poisoned}), target, entropies)[0]))


def test_an_empty_micro_batch_gives_zero_and_measures_nothing() -> None:
    target, entropies = torch.tensor([-1.5]), torch.tensor([0.7])
    for proximal in PROXIMALS:
        loss, gradient, found = run(
            algorithm_config(proximal=proximal),
            empty_micro_batch(CPU, needs_mask=True),
            target,
            entropies,
            is_first=False,
        )
        assert float(loss) == 0.0
        assert not gradient.any()
        assert not found.sums.any()
        assert not found.by_staleness.any()


def clipped_tokens(num_tokens: int) -> ClippedTokens:
    columns = torch.randn(9, num_tokens)
    return ClippedTokens(*columns, torch.zeros(num_tokens, dtype=torch.int64), TokenMetrics(CPU).bucket_ends)


def test_gradient_flows_to_the_target_alone() -> None:
    tokens = ClippedTokens(*(each.requires_grad_() if each.is_floating_point() else each for each in clipped_tokens(9)))
    clipped_policy_loss(tokens, resolved(kl_coefficient=0.1).fused).loss.backward()
    assert [column.grad is not None for column in tokens] == [True] + 10 * [False]


def test_no_tokens_give_zero() -> None:
    tokens = clipped_tokens(0)
    tokens.target.requires_grad_()
    result = clipped_policy_loss(tokens, resolved().fused)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert not any(each.any() for each in result[1:])


def test_columns_that_do_not_fit_are_named() -> None:
    tokens = clipped_tokens(5)
    wrong = tokens._replace(
        proximal=tokens.proximal[1:], weights=tokens.weights.double(), staleness=tokens.staleness.int()
    )
    with pytest.raises(ShapeError, match=r"proximal \[4\] torch.float32, weights \[5\] torch.float64, staleness \[5\]"):
        clipped_policy_loss(wrong, resolved().fused)
