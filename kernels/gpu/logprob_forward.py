"""Triton kernel that fuses matrix product and online softmax: row statistics of `hidden weightᵀ` without storing
logits.

Each program processes one slice of the vocabulary for one block of tokens and keeps m, s and u of its rows in registers
(`portable.logprob`). Concurrent programs cover GROUP blocks of tokens times all slices: at T=16k and H=4k in bf16 they
share 16 MiB of hidden states, which stay in the L2 cache, while the weight is streamed through it once per group.
docs/adr/0009-kernels.md explains why this kernel is used instead of cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.kernels.portable.logprob import LOWEST, Statistics, merge_statistics


def _config(tokens: int, words: int, hidden: int, warps: int, stages: int) -> triton.Config:
    blocks = {"BLOCK_T": tokens, "BLOCK_V": words, "BLOCK_H": hidden, "GROUP": 16}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


CONFIGS = [
    _config(128, 256, 64, warps=8, stages=3),
    _config(128, 128, 64, warps=8, stages=4),
    _config(128, 128, 64, warps=4, stages=3),
    _config(64, 256, 64, warps=4, stages=3),
]
FLOAT32_CONFIGS = [_config(64, 64, 32, warps=4, stages=3)]
INTERPRETED_CONFIGS = [_config(16, 32, 16, warps=1, stages=1)]
MIN_SPLIT_WORDS = 4096
"""Minimum vocabulary entries per split: below it, partial statistics and short pipelines cost more than idle SMs."""
NUM_SPLITS = 8
"""Slices of the vocabulary: times 16 blocks of tokens they fill the 132 multiprocessors of an H100."""


def _configs_of(configs: list[triton.Config], named_args: dict[str, Any], **_: Any) -> list[triton.Config]:
    """Select the configs of the operands' width: float32 is twice as wide, so tiles for bf16 would not fit."""
    is_wide = named_args["hidden"].element_size() == 4
    return [config for config in configs if (config.kwargs["BLOCK_H"] == 32) == is_wide]


@triton.autotune(
    configs=INTERPRETED_CONFIGS if is_interpreted() else [*CONFIGS, *FLOAT32_CONFIGS],
    key=["hidden_size", "vocab_size"],
    prune_configs_by=None if is_interpreted() else {"early_config_prune": _configs_of},
)
@triton.jit
def statistics_kernel(
    hidden,
    weight,
    targets,
    maxima,
    totals,
    weighted_sums,
    target_logits,
    num_tokens,
    vocab_size,
    hidden_size,
    num_splits,
    split_size,
    scale,
    lowest,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: BLOCK_T tokens, words split · split_size … ; results are `[num_splits, num_tokens]`.

    Operands come through tensor descriptors: the bulk copy engine on Hopper, which pads with zeros and leaves the
    registers to the accumulators (with pointers the largest tile spills 1 KiB per thread, with descriptors 8 bytes).
    """
    num_row_blocks = tl.cdiv(num_tokens, BLOCK_T)
    group_size = GROUP * num_splits
    first_row_block = tl.program_id(0) // group_size * GROUP
    group_rows = tl.minimum(num_row_blocks - first_row_block, GROUP)
    in_group = tl.program_id(0) % group_size
    token_start = (first_row_block + in_group % group_rows) * BLOCK_T
    split = in_group // group_rows

    lefts = tl.make_tensor_descriptor(hidden, [num_tokens, hidden_size], [hidden_size, 1], [BLOCK_T, BLOCK_H])
    weight_tiles = tl.make_tensor_descriptor(weight, [vocab_size, hidden_size], [hidden_size, 1], [BLOCK_V, BLOCK_H])
    token = token_start + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    target = tl.load(targets + token, mask=is_token, other=-1).to(tl.int32)
    maximum = tl.full((BLOCK_T,), lowest, tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    weighted = tl.zeros((BLOCK_T,), tl.float32)
    target_logit = tl.zeros((BLOCK_T,), tl.float32)
    vocab_stop = tl.minimum((split + 1) * split_size, vocab_size)

    for vocab_start in range(split * split_size, vocab_stop, BLOCK_V):
        logits = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for first_channel in range(0, hidden_size, BLOCK_H):
            left = lefts.load([token_start, first_channel])
            right = weight_tiles.load([vocab_start, first_channel])
            logits = tl.dot(left, right.T, logits, input_precision=PRECISION)
        word = vocab_start + tl.arange(0, BLOCK_V)
        in_vocab = (word < vocab_stop)[None, :]
        logits = tl.where(in_vocab, logits * scale, lowest)
        target_logit += tl.sum(tl.where(in_vocab & (word[None, :] == target[:, None]), logits, 0.0), 1)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shift = maximum - new_maximum
        factor = tl.exp(shift)
        distance = logits - new_maximum[:, None]
        # For `lowest` the exponential is 0, and 0 · lowest is 0.
        exponentials = tl.exp(distance)
        weighted = (weighted + total * shift) * factor + tl.sum(exponentials * distance, 1)
        total = total * factor + tl.sum(exponentials, 1)
        maximum = new_maximum

    offset = split.to(tl.int64) * num_tokens + token
    tl.store(maxima + offset, maximum, mask=is_token)
    tl.store(totals + offset, total, mask=is_token)
    tl.store(weighted_sums + offset, weighted, mask=is_token)
    tl.store(target_logits + offset, target_logit, mask=is_token)


def fused_statistics(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Statistics:
    """Reduce `scale · hidden weightᵀ` to its row statistics.

    Args:
        hidden: `[T, H]` bfloat16, float16 or float32 (then as `torch.get_float32_matmul_precision` says), contiguous.
        weight: `[V, H]` of the same dtype, contiguous.
        targets: `[T] int64` row of `weight`; outside of 0 … V − 1 where another rank has it.
        scale: Multiplies the logits.

    Returns:
        `[T] float32` statistics.
    """
    num_tokens, hidden_size = hidden.shape
    vocab_size = len(weight)
    # The size of a split is a multiple of 256, so that only the last tile of the last split is partial.
    least, multiple = (64, 64) if is_interpreted() else (MIN_SPLIT_WORDS, 256)
    split_size = triton.cdiv(max(least, triton.cdiv(vocab_size, NUM_SPLITS)), multiple) * multiple
    num_splits = triton.cdiv(vocab_size, split_size)
    parts = Statistics(*(hidden.new_empty((num_splits, num_tokens), dtype=torch.float32) for _ in range(4)))

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(num_tokens, meta["BLOCK_T"]) * num_splits,)

    if num_tokens:
        triton.set_allocator(_descriptor_memory)
        statistics_kernel[grid](
            hidden,
            weight,
            targets,
            *parts,
            num_tokens,
            vocab_size,
            hidden_size,
            num_splits,
            split_size,
            scale,
            LOWEST,
            PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        )
    return merge_statistics(parts)


def can_fuse(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `fused_statistics` supports the operands: descriptors need contiguous rows, aligned to 16 bytes."""
    return (
        hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and hidden.is_contiguous()
        and weight.is_contiguous()
        and hidden.shape[1] * hidden.element_size() % 16 == 0
        and hidden.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocator for the tensor descriptors of one launch: 128 bytes each; torch aligns allocations to 512 bytes."""
    del alignment, stream
    return torch.empty(size, dtype=torch.int8, device="cuda")
