"""Reverse scans over packed sequences, and generalised advantage estimation by two of them.

    scan:  y_t = x_t + d_t · y_{t+1}
    GAE:   δ_k = r_k + γ V_{k+1} − V_k;   A_k = δ_k + γ λ A_{k+1};   returns_k = A_k + V_k

k counts the **sampled** tokens of a sequence; V behind the last is 0. Observation tokens are skipped: they are no step
of time, neither discounted nor trained. As scans: the value of the next sampled token is carried to the left over
observations (d = 1 there, 0 at sampled tokens), and so is A (d = 1 there, γλ at sampled tokens).

None of it is differentiable: advantages carry no gradient. Source: arXiv 1506.02438.

Shape legend: T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.segment_scan import scan_by_doubling


class Advantages(NamedTuple):
    """Of packed tokens.

    Attributes:
        advantages: `[T] float32`; 0 at observation tokens.
        returns: `[T] float32`, advantage plus value: what the critic is trained towards; 0 at observation tokens.
    """

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def reverse_scan(values: Tensor, decay: Tensor, bounds: Tensor) -> Tensor:
    """Compute `y_t = values_t + decay_t · y_{t+1}` from the end of each sequence to its start.

    Args:
        values: `[T] float32`; on a CPU float64 as well.
        decay: `[T]` of the same; that of a sequence's last token is not read.
        bounds: `[S + 1] int64`: 0, where each sequence ends, T. Empty sequences are allowed.

    Returns:
        `[T]`.

    Raises:
        ShapeError: If `bounds` are not those of the tokens.
    """
    if values.shape != decay.shape or values.dim() != 1 or len(bounds) == 0:
        raise ShapeError(
            f"reverse_scan: values are {list(values.shape)}, decay {list(decay.shape)}, bounds {list(bounds.shape)}. "
            "They must be [T], [T] and [S + 1]: flatten the packed tokens first."
        )
    if runs_on_triton(values):
        from penstock.kernels.gpu.segment_scan import scan_by_sequence

        return scan_by_sequence(values.contiguous(), decay.contiguous(), bounds)
    if int(bounds[0]) != 0 or int(bounds[-1]) != len(values) or bool((bounds.diff() < 0).any()):
        raise ShapeError(
            f"reverse_scan: bounds run from {int(bounds[0])} to {int(bounds[-1])} over {len(values)} tokens. Tokens "
            "outside of every sequence would get no result: bounds must ascend from 0 to the number of tokens."
        )
    return scan_by_doubling(values, decay, bounds)


@torch.no_grad()
def generalised_advantages(
    rewards: Tensor, values: Tensor, is_sampled: Tensor, bounds: Tensor, *, discount: float, trace_decay: float
) -> Advantages:
    """Estimate the advantage of every sampled token.

    Args:
        rewards: `[T] float32`, per token; read at sampled tokens only.
        values: `[T] float32`, the critic's; read at sampled tokens only.
        is_sampled: `[T] bool`; False at prompt and observation tokens.
        bounds: `[S + 1] int64`: 0, where each sequence ends, T.
        discount: γ, in [0, 1].
        trace_decay: λ, in [0, 1].
    """
    zero = torch.zeros_like(values)
    here = torch.where(is_sampled, values, zero)
    passes = (~is_sampled).to(values.dtype)
    is_last = torch.zeros_like(is_sampled)
    is_last[bounds[1:][bounds.diff() > 0] - 1] = True
    # Shifted by one, so that the scan gives the first sampled value behind t, not at t.
    behind = torch.cat([here[1:], zero[:1]]).masked_fill(is_last, 0.0)
    next_values = reverse_scan(behind, torch.cat([passes[1:], zero[:1]]), bounds)
    errors = torch.where(is_sampled, rewards + discount * next_values - values, zero)
    decay = torch.where(is_sampled, torch.full_like(values, discount * trace_decay), torch.ones_like(values))
    advantages = torch.where(is_sampled, reverse_scan(errors, decay, bounds), zero)
    return Advantages(advantages, advantages + here)
