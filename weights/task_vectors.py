"""One tensor of a merged policy from the same tensor of several experts that were trained from the same base.

B = θ_base, and τ_i = θ_i − B is the task vector of expert i with the coefficient w_i. All tensors have one shape. What
is computed has the dtype of the base, float32 or float64; the experts' may be narrower. No argument is changed, and
what is held at a time does not grow with the number of experts. `density` in (0, 1] is the share of the elements of a
task vector that is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch

Method = Literal["linear", "ties", "dare"]


def linear(base: torch.Tensor, experts: Sequence[torch.Tensor], coefficients: Sequence[float]) -> torch.Tensor:
    """Add the task vectors: θ = B + Σ w_i·τ_i, computed as (1 − Σ w_i)·B + Σ w_i·θ_i, and terms of weight 0 left out.

    In that form one expert with coefficient 1 is θ = θ_i to the last bit. B + (θ_i − B) is not: the difference is
    rounded, and so is the sum. Coefficients that add up to 1 give the mean of the weights, without the base.

    Source: task arithmetic, Ilharco et al. 2023, arXiv:2212.04089.
    """
    terms = [(1.0 - math.fsum(coefficients), base), *zip(coefficients, experts, strict=True)]
    (weight, first), *others = [term for term in terms if term[0] != 0]
    total = first.to(base.dtype) * weight
    for weight, tensor in others:
        total.add_(tensor, alpha=weight)
    return total


def ties(
    base: torch.Tensor, experts: Sequence[torch.Tensor], coefficients: Sequence[float], density: float
) -> torch.Tensor:
    """Add what the task vectors agree on (trim, elect sign, merge).

        v_i = w_i·trim(τ_i, density)      s = sign(Σ v_i)      A = {i: sign(v_i) = s, s ≠ 0}
        θ   = B + Σ_{i in A} v_i / |A|    per element; θ = B where A is empty

    With equal coefficients λ this is the paper's B + λ·τ_merged. As in PEFT and mergekit, the coefficients weight the
    election, too, and the tensor is trimmed by itself, not the whole task vector at once.

    Source: Yadav et al. 2023, arXiv:2306.01708.
    """
    least = [threshold(expert - base, density) for expert in experts]

    def vectors() -> Iterator[torch.Tensor]:
        for expert, weight, smallest in zip(experts, coefficients, least, strict=True):
            vector = expert - base
            yield vector.masked_fill_(vector.abs() < smallest, 0.0).mul_(weight)

    mass, total, count = torch.zeros_like(base), torch.zeros_like(base), torch.zeros_like(base)
    for vector in vectors():
        mass += vector
    elected = mass.sign_()
    for vector in vectors():
        agrees = vector * elected > 0
        total += vector.masked_fill_(~agrees, 0.0)
        count += agrees
    return base + total / count.clamp_(min=1)


def threshold(vector: torch.Tensor, density: float) -> float:
    """The smallest magnitude that is kept, if the round(density·n) largest ones are, at least one.

    All elements of this magnitude are kept, so the result does not depend on their order.
    """
    num_kept = min(max(1, round(density * vector.numel())), vector.numel())
    if num_kept == vector.numel():
        return 0.0
    # Unlike torch.topk and kthvalue, it makes no index of 8 bytes per element.
    return float(np.partition(vector.abs().flatten().numpy(), -num_kept)[-num_kept])


def dare(
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    coefficients: Sequence[float],
    density: float,
    *,
    name: str,
    seed: int,
) -> torch.Tensor:
    """Drop elements of each task vector at random, rescale the others, and add them (drop and rescale).

        θ = B + Σ w_i·m_i·τ_i / density      m_i ~ Bernoulli(density) per element, so that E[θ] = B + Σ w_i·τ_i

    The draw of m_i is seeded by `seed`, the name of the tensor and the values of θ_i. So it depends neither on the
    order of tensors, shards or experts nor on where they are, and the experts' draws are independent. `density` is the
    paper's 1 − p.

    Source: Yu et al. 2024, arXiv:2311.03099.
    """
    total = base.clone()
    for expert, weight in zip(experts, coefficients, strict=True):
        digest = hashlib.blake2b(f"{seed}/{name}/".encode(), digest_size=16)
        digest.update(expert.to(base.dtype).flatten().numpy().data)
        drawn = np.random.default_rng(int.from_bytes(digest.digest(), "little")).random(expert.numel(), np.float32)
        is_kept = torch.from_numpy(drawn < density).view(expert.shape)
        total.add_(torch.where(is_kept, expert - base, 0.0), alpha=weight / density)
    return total
