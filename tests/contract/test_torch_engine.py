from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from penstock.dataflow.errors import EngineLostError, PlacementError, TrajectoryError, WeightSyncError
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.torch import engine as torch_engine
from penstock.rollout.engines.torch.engine import TorchEngine

from .engine_contract import EngineContract
from .engine_harness import (
    JOURNAL_INTERVAL,
    MAX_NUM_SEQS,
    Harness,
    OpenHarness,
    StreamingRequests,
    prompt_of,
    within,
)
from .multi_turn import MultiTurnContract
from .partial_rollouts import PartialRolloutContract
from .stop_texts import StopTextContract
from .transfer_group import TransferGroupContract
from .truncated_sampling import TruncatedSamplingContract

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONFIG = TorchEngineConfig(type="torch", max_num_seqs=MAX_NUM_SEQS, journal_interval_tokens=JOURNAL_INTERVAL)


MODES = [("keep_kv", "host"), pytest.param(("recompute_kv", "device"), marks=pytest.mark.full)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def harness(request: pytest.FixtureRequest, open_harness: OpenHarness) -> AsyncIterator[Harness]:
    async with open_harness(TorchEngine, CONFIG, *request.param) as harness:
        yield harness


class TestTorchEngine(
    EngineContract,
    PartialRolloutContract,
    MultiTurnContract,
    StopTextContract,
    TruncatedSamplingContract,
    TransferGroupContract,
):
    """The contract, in both update modes and with slots of both kinds."""


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(open_harness: OpenHarness) -> AsyncIterator[Harness]:
    """An engine of its own, for tests that break it."""
    async with open_harness(TorchEngine, CONFIG, "keep_kv") as harness:
        yield harness


async def test_an_exception_in_the_decode_thread_fails_everything_pending_with_its_reason(
    fresh: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = StreamingRequests(fresh, [prompt_of(4, i) for i in range(4)], max_new_tokens=400)
    await crowd.all_moved()

    def explode() -> None:
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(fresh.engine._decoder.batch, "step", explode)
    with pytest.raises(EngineLostError, match="out of cheese"):
        await crowd.all_finished()
    with pytest.raises(EngineLostError, match="out of cheese"):
        await fresh.sample([2], max_new_tokens=1)


async def test_shutdown_fails_pending_requests_and_ends_the_thread(fresh: Harness) -> None:
    crowd = StreamingRequests(fresh, [prompt_of(4)], max_new_tokens=500)
    await crowd.all_moved()
    thread = fresh.engine._decoder._thread
    await asyncio.wait_for(fresh.engine.shutdown(), 5)
    assert not thread.is_alive()
    with pytest.raises(EngineLostError, match="shut down"):
        await crowd.all_finished()


async def test_weights_that_fail_the_read_back_serve_nothing_until_a_good_update(
    fresh: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = StreamingRequests(fresh, [prompt_of(4, i) for i in range(4)], max_new_tokens=400)
    await crowd.all_moved()
    real_swap = torch_engine.swap

    def lossy_swap(model, staged, manifest, engine_id):
        return real_swap(
            model, {name: tensor for name, tensor in staged.items() if "up_proj" not in name}, manifest, engine_id
        )

    with monkeypatch.context() as patch:
        patch.setattr(torch_engine, "swap", lossy_swap)
        with pytest.raises(WeightSyncError, match=r"live model\.layers\.0\.mlp\.up_proj\.weight checksum differs"):
            await fresh.publish()
    assert fresh.engine.version == -1
    with pytest.raises(EngineLostError, match="I8"):
        await fresh.sample([2], max_new_tokens=1)
    await fresh.publish()
    await crowd.all_finished()
    assert all([span.version for span in output.spans] == [0, 2] for output in crowd.outputs)


async def test_a_forgotten_version_does_not_come_back_with_an_update_that_was_under_way(fresh: Harness) -> None:
    await fresh.publish()
    update = asyncio.create_task(fresh.engine.update_weights(fresh.publish_tiny(5, seed=1)))
    await asyncio.sleep(0)  # now it stages
    await within(fresh.engine.forget_versions())
    await within(asyncio.wait([update]))
    assert (await within(fresh.engine.load())).version == torch_engine.UNPUBLISHED
    ack = await within(fresh.engine.update_weights(fresh.publish_tiny(2, seed=0)))
    assert ack.version == 2


async def test_an_older_version_is_refused_while_requests_are_in_flight(fresh: Harness) -> None:
    await fresh.publish()
    crowd = StreamingRequests(fresh, [prompt_of(4)], max_new_tokens=300)
    await crowd.all_moved()
    with pytest.raises(WeightSyncError, match="versions would decrease"):
        await within(fresh.engine.update_weights(fresh.publish_tiny(0, seed=0)))
    await crowd.all_finished()
    assert crowd.outputs[0].spans == ((1, 300),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {**tensors, "model.extra": torch.zeros(1)}, "no parameter model.extra"),
        (lambda tensors: {k: v for k, v in tensors.items() if k != "model.norm.weight"}, "first model.norm.weight"),
        (lambda tensors: {**tensors, "model.norm.weight": torch.zeros(3)}, r"shape \(3,\), not \(64,\)"),
    ],
)
async def test_a_manifest_of_another_model_is_refused_before_it_touches_the_weights(
    fresh: Harness, tiny_tensors, tmp_path: Path, change, message: str
) -> None:
    from penstock.weights.transport.shared_memory import write_version

    manifest = write_version(change(tiny_tensors(5)).items(), 1, "float32", tmp_path)
    with pytest.raises(WeightSyncError, match=message):
        await within(fresh.engine.update_weights(manifest))
    assert (await fresh.sample([2, 3], max_new_tokens=4)).spans == ((0, 4),)


async def test_a_tied_head_may_be_published_with_its_embedding(fresh: Harness, tiny_tensors, tmp_path: Path) -> None:
    from penstock.weights.transport.shared_memory import write_version

    tensors = tiny_tensors(9)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    ack = await within(fresh.engine.update_weights(write_version(tensors.items(), 1, "float32", tmp_path)))
    fresh.seed_of_version[1] = 9
    output = await fresh.sample(prompt_of(5), max_new_tokens=20)
    assert ack.version == output.spans[0].version == 1
    assert abs(fresh.expected(prompt_of(5), output) - output.logprobs).max() < 1e-4


async def test_leaving_the_iterator_aborts_the_request(fresh: Harness) -> None:
    stream = fresh.engine.generate(fresh.request(prompt_of(4), max_new_tokens=500))
    async for _ in stream:
        break
    await stream.aclose()
    await fresh.publish()  # runs in the decode thread behind the abort
    load = await fresh.engine.load()
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.tokens_generated < 500


async def test_a_token_below_zero_is_refused_as_one_that_is_not_in_the_vocabulary(fresh: Harness) -> None:
    with pytest.raises(TrajectoryError, match="engine: prompt"):
        await fresh.sample([-1], max_new_tokens=1)
    assert len((await fresh.sample([2], max_new_tokens=3)).token_ids) == 3


async def test_sleep_is_refused_with_open_requests_and_keeps_weights_and_version(fresh: Harness) -> None:
    crowd = StreamingRequests(fresh, [prompt_of(4)], max_new_tokens=200)
    await crowd.all_moved()
    with pytest.raises(PlacementError, match="1 open requests"):
        await fresh.engine.sleep()
    await crowd.all_finished()
    await fresh.engine.sleep()
    with pytest.raises(PlacementError, match="asleep"):
        await fresh.sample([2], max_new_tokens=1)
    await fresh.publish()
    await fresh.engine.wake()
    output = await fresh.sample(prompt_of(5), max_new_tokens=20)
    assert abs(fresh.expected(prompt_of(5), output) - output.logprobs).max() < 1e-4
