"""Attention without masks on a GPU: torch's kernel gives what sdpa of one sequence after the other gives on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.trainer.models.varlen_attention import SequenceBoundaries, varlen_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = (300, 1, 129, 700, 2)
SHARED = (0, 250, 251, 0, 500)
"""First tokens that a sequence shares with the one before it, the third one with the first two."""


@pytest.mark.parametrize("shared", [(), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 128], ids=["full", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("num_kv_heads", "width"), [(2, 64), (8, 128)])
def test_output_and_gradients_are_those_of_the_cpu(
    num_kv_heads: int, width: int, dtype: torch.dtype, window: int | None, shared: tuple[int, ...]
) -> None:
    kinds = ["sliding_attention" if window else "full_attention"]
    layer = SimpleNamespace(config=SimpleNamespace(layer_types=kinds, sliding_window=window), layer_idx=0)
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, sum(LENGTHS), width) for heads in (8, num_kv_heads, num_kv_heads)]
    rounded = [torch.randn(size, generator=generator).to(dtype).float() for size in sizes]
    upstream = torch.randn((1, sum(LENGTHS), 8, width), generator=generator).to(dtype).float()
    results = {}
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        tensors = [one.to(device, kind).requires_grad_() for one in rounded]
        boundaries = SequenceBoundaries.of(LENGTHS, torch.device(device), shared)
        out, _ = varlen_attention(layer, *tensors, None, boundaries=boundaries, scaling=0.1)
        gradients = torch.autograd.grad(out, tensors, upstream.to(device, kind))
        results[device] = [one.detach().float().cpu() for one in (out, *gradients)]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for name, mine, theirs in zip(("out", "query", "key", "value"), results["cuda"], results["cpu"], strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm(), name
