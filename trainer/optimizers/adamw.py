"""AdamW: torch's own, or the same with moments that are bfloat16 between steps.

    m = β1·m̃ + (1 − β1)·g           v = β2·ṽ + (1 − β2)·g²            m̃, ṽ as kept; m, v float32
    θ ← (1 − η·λ)·θ − η·m / (1 − β1^t) / (√(v / (1 − β2^t)) + ε)       from m and v before they are rounded
    m̃ ← round(m)                    ṽ ← round(v)

A bfloat16 has 8 significant bits: neighbours are 1/256 to 1/128 of their value apart. With β2 = 0.999 a step changes v
by a thousandth, so rounded to nearest it would never fall. `round` is stochastic: it goes up with the probability that
makes its mean the value itself, and ṽ stays an unbiased mean of g². Its noise is of the order of that of a mean of a
thousand g².

The random bits follow from the step and the number of the tensor alone. Invariant: ranks with equal tensors round them
alike, and a trainer that was restored rounds as the one that was saved.

Sources: AdamW, arXiv 1711.05101; stochastic rounding, arXiv 1502.02551.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.config import MOMENTS_PIECE_ELEMENTS, OptimizerConfig
from penstock.weights.dtypes import TORCH_DTYPES

Named = Sequence[tuple[str, torch.nn.Parameter]]
"""Name in the wrapped model, and parameter."""


class AdamW(torch.optim.AdamW):
    """Over these parameters, with one learning rate.

    Attributes:
        states: Name of each parameter -> names of its states.
    """

    def __init__(self, parameters: Named, config: OptimizerConfig) -> None:
        super().__init__(
            [one for _, one in parameters],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        kept = config.states(is_matrix=False)
        self.states: Mapping[str, Sequence[str]] = {name: tuple(kept) for name, _ in parameters}
        self._dtypes = {name: TORCH_DTYPES[dtype] for name, dtype in kept.items()}
        self._rounds = config.moments_dtype == "bfloat16"

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The live state of a tensor that it updates, with `step`; zeros are created before its first update."""
        state: dict[str, Tensor] = self.state[tensor]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {name: torch.zeros_like(tensor.detach(), dtype=dtype) for name, dtype in self._dtypes.items()}
        return state

    def step(self, closure: Any = None) -> Any:
        """One update of all tensors that have a gradient."""
        if not self._rounds:
            return super().step(closure)
        assert closure is None, "nothing here computes the loss again"
        with torch.no_grad():
            index = 0
            for group in self.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        self._update(tensor, tensor.grad, group, index)
                    index += 1
        return None

    def _update(self, tensor: Tensor, gradient: Tensor, group: Mapping[str, Any], index: int) -> None:
        state, (beta1, beta2) = self.state_of(tensor), group["betas"]
        state["step"] += 1
        step = int(state["step"])
        rate, root = group["lr"] / (1 - beta1**step), (1 - beta2**step) ** 0.5
        random = torch.Generator(tensor.device).manual_seed(step + (index << 24))
        live = [one.detach().view(-1) for one in (tensor, state["exp_avg"], state["exp_avg_sq"])]
        flat = live[0], gradient.reshape(-1), *live[1:]
        for weight, g, kept_m, kept_v in zip(*(one.split(MOMENTS_PIECE_ELEMENTS) for one in flat), strict=True):
            m = kept_m.float().lerp_(g, 1 - beta1)
            v = kept_v.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(m, v.sqrt().div_(root).add_(group["eps"]), value=-rate)
            bits = torch.randint(-(1 << 31), 1 << 31, m.shape, dtype=torch.int32, device=m.device, generator=random)
            kept_m.copy_(rounded_up_or_down(m, bits & 0xFFFF))
            kept_v.copy_(rounded_up_or_down(v, (bits >> 16) & 0xFFFF))


def rounded_up_or_down(values: Tensor, random: Tensor) -> Tensor:
    """Round float32 to one of the two bfloat16 that enclose a value, in place, so that the mean is the value.

    A bfloat16 is the upper half of a float32. A carry from the lower half has the probability of its share.

    Args:
        values: `[n] float32`, finite.
        random: `[n] int32`, uniform in [0, 2^16).

    Returns:
        `[n] float32` whose lower halves are 0.
    """
    return values.view(torch.int32).add_(random).bitwise_and_(-(1 << 16)).view(torch.float32)
