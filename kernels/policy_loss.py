"""The clipped policy loss of packed tokens with its correction, divergence and metrics, in one pass.

    ρ = exp(c − p);   w = exp(p − b);   log-ratios clamped to ±20
    loss = Σ_t weight_t · f(w_t) · (max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)) + β · kl(c, r))
    f(w):  none 1;   decoupled w, 0 where w > cap;   tis_token min(w, cap)         without gradient
    kl:    k2 ½ (c − r)²;   k3 exp(r − c) − (r − c) − 1

c target, p proximal, b behavior, r reference logprobs. On a GPU a step of these few hundred kilobytes is bound by the
number of kernels launched, about forty; here it is one and a reduction. Sources: PPO arXiv 1707.06347, AReaL arXiv
2505.24298 (decoupled).

Shape legend: T packed loss tokens.
"""

from __future__ import annotations

import torch

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.policy_loss import ClippedLoss, LossAndMetrics, LossTokens, clipped_loss

FUSED_CORRECTIONS = ("none", "decoupled", "tis_token")
"""Corrections that have this path beside `ppo_clip`; every other name takes the plain functions."""


def clipped_policy_loss(tokens: LossTokens, settings: ClippedLoss) -> LossAndMetrics:
    """Compute the loss of one micro-batch and what is logged of it.

    Args:
        tokens: See there; gradient flows to `target` only.
        settings: See there.

    Returns:
        Loss, sums and maxima. Sums over micro-batches and ranks are those of the batch.

    Raises:
        ShapeError: If the columns are not equally long, flat and float32.
    """
    expected = tokens.target.shape
    wrong = [
        f"{name} {list(column.shape)} {column.dtype}"
        for name, column in tokens._asdict().items()
        if column.shape != expected or column.dim() != 1 or column.dtype != torch.float32
    ]
    if wrong:
        raise ShapeError(
            f"clipped_policy_loss: {', '.join(wrong)}, with a target of {list(expected)}. Every column must be [T] "
            "float32, one number per loss token: select the loss tokens first, and cast."
        )
    tokens = LossTokens(tokens.target, *(column.detach() for column in tokens[1:]))
    if runs_on_triton(tokens.target):
        from penstock.kernels.gpu.policy_loss import fused_clipped_loss

        return fused_clipped_loss(tokens, settings)
    return clipped_loss(tokens, settings)
