"""Attention over sequences that lie one after the other, without a mask: `model.attention=varlen`.

    out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j]    over j of the sequence of i with i − window < j ≤ i

A sink (gpt-oss) is one more score of each head under the softmax, whose value is zero: here one more key, which every
query sees.

Sequences may begin with tokens of the one before, which are there once. Then keys and values are first gathered, once
per layer, so that each sequence has those that it shares before its own, however many branches lead there.

Where ranks have a stretch of the row each (context parallelism), a rank computes its queries and gathers the keys and
values of all, one layer at a time: they are gathered again for the backward pass instead of being kept.

On a GPU in a 16-bit dtype this is one call of `torch.nn.attention.varlen.varlen_attn`, whose kernel (Flash Attention)
shares key/value heads without copies and computes no pair of two sequences. Anywhere else, and with sinks, which that
does not take, it is one call of sdpa per sequence, which computes the same and needs the memory of one at a time.

Shape legend: R rows, L row length, T = R · L tokens, S sequences, U keys of all sequences (T if nothing is shared),
H heads (of queries; keys may have fewer), D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from penstock.dataflow.errors import ConfigError

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class SequenceBoundaries:
    """Where the sequences of a micro-batch begin and end.

    They are made once per micro-batch. No layer reads a tensor back from the device to learn a length.
    """

    lengths: tuple[int, ...]
    """Tokens of each of the S sequences, without those that it shares with the one before it; with padding, which
    belongs to the sequence before it, T in all."""
    shared: tuple[int, ...]
    """Of each sequence the number of first tokens that it shares with the one before it, which may share some of these
    with the one before that; empty if none does."""
    # What is on the device follows from these two; DeepSpeed compares inputs of tensor ranks.
    key_lengths: tuple[int, ...] = field(compare=False)
    """Keys of each sequence: its own tokens behind those that it shares. Of a stretch, those up to the last of its
    queries."""
    cumulative: Tensor = field(compare=False)
    """`[S + 1] int32`, first token of each sequence and T, on the device."""
    keys: Tensor | None = field(compare=False)
    """`[U] int64`, the tokens that sequences attend to, one sequence after the other; None: their own."""
    cumulative_keys: Tensor = field(compare=False)
    """`[S + 1] int32`, the first of each sequence among the keys, and U."""
    group: ProcessGroup | None = field(default=None, compare=False)
    """Ranks that have a stretch of the row each; `keys` are places in the whole row, and all others those of the
    stretch. None: this rank has the whole row."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, shared: Sequence[int] = ()) -> SequenceBoundaries:
        """The boundaries of sequences of these lengths, some of which may begin with tokens of the one before."""
        own = _starts(lengths, device)
        if not any(shared):
            return cls(tuple(lengths), (), tuple(lengths), own, None, own)
        paths = list(_paths(lengths, shared))
        key_lengths = tuple(map(len, paths))
        keys = torch.from_numpy(np.concatenate(paths)).to(device)
        return cls(tuple(lengths), tuple(shared), key_lengths, own, keys, _starts(key_lengths, device))

    def padded(self, num_tokens: int) -> SequenceBoundaries:
        """The same with so many tokens of padding at the end."""
        lengths = (*self.lengths[:-1], self.lengths[-1] + num_tokens)
        return SequenceBoundaries.of(lengths, self.cumulative.device, self.shared)

    def stretch(self, start: int, stop: int, group: ProcessGroup | None) -> SequenceBoundaries:
        """Those of the tokens `start` to `stop` of the row, whose keys are gathered from the ranks of a group."""
        device, begins = self.cumulative.device, 0
        lengths: list[int] = []
        keys: list[NDArray[np.int64]] = []
        for length, path in zip(self.lengths, _paths(self.lengths, self.shared), strict=True):
            ends = begins + length
            num_queries = min(ends, stop) - max(begins, start)
            if num_queries > 0:
                lengths.append(num_queries)
                keys.append(path[: len(path) - max(ends - stop, 0)])
            begins = ends
        key_lengths = tuple(map(len, keys))
        places = torch.from_numpy(np.concatenate(keys)).to(device)
        own, of_keys = _starts(lengths, device), _starts(key_lengths, device)
        return SequenceBoundaries(tuple(lengths), self.shared, key_lengths, own, places, of_keys, group)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _paths(lengths: Sequence[int], shared: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Of each sequence the places of all its tokens in the row, those that it shares first."""
    path, stop = np.zeros(0, np.int64), 0
    for length, common in zip(lengths, shared or (0,) * len(lengths), strict=True):
        path = np.concatenate([path[:common], np.arange(stop, stop + length)])
        yield path
        stop += length


def register_varlen() -> None:
    """Make transformers take `attn_implementation="varlen"`.

    Of a function without one for masks it takes that no mask is needed, and does not look for packed sequences in the
    positions either, which would wait for the device in every forward pass.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("varlen", varlen_attention)


# A graph would be made for these lengths, and another one for the next. Layers are compiled before and after it.
@torch.compiler.disable
def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    boundaries: SequenceBoundaries | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, as transformers calls it.

    Args:
        module: The attention layer; its place in the model decides on a sliding window.
        query: `[R, H, L, D]`.
        key: `[R, H_kv, L, D]`.
        value: `[R, H_kv, L, D]`.
        attention_mask: None.
        boundaries: Of the sequences; given to the body of the model, which passes it on.
        scaling: Of the scores; None: D^−½.
        dropout: 0.
        softcap: None.
        s_aux: The score of each head's sink, under Ulysses also of the heads of other ranks; None: there is none.
        position_bias: None.

    Returns:
        `[R, L, H, D]`, and None in place of attention weights.

    Raises:
        ConfigError: If the model needs more than this attention does, or does not pass the boundaries on.
    """
    if s_aux is not None and len(s_aux) != query.shape[1]:  # Ulysses: each rank of a group has the next heads
        shares = s_aux.unflatten(0, (-1, query.shape[1]))
        s_aux = shares[torch.distributed.get_rank() % len(shares)]
    needs = {
        "an attention mask": attention_mask is not None,
        f"dropout of attention weights ({dropout:g})": dropout > 0,
        "capped attention scores (softcap)": softcap is not None,
        "a bias by position": position_bias is not None,
        f"values of another width ({value.shape[-1]}) than keys ({key.shape[-1]})": value.shape[-1] != key.shape[-1],
    }
    if unmet := [what for what, is_needed in needs.items() if is_needed]:
        raise _refused(module, f"needs {' and '.join(unmet)}, which it does not compute, so logprobs would be wrong")
    if boundaries is None:
        raise _refused(module, "does not tell it where sequences begin, so they would attend to each other")
    num_rows, _, length, _ = query.shape
    # [T, H, D]: contiguous as the projections have left it, so nothing is copied.
    query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    window = layer_window(module.config, module.layer_idx)
    if boundaries.group is None:
        out = _attend(query, key, value, boundaries, scaling, window, s_aux)
    else:
        given = (query, key, value, boundaries, scaling, window, s_aux)
        out = checkpoint(_attend, *given, use_reentrant=False, preserve_rng_state=False)
    return out.unflatten(0, (num_rows, length)), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: SequenceBoundaries,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """`[T, H, D]` of this rank's queries."""
    if boundaries.group is not None:
        key, value = (_Gathered.apply(one, boundaries.group) for one in (key, value))
    if boundaries.keys is not None:
        key, value = (one.index_select(0, boundaries.keys) for one in (key, value))
    has_kernel = query.is_cuda and query.dtype in _KERNEL_DTYPES and sinks is None
    if has_kernel and boundaries.keys is not None:
        has_kernel = _shows_all_keys_to_the_last_query(query.device, query.dtype)
    if has_kernel:
        return _by_kernel(query, key, value, boundaries, scale, window)
    return _by_sequence(query, key, value, boundaries, scale, window, sinks)


class _Gathered(torch.autograd.Function):
    """The stretches of all ranks, one after the other; its gradient is summed over them. Both are collective."""

    @staticmethod
    def forward(ctx: Any, stretch: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        whole = stretch.new_empty(len(stretch) * group.size(), *stretch.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, stretch.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(len(gradient) // ctx.group.size(), *gradient.shape[1:])
        torch.distributed.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


def layer_window(hf_config: Any, layer: int) -> int | None:
    """Tokens that a token of this layer attends to, itself included; None: all before it.

    It is read from the configuration, because not every model passes it to its attention function (Qwen2-MoE).
    """
    kinds = getattr(hf_config, "layer_types", None)
    window: int | None = getattr(hf_config, "sliding_window", None)
    return None if kinds and kinds[layer] == "full_attention" else window


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, boundaries: SequenceBoundaries, scale: float | None, window: int | None
) -> Tensor:
    """`[T, H, D]`, one kernel for all sequences, whose last query is at its last key."""
    shares_heads: dict[str, Any] = {}
    if _must_be_told_of_shared_heads(varlen_attn):
        shares_heads["enable_gqa"] = query.shape[1] != key.shape[1]
    out = varlen_attn(
        query,
        key,
        value,
        boundaries.cumulative,
        boundaries.cumulative_keys,
        max(boundaries.lengths),
        max(boundaries.key_lengths),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # to the left without the token itself, to the right
        **shares_heads,
    )
    assert isinstance(out, Tensor)  # a pair only if it is asked for
    return out


@cache
def _shows_all_keys_to_the_last_query(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel aligns fewer queries than keys at their ends, asked once with values 0 and 1."""
    with torch.no_grad():
        query, key = (torch.zeros(length, 1, 64, device=device, dtype=dtype) for length in (1, 2))
        value = key + torch.arange(2, device=device, dtype=dtype)[:, None, None]
        first, both = (torch.tensor([0, length], device=device, dtype=torch.int32) for length in (1, 2))
        out = varlen_attn(query, key, value, first, both, 1, 2, scale=1.0, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return bool((out - 0.5).abs().max() < 0.01)  # the mean of both


@cache
def _must_be_told_of_shared_heads(kernel: Callable[..., Any]) -> bool:
    """Whether torch's function takes `enable_gqa`. That of torch 2.11 does not, and shares heads without it."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: SequenceBoundaries,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """`[T, H, D]`, one call of sdpa per sequence."""
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if sinks is not None:  # a query holds its sink's score in one more element, and the sink's key is 1 there
        query = torch.cat([query, (sinks.to(query.dtype) / scale)[None, :, None].expand(len(query), -1, 1)], dim=-1)
        key, value = F.pad(key, (0, 1)), F.pad(value, (0, 1))
    pieces = []
    keys_and_values = (one.split(boundaries.key_lengths) for one in (key, value))
    for q, k, v in zip(query.split(boundaries.lengths), *keys_and_values, strict=True):
        first = len(k) - len(q)  # place of the first query among the keys
        band = None
        if first or sinks is not None or (window is not None and len(k) > window):
            band = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(first)
            band = band if window is None else band.triu(first + 1 - window)
        if sinks is not None:
            assert band is not None
            of_sink = k.new_zeros(1, k.shape[1], width + 1)
            of_sink[..., width] = 1
            k, v = torch.cat([k, of_sink]), F.pad(v, (0, 0, 0, 0, 0, 1))
            band = F.pad(band, (0, 1), value=True)
        piece = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=band,
            is_causal=band is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        pieces.append(piece[0].transpose(0, 1)[..., :width])
    return torch.cat(pieces)


def _refused(module: Any, why: str) -> ConfigError:
    return ConfigError(
        [f"model.attention=varlen: {type(module).__name__} {why}. Use model.attention=sdpa or another model."]
    )
