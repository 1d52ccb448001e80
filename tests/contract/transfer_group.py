"""Contract of an engine as a receiver of device-to-device transfers; on CPU the messages go over gloo.

Two training ranks under ZeRO-3 run in threads of the test, with connections of their own.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.planner.plan import make_plan
from penstock.weights.transport.process_group.endpoints import ReceiverAddress, TransferGroupSpec, WeightSender
from penstock.weights.transport.process_group.group import serve_store
from penstock.weights.transport.shards import ShardTransfer

from .engine_harness import Harness, StreamingRequests, prompt_of, within
from .version_buffer_stories import part

NUM_RANKS = 2
CPU = torch.device("cpu")


async def make_group_spec(
    harness: Harness, port: int, generation: int, *, codec: str, timeout_s: float, is_in_place: bool = False
) -> TransferGroupSpec:
    specs = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in harness.reference.tensors(0).items())
    side = EngineLayout(harness.spec.engine.type, await harness.engine.layout(specs))
    training = TrainingSharding(specs, num_replicas=NUM_RANKS, is_partitioned=True)
    transfer = ShardTransfer.between(training, side, "float32", None)
    if is_in_place:
        layouts = training.layout(), side.layout
        assert harness.spec.bucket_bytes is not None
        transfer = replace(transfer, plan=make_plan(*layouts, 4, bucket_bytes=harness.spec.bucket_bytes))
    return TransferGroupSpec(
        transfer=transfer,
        num_training=NUM_RANKS,
        receivers=(ReceiverAddress(str(harness.spec.engine_id), "node"),),
        on_devices=True,
        store_at=("127.0.0.1", port),
        generation=generation,
        timeout_s=timeout_s,
        codec=codec,  # type: ignore[arg-type]
        is_in_place=is_in_place,
    )


async def transfer(harness: Harness, group_spec: TransferGroupSpec, senders: list[WeightSender]) -> WeightManifest:
    """Send the next version through the group."""
    version = harness.next_version
    harness.seed_of_version[version] = version
    for rank, sender in enumerate(senders):
        tensors = harness.reference.tensors(version)
        sender.snapshot({name: part(tensor, rank, NUM_RANKS) for name, tensor in tensors.items()}, copies=True)
    sending = [asyncio.to_thread(sender.send, version) for sender in senders]
    *sent, _ = await within(asyncio.gather(*sending, harness.engine.receive(version)))
    return group_spec.transfer.manifest(version, [sums for one in sent for sums in one.sums])


@pytest.mark.usefixtures("idle")
class TransferGroupContract:
    """As `EngineContract`."""

    @pytest.mark.parametrize("codec", ["full", "delta"])
    async def test_versions_are_received_into_the_engines_own_memory_while_it_decodes(
        self, harness: Harness, codec: str
    ) -> None:
        store = serve_store("127.0.0.1")
        group_spec = await make_group_spec(harness, store.port, 1, codec=codec, timeout_s=60.0)
        senders = [WeightSender(rank, CPU) for rank in range(NUM_RANKS)]
        joining = [asyncio.to_thread(sender.join, group_spec) for sender in senders]
        await within(asyncio.gather(*joining, harness.engine.join_transfer_group(group_spec, 0)))
        for _ in range(2):
            running = StreamingRequests(harness, [prompt_of(6, i) for i in range(3)], max_new_tokens=400)
            await running.all_moved()
            manifest = await transfer(harness, group_spec, senders)
            before = harness.engine.version
            ack = await within(harness.engine.update_weights(manifest))
            assert ack.checksum == manifest.checksum, "read back from the live parameters"
            await running.all_finished()
            assert all(output.spans[0].version == before for output in running.outputs)
            output = await harness.sample(prompt_of(7), max_new_tokens=20)
            assert output.spans == ((manifest.version, 20),)
            np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)
        for sender in senders:
            sender.close()

    async def test_a_rank_that_does_not_join_is_named_and_the_engine_keeps_serving(self, harness: Harness) -> None:
        store = serve_store("127.0.0.1")
        group_spec = await make_group_spec(harness, store.port, 1, codec="full", timeout_s=1.0)
        sender = WeightSender(0, CPU)
        joined, refusal = await within(
            asyncio.gather(
                asyncio.to_thread(sender.join, group_spec),
                harness.engine.join_transfer_group(group_spec, 0),
                return_exceptions=True,
            )
        )
        for error in (joined, refusal):
            assert isinstance(error, WeightSyncError)
            assert "training rank 1 did not join within 1 s" in str(error)
        output = await harness.sample(prompt_of(7), max_new_tokens=20)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)
