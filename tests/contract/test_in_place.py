"""Engines without memory for a second shard: a version is applied in place through one bucket while they are frozen.

From a version buffer in shared memory, and from two ZeRO-3 ranks over gloo. One torch engine, and one vLLM engine over
two workers, each for the whole module.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.weights.checksum import PartialSum
from penstock.weights.transport.in_place import IN_PLACE
from penstock.weights.transport.process_group.endpoints import TransferGroupSpec, WeightSender
from penstock.weights.transport.process_group.group import serve_store

from .engine_harness import JOURNAL_INTERVAL, MAX_NUM_SEQS, Harness, OpenHarness, StreamingRequests, prompt_of, within
from .transfer_group import CPU, NUM_RANKS, make_group_spec
from .version_buffer_stories import part

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]
BUCKET_BYTES = 8192
"""A tenth of the tiny policy's shard, or less."""
TORCH = TorchEngineConfig(type="torch", max_num_seqs=MAX_NUM_SEQS, journal_interval_tokens=JOURNAL_INTERVAL)
VLLM = VllmEngineConfig(
    type="vllm",
    max_num_seqs=MAX_NUM_SEQS,
    tensor_parallel_size=2,
    kv_cache_gib=0.25,
    enforce_eager=True,
    journal_interval_tokens=JOURNAL_INTERVAL,
)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "torch",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.integration,
                pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
            ],
        ),
    ],
)
async def harness(
    request: pytest.FixtureRequest, cpu_profile: None, open_harness: OpenHarness
) -> AsyncIterator[Harness]:
    if request.param == "torch":
        async with open_harness(TorchEngine, TORCH, "keep_kv", bucket_bytes=BUCKET_BYTES) as harness:
            yield harness
        return
    from penstock.rollout.engines.vllm.engine import VllmEngine

    async with open_harness(VllmEngine, VLLM, "keep_kv", bucket_bytes=BUCKET_BYTES) as harness:
        yield harness


class Ranks:
    """Two training ranks under ZeRO-3, in threads of the test."""

    def __init__(self, harness: Harness, group_spec: TransferGroupSpec) -> None:
        self.senders = [WeightSender(rank, CPU) for rank in range(NUM_RANKS)]
        self._harness = harness
        self._group_spec = group_spec

    async def join(self) -> None:
        joining = [asyncio.to_thread(sender.join, self._group_spec) for sender in self.senders]
        await within(asyncio.gather(*joining, self._harness.engine.join_transfer_group(self._group_spec, 0)))

    def announce(self) -> WeightManifest:
        """Hold the next version; returns its manifest."""
        version = self._harness.next_version
        self._harness.seed_of_version[version] = version
        for rank, sender in enumerate(self.senders):
            tensors = self._harness.reference.tensors(version)
            sender.snapshot({name: part(tensor, rank, NUM_RANKS) for name, tensor in tensors.items()}, copies=True)
        sums = tuple(one for sender in self.senders for one in sender.bucket_checksums().sums)
        manifest = self._group_spec.transfer.manifest(version, [PartialSum(*one[1:]) for one in sums])
        return replace(manifest, location=IN_PLACE, bucket_sums=sums)

    async def publish(self, manifest: WeightManifest) -> list[Any]:
        """Answers or errors of the engine and the ranks."""
        sending = [asyncio.to_thread(sender.send, manifest.version) for sender in self.senders]
        updating = self._harness.engine.update_weights(manifest)
        return await within(asyncio.gather(updating, *sending, return_exceptions=True))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest_asyncio.fixture(loop_scope="module")
async def ranks(harness: Harness) -> AsyncIterator[Callable[..., Awaitable[Ranks]]]:
    """`await ranks()`: two ranks that have joined the engine in a group of the next generation."""
    store, made = serve_store("127.0.0.1"), list[Ranks]()

    async def join(timeout_s: float = 20.0) -> Ranks:
        group_spec = await make_group_spec(
            harness, store.port, len(made), codec="full", timeout_s=timeout_s, is_in_place=True
        )
        made.append(Ranks(harness, group_spec))
        await made[-1].join()
        return made[-1]

    yield join
    for one in made:
        one.close()


def damage_behind_staging(harness: Harness, version: int, patch: pytest.MonkeyPatch) -> None:
    """Change one bit of the version buffer after it has been compared, before the engine freezes."""
    if harness.spec.engine.type == "torch":
        stage = TorchEngine._stage

        def staged(*arguments: Any) -> Any:
            answer = stage(*arguments)
            harness.damage(version)
            return answer

        patch.setattr(TorchEngine, "_stage", staged)
        return
    from penstock.rollout.engines.vllm.engine import VllmEngine

    stage_all = VllmEngine._stage

    async def all_staged(*arguments: Any) -> Any:
        answer = await stage_all(*arguments)
        harness.damage(version)
        return answer

    patch.setattr(VllmEngine, "_stage", all_staged)


async def is_silent(harness: Harness, running: StreamingRequests) -> bool:
    """Whether neither running requests nor a new one get a token in a time in which an idle engine samples dozens."""
    before = [len(output.token_ids) for output in running.outputs]
    fresh = asyncio.ensure_future(harness.sample([2, 3], max_new_tokens=1))
    await asyncio.wait([fresh], timeout=0.5)
    has_served = fresh.done() and fresh.exception() is None
    fresh.cancel()
    await asyncio.gather(fresh, return_exceptions=True)
    return not has_served and before == [len(output.token_ids) for output in running.outputs]


