"""What a loader computes element by element (Mamba's A = -exp(A_log)) arrives as computed, from every sharding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from penstock.weights.checksum import tensor_checksum
from penstock.weights.layout.algebra import Layout, Shard, TensorSpec, View
from penstock.weights.layout.derived import derived_value, source_name
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.layout.tracing import Trace
from penstock.weights.transport.process_group.members import Members
from penstock.weights.transport.process_group.transfer import pack, steps_of
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter, sent_part

TENSORS = (TensorSpec("mixer.A_log", (6,)), TensorSpec("mixer.D", (6,)))
RANKS = 2


def load(given: dict[str, torch.Tensor], rank: int, a: torch.Tensor, d: torch.Tensor) -> None:
    """As vLLM's: a tensor-parallel rank has half of the heads."""
    mine = slice(rank * 3, rank * 3 + 3)
    a.copy_(-torch.exp(given["mixer.A_log"][mine].float()))
    d.copy_(given["mixer.D"][mine])


def traced(rank: int) -> dict[str, list]:
    parameters = {"A": torch.empty(3, device="meta"), "D": torch.empty(3, device="meta")}
    with Trace(TENSORS, torch.bfloat16) as trace:
        load(trace.sources, rank, *parameters.values())
    return trace.shards(rank, parameters)


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_a_function_of_a_tensor_is_computed_by_the_ranks_that_hold_the_tensor(
    is_partitioned: bool, tmp_path: Path
) -> None:
    found = [traced(rank) for rank in range(RANKS)]
    names = found[0].keys()
    assert names == {"mixer.A_log", "mixer.D", "neg(exp(mixer.A_log))"}
    assert {source_name(name) for name in names} == {"mixer.A_log", "mixer.D"}
    layout = Layout(
        {name: tuple(shard for one in found for shard in one[name]) for name in names}, ({"A": 3, "D": 3},) * RANKS
    )
    training = TrainingSharding(TENSORS, RANKS, is_partitioned=is_partitioned)
    transfer = ShardTransfer.between(training, EngineLayout("vllm", layout), "float32", str(tmp_path))
    files = ShardFiles(transfer)
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in TENSORS}
    sums: Counter[tuple[int, str]] = Counter()
    for rank in range(RANKS):
        part = slice(rank * 3, rank * 3 + 3) if is_partitioned else slice(None)
        writer = ShardWriter(transfer, rank, files)
        mine = {name: value[part] for name, value in values.items()}
        writer.write(1, mine)
        for engine_rank, buffer, checksum in writer.sums(mine):
            sums[engine_rank, buffer] += checksum
    for rank in range(RANKS):
        a, d = torch.empty(3), torch.empty(3)
        load(values, rank, a, d)
        written = files.tensors(1, rank)
        torch.testing.assert_close(written["A"], a, rtol=0, atol=0)
        torch.testing.assert_close(written["D"], d, rtol=0, atol=0)
        assert sums[rank, "A"] % 2**64 == tensor_checksum(a)


def test_a_function_is_computed_in_float32() -> None:
    given = {"w": torch.tensor([0.3], dtype=torch.bfloat16)}
    torch.testing.assert_close(derived_value(given, "neg(exp(w))"), -given["w"].float().exp(), rtol=0, atol=0)


def test_a_message_between_processes_holds_what_was_computed_and_not_the_source() -> None:
    """Also where the engine holds both."""
    name, derived = "mixer.A_log", "neg(exp(mixer.A_log))"
    shards = {one: (Shard(0, ((0, 8),), View(one, 0, (1,))),) for one in (name, derived)}
    engine = EngineLayout("vllm", Layout(shards, ({name: 8, derived: 8},)))
    transfer = ShardTransfer.between(TrainingSharding((TensorSpec(name, (8,)),)), engine, "float32", None)
    tensors = {name: torch.arange(8.0) / 10}
    held = {one: sent_part(tensors, one) for one in shards}
    (step,) = steps_of(transfer.plan, Members(1, ("engine-0",), 1).to_engines(()), 0)
    message = torch.empty(16)
    pack(step.sends[0], held, message)
    torch.testing.assert_close(message, torch.cat([tensors[name], -tensors[name].exp()]), rtol=0, atol=0)
