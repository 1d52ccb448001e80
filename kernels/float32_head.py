"""An output projection that computes logits in float32 for models of any precision.

It is used by samplers, because the trainer's `linear_logprob` never rounds a logit. In bfloat16, logits near 20 are 1/8
apart, so rounding alone makes an engine disagree with its trainer. Products of bfloat16 numbers are exact in float32,
so both sides agree if they accumulate in float32. Source: MiniMax-M1, arXiv 2506.13585.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Float32Head(nn.Linear):
    """`[…, H]` hidden states of any precision -> `[…, V] float32` logits; the weight keeps its precision."""

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        # Autocast would round both sides back to the model's precision.
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), bias)


def use_float32_head(causal_lm: Any) -> None:
    """Make the head of a `...ForCausalLM` compute in float32. Its weight remains the same object, tied or not."""
    head = causal_lm.get_output_embeddings()
    assert type(head) is nn.Linear, f"{type(head).__name__} is not a plain Linear"
    head.__class__ = Float32Head