async def check_serves(harness: Harness, version: int) -> None:
    output = await harness.sample(prompt_of(7), max_new_tokens=20)
    assert output.spans == ((version, 20),)
    np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)


async def test_a_version_buffer_is_applied_in_place_with_requests_in_flight(harness: Harness) -> None:
    running = StreamingRequests(harness, [prompt_of(6, i) for i in range(3)], max_new_tokens=400)
    for _ in range(3):
        await running.all_moved()
        manifest = harness.manifest()
        ack = await within(harness.engine.update_weights(manifest))
        assert ack.checksum == manifest.checksum, "read back from the live parameters"
        assert ack.stall_s > 0
    await running.all_finished()
    assert all(len(output.spans) == 4 for output in running.outputs)
    await check_serves(harness, manifest.version)


async def test_a_version_buffer_damaged_before_the_freeze_harms_nothing(harness: Harness) -> None:
    serving, manifest = harness.engine.version, harness.manifest()
    harness.damage(manifest.version)
    with pytest.raises(WeightSyncError, match=r"(received .* checksum differs|was received with checksum)"):
        await within(harness.engine.update_weights(manifest))
    await check_serves(harness, serving)


async def test_an_engine_whose_version_buffer_is_overwritten_under_the_freeze_serves_nothing_until_an_update_succeeds(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = StreamingRequests(harness, [prompt_of(6, i) for i in range(3)], max_new_tokens=400)
    await running.all_moved()
    before, manifest = harness.engine.version, harness.manifest()
    with monkeypatch.context() as patch:
        damage_behind_staging(harness, manifest.version, patch)
        with pytest.raises(WeightSyncError, match=r"elements \d+ to \d+ of .* have checksum .* no version now"):
            await within(harness.engine.update_weights(manifest))
    assert harness.engine.version == -1
    assert await is_silent(harness, running)
    harness.damage(manifest.version)  # the bit back: the same version once more
    ack = await within(harness.engine.update_weights(manifest))
    assert ack.checksum == manifest.checksum
    await running.all_finished()
    assert all([span.version for span in output.spans] == [before, manifest.version] for output in running.outputs)
    await check_serves(harness, manifest.version)


async def test_ranks_send_into_the_live_parameters_and_the_engine_has_no_version_buffer(
    harness: Harness, ranks: Callable[..., Awaitable[Ranks]]
) -> None:
    trainer = await ranks()
    for _ in range(2):
        running = StreamingRequests(harness, [prompt_of(6, i) for i in range(3)], max_new_tokens=400)
        await running.all_moved()
        before, manifest = harness.engine.version, trainer.announce()
        assert len({one.bucket for one in manifest.bucket_sums}) > 8
        ack, *_ = await trainer.publish(manifest)
        assert ack.checksum == manifest.checksum, "read back from the live parameters"
        await running.all_finished()
        assert all([span.version for span in one.spans] == [before, manifest.version] for one in running.outputs)
        await check_serves(harness, manifest.version)
    if isinstance(harness.engine, TorchEngine):
        assert harness.engine._version_buffer is None
        assert harness.engine._device_receiver is not None
        assert 0 < harness.engine._device_receiver.extra_bytes <= BUCKET_BYTES


async def test_a_bucket_damaged_in_transfer_is_not_applied_and_the_next_version_is_served(
    harness: Harness, ranks: Callable[..., Awaitable[Ranks]]
) -> None:
    trainer = await ranks()
    running = StreamingRequests(harness, [prompt_of(6)], max_new_tokens=400)
    await running.all_moved()
    before, manifest = harness.engine.version, trainer.announce()
    sent = trainer.senders[0]._held["model.layers.0.mlp.up_proj.weight"]
    sent.view(torch.int32)[1] ^= 1  # like a bit that changes on the wire
    refusal, *_ = await trainer.publish(manifest)
    assert isinstance(refusal, WeightSyncError)
    assert "damaged in transfer. The live parameters belong to no version now" in str(refusal)
    number = int(str(refusal).partition("bucket ")[2].split(":")[0])
    assert 1 < number < len(trainer._group_spec.transfer.plan.buckets), "in the middle"
    assert harness.engine.version == -1
    assert await is_silent(harness, running)
    trainer = await ranks()
    manifest = trainer.announce()
    ack, *_ = await trainer.publish(manifest)
    assert ack.checksum == manifest.checksum
    await running.all_finished()
    assert [span.version for span in running.outputs[0].spans] == [before, manifest.version]
    await check_serves(harness, manifest.version)


async def test_a_rank_lost_in_the_middle_is_named_and_the_engine_is_updated_without_it(
    harness: Harness, ranks: Callable[..., Awaitable[Ranks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await ranks()
    manifest = trainer.announce()
    transfer = trainer.senders[1]._transfer
    assert transfer is not None
    transfer_bucket = transfer._bucket

    def dies(links: Any, number: int, *rest: Any) -> None:
        if number == 5:
            raise WeightSyncError("out of cheese")
        transfer_bucket(links, number, *rest)

    monkeypatch.setattr(transfer, "_bucket", dies)
    refusal, *_ = await trainer.publish(manifest)
    assert isinstance(refusal, WeightSyncError)
    assert "training rank 1 is lost" in str(refusal)
    assert harness.engine.version == -1
    assert await is_silent(harness, StreamingRequests(harness, [], max_new_tokens=1))
    await harness.publish()  # from a version buffer
    await check_serves(harness, harness.next_version - 1)
