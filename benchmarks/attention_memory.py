"""What attention costs the trainer on a CPU: memory and time of forward and backward, with masks, padding or neither.

    python benchmarks/attention_memory.py            (5 minutes; writes benchmarks/results/attention_memory.md)
    python benchmarks/attention_memory.py tree       (a minute; prints the table of the tree of threads)
    python benchmarks/attention_memory.py context    (4 minutes; prints that of ranks that split a sequence)

Memory: 16 sequences, the longest four times the shortest, lengths in geometric progression, through a random Qwen3
policy in float32. Each figure is of a fresh process: its largest resident memory during one step less that before it,
after a step on short sequences. Weights are in neither. And that of a tree of threads, planned as the trainer does: a
thread, four forks of it, and two forks of each of these, with and without sharing what they begin with.

Context: one sequence over 1, 2 and 4 ranks, as many tokens a rank: what is kept from the forward pass for the backward
one, and the most that a step holds at once, both of torch's allocations, of the rank with the most; beside them the
keys and values of the whole row, which are there for one layer at a time.

Time: 256 sequences as long as the demo's worked sums, in one micro-batch, through a policy of the demo's shape, in
seconds of one core, so that other processes do not count. The ways take turns in one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from provenance import provenance
from torch.profiler import ProfilerActivity, profile

from penstock.trainer.batches.collate import collate, sequence_share
from penstock.trainer.batches.packing import (
    BatchPlan,
    MicroBatchPlan,
    RowLayout,
    TrainingSequence,
    plan_batch,
    plan_rows,
)
from penstock.trainer.models.policy_model import PolicyModel
from penstock.trainer.models.varlen_attention import register_varlen
from penstock.trainer.spec import free_port

NUM_SEQUENCES, SPREAD = 16, 4.0
SHORTEST = (32, 64, 128)
NUM_PROCESSES, NUM_TURNS = 3, 7
TREE_UNIT, TREE_BUDGET = 32, 8192
CONTEXT_UNIT = 1024
"""Tokens a rank."""
ATTENTION_SHARE = 1.1e-3
"""Of the policy whose memory is measured (`trainer.flops.attention_share`)."""
VARIANTS = {
    "padded, sdpa": "one sequence per row, padded to the longest, with transformers' mask of the padding",
    "padded, sdpa, no mask": "the same, causal: behind a sequence there is only padding",
    "packed, sdpa": "one row with a block-diagonal mask",
    "packed, varlen": "one row without a mask",
}
RESULT = Path(__file__).parent / "results" / "attention_memory.md"


def policy(
    attention: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    gradient_checkpointing: bool = False,
) -> PolicyModel:
    """A random Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    register_varlen()
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64 if hidden >= 256 else 32,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    causal_lm = Qwen3ForCausalLM(config)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PolicyModel(causal_lm).train()


