"""Attention without masks: packed rows, shares of sequence parallelism, calls of the kernel, and what is refused.

torch's kernel needs a GPU. Here it is stood in for by plain arithmetic on CPU, registered under torch's own operators,
so that our call goes through torch's function, its checks and its backward formula.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.dataflow.errors import ConfigError
from penstock.trainer.batches.collate import collate, sequence_share
from penstock.trainer.batches.packing import EMPTY_MICRO_BATCH, MicroBatchPlan, TrainingSequence
from penstock.trainer.models import varlen_attention
from penstock.trainer.models.policy_model import PolicyModel, load_policy
from penstock.trainer.models.varlen_attention import SequenceBoundaries, register_varlen

from .torch_trainer import MODEL, VOCAB

CPU = torch.device("cpu")
LENGTHS = (7, 1, 12, 3)
SHARED = {"alone": (), "shared": (0, 5, 0, 10), "tree": (0, 5, 6, 10)}
"""First tokens that a sequence shares with the one before it; of a tree, the third one with the first two."""
LAYERS = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=4)
"""A model with a window of 4 tokens in layer 1."""


def layer(index: int) -> SimpleNamespace:
    return SimpleNamespace(config=LAYERS, layer_idx=index)


def inputs(num_heads: int = 4, num_kv_heads: int = 2, **options: object) -> list[Tensor]:
    """`[1, H, T, D]` queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, sum(LENGTHS), 8) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(size, generator=generator).to(**options).requires_grad_() for size in sizes]


def by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    shared: tuple[int, ...],
    sinks: Tensor | None = None,
) -> Tensor:
    """`[1, T, H, D]`: every score, in float64, and a mask that leaves those within a sequence and the window."""
    allowed = torch.zeros(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    start, path = 0, []
    for length, common in zip(LENGTHS, shared or [0] * len(LENGTHS), strict=True):
        path = [*path[:common], *range(start, start + length)]
        for place in range(common, common + length):
            allowed[path[place], path[max(0, place + 1 - (window or len(path))) : place + 1]] = True
        start += length
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scores = (query.double() @ key.double().mT * scale).masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, -1, sum(LENGTHS), 1)], dim=-1)
    return (scores.softmax(-1)[..., : sum(LENGTHS)] @ value.double()).transpose(1, 2)


def by_kernel(*given: object) -> Tensor:
    """In place of one call per sequence, without its sinks."""
    return varlen_attention._by_kernel(*given[:-1])


