"""The clipped policy loss against a loop in float64. Runs on the torch version, and interpreted on the Triton one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.errors import ShapeError
from penstock.kernels.policy_loss import FUSED_CORRECTIONS, clipped_policy_loss
from penstock.kernels.portable.policy_loss import MAXIMA, SUMS, ClippedLoss, LossTokens


def make_tokens(num_tokens: int, seed: int, spread: float = 0.5) -> LossTokens:
    generator = torch.Generator().manual_seed(seed)
    target = -3.0 + torch.randn(num_tokens, generator=generator)
    drifts = spread * torch.randn(3, num_tokens, generator=generator)
    advantages, weights, entropies = torch.randn(3, num_tokens, generator=generator)
    return LossTokens(target, *(target + drift for drift in drifts), advantages, weights.abs(), entropies.abs())


def clamped_exp(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def by_hand(tokens: LossTokens, loss: ClippedLoss) -> tuple[list[float], dict[str, float], dict[str, float]]:
    """Gradient per token, sums and maxima, token by token; the gradient by the derivative of the active branch."""
    sums, maxima, gradient = dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0), []
    for c, p, b, r, advantage, weight, entropy in np.stack([each.double().numpy() for each in tokens], 1).tolist():
        ratio, w = clamped_exp(c - p), clamped_exp(p - b)
        inside = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        is_clipped = -advantage * inside > -advantage * ratio
        is_masked = loss.correction == "decoupled" and w > loss.cap
        factor = {"none": 1.0, "decoupled": 0.0 if is_masked else w, "tis_token": min(w, loss.cap)}[loss.correction]
        divergence, slope = {
            "none": (0.0, 0.0),
            "k2": (0.5 * (c - r) ** 2, c - r),
            "k3": (clamped_exp(r - c) - (r - c) - 1, 1 - (math.exp(r - c) if abs(r - c) <= 20 else 0.0)),
        }[loss.kl]
        term = -advantage * (inside if is_clipped else ratio) + loss.kl_coefficient * divergence
        own = 0.0 if is_clipped or abs(c - p) > 20 else -advantage * ratio
        gradient.append(weight * factor * (own + loss.kl_coefficient * slope))
        values = {
            "tokens": 1.0,
            "loss": weight * factor * term,
            "entropy": entropy,
            "weight": w,
            "weight_squared": w * w,
            "masked": float(is_masked),
            "clipped": float(is_clipped),
            "abs_log_ratio": abs(p - b),
            "kl_k3": w - (p - b) - 1,
            "reference_kl": clamped_exp(r - p) - (r - p) - 1,
        }
        for name in SUMS:
            sums[name] += values[name]
        for name in MAXIMA:
            maxima[name] = max(maxima[name], values[name])
    return gradient, sums, maxima


def check(tokens: LossTokens, loss: ClippedLoss, upstream: float = 1.0) -> None:
    target = tokens.target.clone().requires_grad_()
    result = clipped_policy_loss(tokens._replace(target=target), loss)
    (result.loss * upstream).backward()
    gradient, sums, maxima = by_hand(tokens, loss)
    actual_sums, actual_maxima = (values.tolist() for values in (result.sums, result.maxima))
    assert dict(zip(SUMS, actual_sums, strict=True)) == pytest.approx(sums, rel=3e-5, abs=3e-5)
    assert dict(zip(MAXIMA, actual_maxima, strict=True)) == pytest.approx(maxima, rel=1e-5, abs=1e-6)
    assert result.loss.item() == pytest.approx(sums["loss"], rel=3e-5, abs=3e-5)
    torch.testing.assert_close(
        target.grad.double(), torch.tensor(gradient, dtype=torch.float64) * upstream, rtol=3e-5, atol=3e-6
    )


@pytest.mark.parametrize("kl", ["none", "k2", "k3"])
@pytest.mark.parametrize("correction", FUSED_CORRECTIONS)
def test_loss_gradient_and_metrics_equal_a_loop_in_float64(correction, kl) -> None:
    loss = ClippedLoss(0.2, 0.28, correction, cap=1.5, kl=kl, kl_coefficient=0.0 if kl == "none" else 0.1)
    tokens = make_tokens(77, seed=0)
    _, sums, _ = by_hand(tokens, loss)
    assert 5 < sums["clipped"] < 70
    assert (5 < sums["masked"] < 70) == (correction == "decoupled")
    check(tokens, loss, upstream=2.5)


@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.integers(1, 90),
    seed=st.integers(0, 999),
    correction=st.sampled_from(FUSED_CORRECTIONS),
    kl=st.sampled_from(["none", "k2", "k3"]),
    clip_low=st.floats(0.05, 0.5),
    clip_high=st.floats(0.05, 0.5),
    cap=st.floats(0.5, 3.0),
)
def test_any_number_of_tokens_and_any_settings(num_tokens, seed, correction, kl, clip_low, clip_high, cap) -> None:
    check(make_tokens(num_tokens, seed), ClippedLoss(clip_low, clip_high, correction, cap, kl, 0.05))


def test_log_ratios_beyond_twenty_are_clamped_and_carry_no_gradient() -> None:
    tokens = make_tokens(4, seed=1)
    far = tokens.target + torch.tensor([30.0, -30.0, 30.0, -30.0])
    tokens = tokens._replace(proximal=far, behavior=far, reference=far, advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    check(tokens, ClippedLoss(0.2, 0.2, "none", kl="k2", kl_coefficient=0.1))


def test_gradient_flows_to_the_target_alone() -> None:
    tokens = LossTokens(*(column.clone().requires_grad_() for column in make_tokens(9, seed=2)))
    clipped_policy_loss(tokens, ClippedLoss(0.2, 0.2, kl="k3", kl_coefficient=0.1)).loss.backward()
    assert [column.grad is not None for column in tokens] == [True] + 6 * [False]


@pytest.mark.parametrize("column", ["target", "proximal", "behavior", "advantages", "weights"])
def test_a_nan_anywhere_reaches_the_loss(column) -> None:
    tokens = make_tokens(40, seed=3)
    poisoned = getattr(tokens, column).clone()
    poisoned[37] = math.nan
    result = clipped_policy_loss(tokens._replace(**{column: poisoned}), ClippedLoss(0.2, 0.2))
    assert math.isnan(float(result.loss))


def test_no_tokens_give_zero() -> None:
    target = torch.zeros(0, requires_grad=True)
    result = clipped_policy_loss(LossTokens(target, *torch.zeros(6, 0)), ClippedLoss(0.2, 0.2))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert not result.sums.any()
    assert not result.maxima.any()


def test_columns_that_do_not_fit_are_named() -> None:
    tokens = make_tokens(5, seed=4)
    with pytest.raises(ShapeError, match=r"proximal \[4\] torch.float32, weights \[5\] torch.float64"):
        clipped_policy_loss(
            tokens._replace(proximal=tokens.proximal[1:], weights=tokens.weights.double()), ClippedLoss(0.2, 0.2)
        )