def sequences_of(lengths: Sequence[int], vocabulary: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainingSequence(
            rng.integers(0, vocabulary, n + 1), np.arange(n // 4 + 1, n + 1), np.zeros(n - n // 4, np.float32)
        )
        for n in lengths
    ]


def step(model: PolicyModel, plan: MicroBatchPlan, sequences: list[TrainingSequence], variant: str) -> None:
    """Forward and backward."""
    inputs = collate(plan, sequences, device=torch.device("cpu"), needs_mask=not variant.endswith("varlen")).inputs
    if variant == "padded, sdpa":  # as peers do: transformers makes [R, 1, L, L] of it
        lengths = torch.tensor([sequences[index].num_inputs for (index,) in plan.rows])
        inputs = inputs._replace(attention_mask=torch.arange(plan.row_length)[None] < lengths[:, None])
    torch.autograd.backward(inputs.call(model, 1.0)[0].sum())


def memory_lengths(shortest: int) -> list[int]:
    return [round(shortest * SPREAD ** (index / (NUM_SEQUENCES - 1))) for index in range(NUM_SEQUENCES)]


def plan_of(lengths: Sequence[int], variant: str) -> MicroBatchPlan:
    if variant.startswith("padded"):
        return MicroBatchPlan(tuple((index,) for index in range(len(lengths))), max(lengths))
    return MicroBatchPlan((tuple(range(len(lengths))),), sum(lengths))


def resident_bytes(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def measure_memory(variant: str, shortest: int) -> int:
    """Bytes, in this process."""
    torch.set_num_threads(1)
    attention = "varlen" if variant.endswith("varlen") else "sdpa"
    model = policy(attention, hidden=256, layers=4, heads=8, kv_heads=2, vocabulary=2048)
    for lengths in ([4] * NUM_SEQUENCES, memory_lengths(shortest)):
        sequences = sequences_of(lengths, 2048)
        plan = plan_of(lengths, variant)
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        step(model, plan, sequences, variant)
    return resident_bytes("VmHWM") - before


def tree_of(unit: int) -> list[TrainingSequence]:
    """A thread of 16 units of tokens, four forks of 2 behind its first 12, two of 1 behind each of these.

    Loss is on the last tokens that are a thread's own.
    """
    rng = np.random.default_rng(0)

    def behind(context: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = np.concatenate([context, rng.integers(0, 2048, num_tokens)])
        targets = np.arange(max(1, len(context)), len(ids))
        found.append(TrainingSequence(ids, targets, np.zeros(len(targets), np.float32)))
        return ids

    found: list[TrainingSequence] = []
    thread = behind(np.zeros(0, np.int64), 16 * unit)
    for _ in range(4):
        fork = behind(thread[: 12 * unit], 2 * unit)
        for _ in range(2):
            behind(fork, unit)
    return found


def measure_tree(attention: str, form: str) -> tuple[int, int]:
    """Tokens of a step, and bytes, in this process."""
    torch.set_num_threads(1)
    model = policy(attention, hidden=256, layers=4, heads=8, kv_heads=2, vocabulary=2048)
    layout: RowLayout = "single_row" if attention == "varlen" else "rows"
    for unit in (1, TREE_UNIT):
        sequences = tree_of(unit)
        plan = plan_rows(sequences, 1, TREE_BUDGET, ATTENTION_SHARE, layout, share_prompts=form == "tree")
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for micro_batch in plan.ranks[0]:
            step(model, micro_batch, sequences, attention)
    return sum(one.num_padded_tokens for one in plan.ranks[0]), resident_bytes("VmHWM") - before


def measure_context(rank: int, world: int, port: int, *, gradient_checkpointing: bool) -> tuple[int, int]:
    """Bytes that one of several ranks keeps for the backward pass, and the most that it holds at once."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = torch.distributed.group.WORLD
    model = policy(
        "varlen",
        hidden=256,
        layers=4,
        heads=8,
        kv_heads=2,
        vocabulary=2048,
        gradient_checkpointing=gradient_checkpointing,
    )
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for unit in (8, CONTEXT_UNIT):
        kept.clear()
        sequences = sequences_of([unit * world], 2048)
        plan = MicroBatchPlan(((0,),), unit * world)
        whole = collate(plan, sequences, device=torch.device("cpu"), needs_mask=False)
        share = whole if world == 1 else sequence_share(whole, rank, world, group)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = share.inputs.call(model, 1.0)[0].sum()
            torch.autograd.backward(loss)
    torch.distributed.barrier()
    allocations = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    allocations.sort(key=lambda one: one.start_ns())
    return sum(kept.values()), max(accumulate(one.nbytes() for one in allocations))


def context_lines() -> list[str]:
    lines = [
        "| ranks that split one sequence | tokens | kept for the backward pass, MiB | most at once, MiB | "
        "keys and values of the row, one layer, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for gradient_checkpointing in (False, True):
        for world in (1, 2, 4):
            kept, most = _of_ranks(world, gradient_checkpointing=gradient_checkpointing)
            name = f"{world}, gradient checkpointing" if gradient_checkpointing else str(world)
            gathered = world * CONTEXT_UNIT * 2 * 2 * 64 * 4
            mib = " | ".join(f"{one / 2**20:.1f}" for one in (kept, most, gathered))
            lines.append(f"| {name} | {world * CONTEXT_UNIT:,} | {mib} |")
    return lines


def _of_ranks(world: int, *, gradient_checkpointing: bool) -> tuple[float, float]:
    """What `measure_context` finds on the rank with the most, the median of several starts."""
    found = []
    for _ in range(NUM_PROCESSES):
        port = free_port()
        words = [sys.executable, __file__, "context"]
        ranks = [
            subprocess.Popen(
                [*words, *map(str, (rank, world, port, int(gradient_checkpointing)))],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]
        told = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
        found.append([max(values) for values in zip(*told, strict=True)])
    kept, most = (median(values) for values in zip(*found, strict=True))
    return kept, most


def demo_plans(lengths: Sequence[int]) -> dict[str, BatchPlan]:
    """Ways to lay out a micro-batch of the demo."""
    rows = tuple(tuple(range(start, start + 16)) for start in range(0, len(lengths), 16))
    longest = max(sum(lengths[index] for index in row) for row in rows)
    return {
        "rows as planned, sdpa": plan_batch(lengths, 1, 16384, attention_share=1.3e-3, layout="rows"),
        "rows of 16, sdpa": BatchPlan(((MicroBatchPlan(rows, longest),),), 1.0),
        "one row, varlen": plan_batch(lengths, 1, 16384, layout="single_row"),
    }


def measure_time() -> dict[str, list[float]]:
    """Seconds of one core per step, of each turn."""
    torch.set_num_threads(1)
    models = {one: policy(one, hidden=128, layers=4, heads=4, kv_heads=2, vocabulary=24) for one in ("sdpa", "varlen")}
    sequences = sequences_of([int(n) for n in np.random.default_rng(0).integers(36, 41, 256)], 24)
    plans = demo_plans([one.num_inputs for one in sequences])
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(NUM_TURNS):
        for name, plan in plans.items():
            start = time.process_time()
            for micro_batch in plan.ranks[0]:
                step(models[name.split(", ")[1]], micro_batch, sequences, name)
            seconds[name].append(time.process_time() - start)
    return seconds


def child(*arguments: str) -> Any:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def tree_lines() -> list[str]:
    lines = ["| tree of threads | tokens | MiB of one step |", "| --- | --- | --- |"]
    for attention in ("sdpa", "varlen"):
        for form in ("linear", "tree"):
            runs = [child("tree", attention, form) for _ in range(NUM_PROCESSES)]
            mib = median(num_bytes for _, num_bytes in runs) / 2**20
            lines.append(f"| {attention}, {form} | {runs[0][0]:,} | {mib:.0f} |")
    return lines


def main() -> None:
    match sys.argv[1:]:
        case ["time"]:
            print(json.dumps(measure_time()))
        case ["context"]:
            print("\n".join([*context_lines(), *(f"- {note}" for note in provenance())]))
        case ["context", rank, world, port, checkpointing]:
            is_on = checkpointing == "1"
            print(json.dumps(measure_context(int(rank), int(world), int(port), gradient_checkpointing=is_on)))
        case ["tree"]:
            print("\n".join([*tree_lines(), *(f"- {note}" for note in provenance())]))
        case ["tree", attention, form]:
            print(json.dumps(measure_tree(attention, form)))
        case [variant, shortest]:
            print(json.dumps(measure_memory(variant, int(shortest))))
        case _:
            write_results()


def write_results() -> None:
    """Measure everything."""
    columns = " | ".join(f"{one} to {round(one * SPREAD)} tokens" for one in SHORTEST)
    lines = ["# Memory and time of attention", "", f"| MiB of one step | {columns} |", "| --- |" + " --- |" * 3]
    found = {
        name: [median(child(name, str(one)) for _ in range(NUM_PROCESSES)) / 2**20 for one in SHORTEST]
        for name in VARIANTS
    }
    for name, mib in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{one:.0f}" for one in mib) + " |")
    for name in list(VARIANTS)[:-1]:
        ratios = (mine / theirs for mine, theirs in zip(found["packed, varlen"], found[name], strict=True))
        lines.append(f"| packed, varlen ÷ {name} | " + " | ".join(f"{one:.2f}" for one in ratios) + " |")
    lines += ["", *tree_lines()]
    timed = {name: (median(values), min(values), max(values)) for name, values in child("time").items()}
    lines += ["", "| 256 sequences of 36 to 40 tokens | seconds of one core |", "| --- | --- |"]
    lines += [f"| {name} | {mid:.2f} ({least:.2f} to {most:.2f}) |" for name, (mid, least, most) in timed.items()]
    notes = [
        *(f"{name}: {what}" for name, what in VARIANTS.items()),
        f"memory: median of {NUM_PROCESSES} processes; {NUM_SEQUENCES} sequences; Qwen3 of hidden 256, 4 layers, "
        "8 heads, 2 key/value heads of 64; float32, 1 thread",
        f"time: median of {NUM_TURNS} turns (least to most), forward and backward, Qwen3 of the demo's shape, float32",
        "planned rows have one sequence each, so they need no mask",
        f"tree of threads: {16 * TREE_UNIT} tokens, four forks with {2 * TREE_UNIT} more behind {12 * TREE_UNIT}, two "
        f"of each with {TREE_UNIT} more; linear: every thread with its whole context; one micro-batch",
        *provenance(),
        f"torch {version('torch')}, transformers {version('transformers')}",
        "by: python benchmarks/attention_memory.py",
    ]
    lines += ["", *(f"- {note}" for note in notes)]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