def check_against_mask(
    tensors: list[Tensor], index: int, shared: tuple[int, ...] = (), sinks: Tensor | None = None
) -> None:
    """Output and gradients of layer `index` are those of a mask."""
    given = {"boundaries": SequenceBoundaries.of(LENGTHS, CPU, shared), "scaling": 0.3, "s_aux": sinks}
    out, weights = varlen_attention.varlen_attention(layer(index), *tensors, None, **given)
    expected = by_mask(*tensors, 0.3, (None, 4)[index], shared, sinks)
    assert weights is None
    tensors = tensors if sinks is None else [*tensors, sinks]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, tensors, upstream)
    for mine, theirs in zip(found, torch.autograd.grad(expected, tensors, upstream.double()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("index", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("shared", SHARED)
def test_one_call_per_sequence_is_what_a_mask_gives(shared: str, index: int, num_kv_heads: int) -> None:
    check_against_mask(inputs(num_kv_heads=num_kv_heads), index, SHARED[shared])


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("index", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("shared", SHARED)
def test_a_sink_is_one_more_score_of_its_head(shared: str, index: int, num_kv_heads: int) -> None:
    sinks = torch.tensor([-3.0, 0.0, 0.5, 4.0], requires_grad=True)
    check_against_mask(inputs(num_kv_heads=num_kv_heads), index, SHARED[shared], sinks)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_ulysses_takes_the_sinks_of_its_heads(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    sinks, given = torch.arange(8.0), {"boundaries": SequenceBoundaries.of(LENGTHS, CPU)}
    own = sinks[4:] if rank % 2 else sinks[:4]
    found, expected = (
        varlen_attention.varlen_attention(layer(0), *inputs(), None, **given, s_aux=one)[0] for one in (sinks, own)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("index", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("shared", SHARED)
def test_stretches_that_see_the_keys_of_the_row_are_together_the_row(shared: str, index: int, size: int) -> None:
    tensors, num_tokens = inputs(), sum(LENGTHS)
    row = SequenceBoundaries.of(LENGTHS, CPU, SHARED[shared])
    expected, _ = varlen_attention.varlen_attention(layer(index), *tensors, None, boundaries=row, scaling=0.3)
    query, key, value = tensors
    length = -(-num_tokens // size)
    parts = []
    for start in range(0, num_tokens, length):
        stop = min(start + length, num_tokens)
        stretch = row.stretch(start, stop, None)
        given = (query[:, :, start:stop], key, value)
        parts.append(varlen_attention.varlen_attention(layer(index), *given, None, boundaries=stretch, scaling=0.3)[0])
    found = torch.cat(parts, dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(out, tensors, upstream) for out in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@contextmanager
def arithmetic_kernel() -> Iterator[list[tuple[int, int]]]:
    """Flash Attention's contract by plain arithmetic; yields the longest query and key of every call.

    The last query of a sequence is at its last key. A query at key i attends to keys from i − left to i + right, both
    included; −1: no limit. `is_causal` sets right to 0.
    """
    calls: list[tuple[int, int]] = []

    def sequences(query, key, value, ends_q, ends_k, is_causal, scale, window):
        """Per sequence the slices of its n queries and m keys, `[H, n, D]` queries, `[H, m, D]` keys and values of as
        many heads, and weights `[H, n, m]`."""
        left, right = window or (-1, -1)
        right = 0 if is_causal else right
        places = [(slice(*own), slice(*keys)) for own, keys in zip(*map(pairwise, (ends_q, ends_k)), strict=True)]
        for own, attended in places:
            q, k, v = query[own].transpose(0, 1), key[attended].transpose(0, 1), value[attended].transpose(0, 1)
            k, v = (one.repeat_interleave(len(q) // len(one), dim=0) for one in (k, v))
            n, m = q.shape[1], k.shape[1]
            offset = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
            allowed = ((left < 0) | (offset >= -left)) & ((right < 0) | (offset <= right))
            yield own, attended, q, k, v, (q @ k.mT * scale).masked_fill(~allowed, -torch.inf).softmax(-1)

    def forward(q, k, v, ends_q, ends_k, max_q, max_k, is_causal, scale, window, enable_gqa=False):
        assert ends_q.dtype == ends_k.dtype == torch.int32
        assert enable_gqa or q.shape[1:] == k.shape[1:]
        calls.append((max_q, max_k))
        out = torch.empty_like(q)
        for own, _, _, _, values, weights in sequences(q, k, v, ends_q, ends_k, is_causal, scale, window):
            out[own] = (weights @ values).transpose(0, 1)
        return out, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, is_causal, rng, scale=None, window=None):
        d_q, d_k, d_v = (torch.empty_like(one) for one in (q, k, v))
        found = sequences(q, k, v, ends_q, ends_k, is_causal, scale, window)
        for own, attended, queries, keys, values, weights in found:
            d_out = grad[own].transpose(0, 1)
            d_weights = d_out @ values.mT
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale
            d_q[own] = (d_scores @ keys).transpose(0, 1)
            for given, of_heads in ((d_k, d_scores.mT @ queries), (d_v, weights.mT @ d_out)):
                given[attended] = of_heads.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
        return d_q, d_k, d_v

    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield calls


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("index", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize(("shared", "longest"), [("alone", (12, 12)), ("shared", (12, 13)), ("tree", (12, 18))])
def test_the_kernel_is_told_what_a_mask_gives(
    shared: str, longest: tuple[int, int], index: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_attention, "_by_sequence", by_kernel)
    with arithmetic_kernel() as calls:
        check_against_mask(inputs(num_kv_heads=num_kv_heads), index, SHARED[shared])
    assert calls == [longest]


def test_a_kernel_is_asked_whether_it_aligns_queries_and_keys_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = varlen_attention._shows_all_keys_to_the_last_query
    with arithmetic_kernel():
        assert ask(CPU, torch.float32)

    def aligned_at_the_begin(query, key, value, *_, **__):
        return value[: len(query)].clone()

    ask.cache_clear()
    monkeypatch.setattr(varlen_attention, "varlen_attn", aligned_at_the_begin)
    assert not ask(CPU, torch.float32)
    ask.cache_clear()


def test_the_kernel_of_torch_2_11_is_not_told_of_shared_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no `enable_gqa`, and shares key/value heads without it."""

    def kernel_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        places = cu_seq_q, cu_seq_k, max_q, max_k
        return varlen.varlen_attn(
            query, key, value, *places, scale=scale, window_size=window_size, enable_gqa=True
        )  # fmt: skip

    monkeypatch.setattr(varlen_attention, "_by_sequence", by_kernel)
    monkeypatch.setattr(varlen_attention, "varlen_attn", kernel_of_2_11)
    with arithmetic_kernel():
        check_against_mask(inputs(num_kv_heads=2), 1)


class Recorder(TorchDispatchMode):
    """Names and positional arguments of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, (1, 0)), (torch.float16, (1, 0)), (torch.float32, (0, 1))],
    ids=["bfloat16", "float16", "float32"],
)
def test_a_gpu_uses_the_kernel_in_16_bits_only(
    dtype: torch.dtype, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors on a GPU that is not there: devices, dtypes and shapes are followed; reading a value would raise."""
    by_sequence: list[Tensor] = []  # sdpa itself asks the GPU which of its kernels it has
    monkeypatch.setattr(varlen_attention, "_by_sequence", lambda query, *_: by_sequence.append(query) or query)
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(1, heads, sum(LENGTHS), 8, dtype=dtype, device="cuda") for heads in (4, 2, 2)]
        boundaries = SequenceBoundaries.of(LENGTHS, torch.device("cuda"))
        with Recorder() as recorder:
            out, _ = varlen_attention.varlen_attention(layer(0), *tensors, None, boundaries=boundaries)
    assert (out.shape, out.dtype, out.is_cuda) == ((1, sum(LENGTHS), 4, 8), dtype, True)
    kernels = sum(name.startswith("torch_attn._varlen_attn.") for name, _ in recorder.calls)
    assert (kernels, len(by_sequence)) == expected


def test_no_layer_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device tensors have no values: what reads one, and would wait for a GPU, raises."""
    from transformers import Qwen3Config, Qwen3Model

    register_varlen()
    monkeypatch.setattr(varlen_attention, "_by_sequence", by_kernel)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation="varlen",
    )  # fmt: skip
    with torch.device("meta"):
        body = Qwen3Model(config)
        boundaries = SequenceBoundaries.of(LENGTHS, torch.device("meta"))
        ids = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    with Recorder() as recorder:
        hidden = body(input_ids=ids, position_ids=ids, use_cache=False, boundaries=boundaries)
    hidden.last_hidden_state.sum().backward()
    assert sum(name.startswith("torch_attn._varlen_attn.") for name, _ in recorder.calls) == 3


@pytest.mark.parametrize("index", [0, 1], ids=["full", "window"])
def test_torchs_operators_take_the_call_and_its_backward(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The true signatures: by shapes alone (meta) through autograd, then what torch calls on a GPU by fake tensors."""
    monkeypatch.setattr(varlen_attention, "_by_sequence", by_kernel)
    tensors = inputs(device="meta", dtype=torch.bfloat16)
    boundaries = SequenceBoundaries.of(LENGTHS, torch.device("meta"))
    with Recorder() as recorder:
        out, _ = varlen_attention.varlen_attention(layer(index), *tensors, None, boundaries=boundaries, scaling=0.3)
        gradients = torch.autograd.grad(out, tensors, torch.empty_like(out))
    assert [one.shape for one in gradients] == [one.shape for one in tensors]
    called = {name: given for name, given in recorder.calls if name.startswith("torch_attn.")}
    assert list(called) == ["torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"]
    for name, given in called.items():
        with FakeTensorMode(), torch.no_grad():
            on_gpu = [
                torch.empty(one.shape, dtype=one.dtype, device="cuda") if isinstance(one, Tensor) else one
                for one in given
            ]
            results = getattr(varlen, name.split(".")[1])._init_fn(*on_gpu)  # calls aten's flash attention
        assert results[0].shape == (sum(LENGTHS), 4, 8)
        assert results[0].is_cuda


def sequences(lengths: tuple[int, ...]) -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainingSequence(rng.integers(0, VOCAB, n + 1), np.arange(1, n + 1), np.zeros(n, np.float32)) for n in lengths
    ]


def packed(lengths: tuple[int, ...], *, needs_mask: bool):
    plan = MicroBatchPlan((tuple(range(len(lengths))),), sum(lengths))
    return collate(plan, sequences(lengths), device=CPU, needs_mask=needs_mask)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple) else (made,):
            if isinstance(one, Tensor):
                self.num_elements = max(self.num_elements, one.untyped_storage().nbytes() // one.element_size())
        return made


def test_a_packed_row_makes_no_tensor_of_its_square(policy) -> None:
    """16 sequences of 20 to 80 tokens."""
    lengths = tuple(range(20, 84, 4))
    largest = {}
    for attention in ("sdpa", "varlen"):
        model = load_policy(
            policy, MODEL.model_copy(update={"attention": attention}), gradient_checkpointing=False
        )  # fmt: skip
        batch = packed(lengths, needs_mask=attention == "sdpa")
        with Largest() as seen:
            batch.inputs.call(model, 1.0)[0].sum().backward()
        largest[attention] = seen.num_elements
    assert largest["sdpa"] >= sum(lengths) ** 2
    assert largest["varlen"] < sum(lengths) ** 2 / 4


def test_padding_belongs_to_the_last_sequence_and_every_share_knows_the_whole_row() -> None:
    batch = packed((5, 4), needs_mask=False)
    assert batch.inputs.attention_mask is None
    assert batch.inputs.boundaries.lengths == (5, 4)
    assert batch.inputs.boundaries.cumulative.tolist() == [0, 5, 9]
    assert batch.inputs.boundaries.cumulative.dtype == torch.int32
    for rank in range(4):  # 9 tokens, padded to 12
        share = sequence_share(batch, rank, 4).inputs.boundaries
        assert (share.lengths, share.cumulative.tolist()) == ((5, 7), [0, 5, 12])
    assert packed((5, 4), needs_mask=True).inputs.boundaries is None
    again = SequenceBoundaries.of((5, 4), CPU, (0, 2)).padded(3)
    assert (again.lengths, again.key_lengths) == ((5, 7), (5, 9))
    assert again.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11]
    assert again.cumulative_keys.tolist() == [0, 5, 14]
    rows = collate(MicroBatchPlan(((0, 1), (2,)), 9), sequences((5, 4, 2)), device=CPU, needs_mask=False)
    assert rows.inputs.boundaries.lengths == (5, 4, 9)
    empty = collate(EMPTY_MICRO_BATCH, [], device=CPU, needs_mask=False)
    assert empty.inputs.boundaries.lengths == (1,)
    assert sequence_share(empty, 1, 2).inputs.boundaries.lengths == (2,)


def test_rows_of_padded_sequences_score_like_one_row(policy) -> None:
    model: PolicyModel = load_policy(
        policy, MODEL.model_copy(update={"attention": "varlen"}), gradient_checkpointing=False
    )
    whole = packed((5, 4, 2), needs_mask=False).inputs.call(model, 1.0)[0]
    plan = MicroBatchPlan(((0,), (1, 2)), 6)
    rows = collate(plan, sequences((5, 4, 2)), device=CPU, needs_mask=False).inputs.call(model, 1.0)[0]
    torch.testing.assert_close(rows, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"softcap": 50.0}, "capped attention scores"),
        ({"dropout": 0.1}, "dropout of attention weights (0.1)"),
        ({"position_bias": torch.zeros(1)}, "a bias by position"),
        ({"attention_mask": torch.ones(1, 1, 23, 23)}, "an attention mask"),
        ({"boundaries": None}, "does not tell it where sequences begin"),
        ({"value": torch.zeros(1, 2, 23, 6)}, "values of another width (6) than keys (8)"),
    ],
)
def test_what_it_does_not_compute_is_refused(given: dict, words: str) -> None:
    query, key, value = inputs()
    settings = {"attention_mask": None, "value": value, "boundaries": SequenceBoundaries.of(LENGTHS, CPU)} | given
    with pytest.raises(ConfigError) as caught:
        varlen_attention.varlen_attention(layer(0), query, key, **settings)
    assert words in str(caught.value)
    assert "Use model.attention=sdpa" in str(caught.value)


@pytest.mark.full
def test_a_packed_row_needs_at_most_six_tenths_of_the_memory_of_padded_rows() -> None:
    """16 sequences of 64 to 256 tokens, forward and backward, each way in a process of its own."""
    folder = Path(__file__).parents[3] / "benchmarks"

    def needed(variant: str) -> int:
        command = [sys.executable, "attention_memory.py", variant, "64"]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
        return int(done.stdout.splitlines()[-1])

    assert needed("packed, varlen") <= 0.6 * needed("padded, sdpa")
