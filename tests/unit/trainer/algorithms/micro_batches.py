"""Small micro-batches of every shape that hurts, for the oracle and for the code under test alike."""

from __future__ import annotations

import numpy as np
import torch

from penstock.trainer.algorithms.tokens import LossTokens

from .oracle import Data, Real

LENGTHS = {
    "ragged": [5, 1, 0, 7, 3],  # with a single token and an empty response
    "one_token": [1],
    "empty": [0, 0],
    "even": [4, 4, 4],
}


def data(lengths: list[int], seed: int, *, spread: float = 0.4, advantages: str = "mixed") -> Data:
    """Log-probabilities around a common mean; `spread` is how far the policies are apart, nat.

    advantages: `mixed` over tokens, `sequence` (one number each, the second 0, as of a group of equal rewards), `zero`.
    """
    rng = np.random.default_rng(seed)
    segments = np.repeat(np.arange(len(lengths)), lengths)
    base = -rng.exponential(1.2, len(segments)) - 0.05
    c, p, b, r = (base + rng.normal(0, spread, len(segments)) for _ in range(4))
    a = {
        "mixed": rng.normal(0, 1, len(segments)),
        "sequence": (rng.normal(0, 1, len(lengths)) * (np.arange(len(lengths)) != 1))[segments],
        "zero": np.zeros(len(segments)),
    }[advantages]
    pairs = [(0, 3), (1, 4), (0, 4)] if len(lengths) == 5 else [(0, 2), (1, 2)] if len(lengths) == 3 else []
    extra = {
        "teacher": base + rng.normal(0, 0.5, len(segments)),
        "old_values": c + rng.normal(0, 0.3, len(segments)),
        "returns": c + rng.normal(0, 0.5, len(segments)),
    }
    return Data(
        *(one.astype(Real) for one in (c, p, b, r, a)),
        segments,
        len(lengths),
        pairs,
        {name: one.astype(Real) for name, one in extra.items()},
        {name: rng.random(len(segments)) < 0.3 for name in ("clip_cov", "kl_cov", "m2po")},
    )


def far_apart(seed: int = 0) -> Data:
    """As ragged, with log-ratios beyond ±20 in both directions, and a sequence sum far beyond."""
    one = data(LENGTHS["ragged"], seed, spread=0.5)
    for index, shift in ((0, 25.0), (3, -30.0), (8, 22.0), (9, 21.0)):
        one.p[index] = one.c[index] - Real(shift)
        one.b[index] = one.c[index] + Real(shift)
    return one


def tokens_of(d: Data, dtype: torch.dtype = torch.float64) -> LossTokens:
    """The same numbers as tensors; `target` (and `values`) want a gradient."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array.astype(np.float64), dtype=dtype)

    target = tensor(d.c).requires_grad_()
    return LossTokens(
        target=target,
        proximal=tensor(d.p),
        behavior=tensor(d.b),
        reference=tensor(d.r),
        advantages=tensor(d.advantage),
        segments=torch.tensor(d.segments, dtype=torch.int64),
        num_segments=d.num_segments,
        pairs=torch.tensor(d.pairs, dtype=torch.int64).reshape(-1, 2),
        teacher=tensor(d.extra["teacher"]),
        values=target,
        old_values=tensor(d.extra["old_values"]),
        returns=tensor(d.extra["returns"]),
        selected={name: torch.tensor(mask) for name, mask in d.selected.items()},
    )
