"""What every rollout engine must do, run unchanged on each: subclass `EngineContract`, provide the `harness` fixture.

The oracle is a Hugging Face forward pass in float32, computed here and not by any engine. Engines are slow to start,
so one serves a whole module; each test publishes its own versions, which only ever grow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import EngineLostError, TrajectoryError, WeightSyncError
from penstock.dataflow.versions import versions_per_token
from tests.tiers import by_tier

from .engine_harness import MAX_NUM_SEQS, WAIT_S, Harness, Output, StreamingRequests, prompt_of, within


@pytest.mark.usefixtures("idle")
class EngineContract:
    """Subclasses name the loop scope of their `harness` fixture with a module-level `pytestmark`."""

    async def test_nothing_is_served_before_the_first_publish(self, harness: Harness) -> None:
        assert isinstance(harness.refusal_before_publish, EngineLostError)
        assert "before any weights were published" in str(harness.refusal_before_publish)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_behavior_logprobs_are_those_after_the_temperature(
        self, harness: Harness, temperature: float
    ) -> None:
        prompt = prompt_of(12)
        output = await harness.sample(prompt, max_new_tokens=120, temperature=temperature)
        assert len(output.token_ids) == 120
        expected = harness.expected(prompt, output, temperature)
        np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)
        raw = harness.expected(prompt, output, temperature=1.7)
        assert np.abs(raw - expected).max() > 0.1, "the oracle must tell temperatures apart"

    async def test_sampling_at_temperature_1_follows_the_distribution(self, harness: Harness) -> None:
        prompt = prompt_of(5)
        count = 256
        outputs = await within(asyncio.gather(*[harness.sample(prompt, max_new_tokens=1) for _ in range(count)]))
        drawn = np.bincount([output.token_ids[0] for output in outputs], minlength=32) / count
        seed = harness.seed_of_version[harness.engine.version]
        expected = torch.softmax(harness.reference.logits(seed, prompt)[-1], dim=-1).numpy()
        assert np.abs(drawn - expected).max() < 0.16  # 5 sigma at p = 0.5

    async def test_temperature_zero_is_greedy(self, harness: Harness) -> None:
        prompt = prompt_of(9)
        output = await harness.sample(prompt, max_new_tokens=60, temperature=0.0)
        seed = harness.seed_of_version[output.spans[0].version]
        logits = harness.reference.logits(seed, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == output.token_ids

    async def test_a_seed_makes_a_draw_repeatable(self, harness: Harness) -> None:
        first, again, other = [
            (await harness.sample(prompt_of(6), max_new_tokens=40, seed=seed)).token_ids for seed in (3, 3, 4)
        ]
        assert first == again
        assert first != other

    async def test_the_stop_token_is_included_and_named_as_the_reason(self, harness: Harness) -> None:
        free = (await harness.sample(prompt_of(9), max_new_tokens=30, temperature=0.0)).token_ids
        stop, never = free[4], min(set(range(2, 32)) - set(free))
        output = await harness.sample(prompt_of(9), max_new_tokens=30, temperature=0.0, stop_token_ids=(never, stop))
        assert output.finish_reason == "stop"
        assert output.token_ids == free[: free.index(stop) + 1]

    async def test_only_named_tokens_stop_and_the_limit_is_a_length_finish(self, harness: Harness) -> None:
        outputs = await asyncio.gather(*[harness.sample(prompt_of(4, shift), max_new_tokens=200) for shift in range(4)])
        assert any(1 in output.token_ids for output in outputs), "eos was never drawn: this proves nothing"
        assert {(len(output.token_ids), output.finish_reason) for output in outputs} == {(200, "length")}

    async def test_the_context_limit_is_a_length_finish(self, harness: Harness) -> None:
        limit = harness.spec.model.max_context_tokens
        output = await harness.sample(prompt_of(limit - 10), max_new_tokens=100)
        assert (len(output.token_ids), output.finish_reason) == (10, "length")

    @pytest.mark.parametrize("prompt", [[], [2] * 512, [2] * 600, [32]], ids=["empty", "full", "too_long", "unknown"])
    async def test_a_prompt_that_cannot_be_continued_fails_alone_and_the_engine_serves_on(
        self, harness: Harness, prompt: list[int]
    ) -> None:
        assert (harness.spec.model.max_context_tokens, harness.spec.model.shape.vocab_size) == (512, 32)
        bystander = asyncio.create_task(harness.sample(prompt_of(5), max_new_tokens=100))
        with pytest.raises(TrajectoryError) as refusal:
            await harness.sample(prompt, max_new_tokens=1)
        assert (refusal.value.kind, refusal.value.is_final) == ("engine", True), "it would be refused again"
        if len(prompt) > 1:
            assert str(len(prompt)) in str(refusal.value)
            assert "512" in str(refusal.value)
        assert len((await within(bystander)).token_ids) == 100
        assert len((await harness.sample(prompt_of(5), max_new_tokens=3)).token_ids) == 3
        assert (await harness.engine.load()).num_running == 0

    async def test_more_requests_than_slots_all_finish_with_the_right_logprobs(self, harness: Harness) -> None:
        count = 2 * MAX_NUM_SEQS + 5
        prompts = [prompt_of(3 + i % 17, shift=i) for i in range(count)]
        outputs = await within(
            asyncio.gather(*[harness.sample(prompt, max_new_tokens=5 + i * 7 % 41) for i, prompt in enumerate(prompts)])
        )
        assert [len(output.token_ids) for output in outputs] == [5 + i * 7 % 41 for i in range(count)]
        for prompt, output in zip(prompts, outputs, strict=True):
            np.testing.assert_allclose(output.logprobs, harness.expected(prompt, output), atol=1e-4)

    async def test_an_engine_that_forgot_its_versions_takes_the_next_one(self, harness: Harness) -> None:
        cut_off = StreamingRequests(harness, [prompt_of(8)], max_new_tokens=500)
        await cut_off.all_moved()
        await within(harness.engine.forget_versions())
        await cut_off.all_finished()
        assert [output.finish_reason for output in cut_off.outputs] == ["abort"]
        assert harness.engine.version == -1
        await harness.publish()
        output = await harness.sample(prompt_of(8), max_new_tokens=30)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(8), output), atol=1e-4)

    async def test_abort_ends_a_request_with_its_tokens_and_frees_its_slot(self, harness: Harness) -> None:
        doomed = StreamingRequests(harness, [prompt_of(8)], max_new_tokens=500)
        bystander = asyncio.create_task(harness.sample(prompt_of(5), max_new_tokens=100))
        await doomed.all_moved()
        (request,), (output,) = doomed.requests, doomed.outputs
        await within(harness.engine.abort(request.request_id))
        await asyncio.wait_for(doomed.all_finished(), 5)
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 500
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(8), output), atol=1e-4)
        assert len((await within(bystander)).token_ids) == 100
        assert (await harness.engine.load()).num_running == 0
        await within(harness.engine.abort(request.request_id))  # again: a no-op

    async def test_a_waiting_request_can_be_aborted(self, harness: Harness) -> None:
        crowd = StreamingRequests(harness, [prompt_of(4, i) for i in range(MAX_NUM_SEQS)], max_new_tokens=300)
        await crowd.all_moved()
        request = harness.request(prompt_of(8), max_new_tokens=500)
        following = asyncio.create_task(harness.collect(request))
        await asyncio.sleep(0.01)
        await within(harness.engine.abort(request.request_id))
        assert (await asyncio.wait_for(following, 5)).finish_reason == "abort"
        await crowd.all_finished()

    async def test_load_reports_what_runs_and_the_version(self, harness: Harness) -> None:
        before = await harness.engine.load()
        crowd = StreamingRequests(harness, [prompt_of(4, i) for i in range(8)], max_new_tokens=300)
        await crowd.all_moved()
        during = await harness.engine.load()
        await crowd.all_finished()
        after = await harness.engine.load()
        assert during.version == after.version == harness.engine.version == harness.next_version - 1
        assert 0 < during.num_running <= 8
        assert 0 <= during.kv_cache_usage <= 1
        assert (after.num_running, after.num_waiting) == (0, 0)
        assert after.tokens_generated - before.tokens_generated == 8 * 300
        assert after.busy_s > during.busy_s > before.busy_s
        assert after.request_s - before.request_s > 2 * (after.busy_s - before.busy_s), "of 8 requests"

    @pytest.mark.full
    async def test_a_profile_holds_what_was_computed_and_requests_go_on(self, harness: Harness) -> None:
        profiling = asyncio.create_task(harness.engine.profile("engine-0-step-1", 0.5))
        crowd = StreamingRequests(harness, [prompt_of(4, i) for i in range(4)], max_new_tokens=300)
        await crowd.all_finished()
        await asyncio.wait_for(profiling, 60)
        written = [*Path(harness.spec.profile_in).glob("engine-0-step-1*.json.gz")]  # one of each worker
        newest = max(written, key=lambda path: path.stat().st_mtime)
        events = json.loads(gzip.decompress(newest.read_bytes()))["traceEvents"]
        assert "aten::matmul" in {event["name"] for event in events}

    async def test_adapters_are_added_to_the_unchanged_base_for_every_version(self, harness: Harness) -> None:
        await harness.publish(seed=0)
        crowd = StreamingRequests(harness, [prompt_of(4, i) for i in range(4)], max_new_tokens=300)
        await crowd.all_moved()
        for seed in range(-20, 0):  # were they added to what is there, it would be off by all of them
            manifest = harness.manifest(seed)
            assert manifest.adapters is not None
            ack = await within(harness.engine.update_weights(manifest))
            assert (ack.version, ack.checksum) == (manifest.version, manifest.checksum)
        prompt = prompt_of(12)
        output = await harness.sample(prompt, max_new_tokens=60)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt, output), atol=1e-4)
        without = harness.reference.logprobs(0, prompt, output.token_ids)
        assert np.abs(without - output.logprobs).max() > 0.1, "the oracle must tell adapters apart"
        await crowd.all_finished()

    async def test_damaged_adapters_are_refused_and_the_old_weights_serve_on(self, harness: Harness) -> None:
        await harness.publish(seed=0)
        served = harness.engine.version
        manifest = harness.manifest(-1)
        content = bytearray(Path(manifest.location).read_bytes())
        content[-2] ^= 1
        Path(manifest.location).write_bytes(content)
        with pytest.raises(WeightSyncError, match=r"lora_\w+ was received with checksum"):
            await within(harness.engine.update_weights(manifest))
        assert harness.engine.version == served
        prompt = prompt_of(7)
        output = await harness.sample(prompt, max_new_tokens=20)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt, output), atol=1e-4)
        await harness.publish(seed=-2)

    async def test_the_acknowledged_checksum_is_the_manifests(self, harness: Harness) -> None:
        manifest = harness.manifest()
        ack = await within(harness.engine.update_weights(manifest))
        assert (ack.engine_id, ack.version, ack.checksum) == ("engine-0", manifest.version, manifest.checksum)
        assert harness.engine.version == manifest.version
        assert ack.stage_s >= 0
        assert 0 < ack.stall_s < WAIT_S

    async def test_the_same_version_published_twice_is_acknowledged_twice(self, harness: Harness) -> None:
        manifest = harness.manifest()
        acks = [await within(harness.engine.update_weights(manifest)) for _ in range(2)]
        assert [(ack.version, ack.checksum) for ack in acks] == [(manifest.version, manifest.checksum)] * 2

    async def test_a_wrong_checksum_is_refused_and_the_next_publish_heals(self, harness: Harness) -> None:
        manifest = harness.manifest()
        good = manifest.entries[3]
        bad = dataclasses.replace(good, checksum=good.checksum ^ 0x10)
        entries = tuple(bad if entry is good else entry for entry in manifest.entries)
        corrupted = dataclasses.replace(manifest, entries=entries)
        with pytest.raises(WeightSyncError) as refusal:
            await within(harness.engine.update_weights(corrupted))
        for part in (good.name, f"{good.checksum:x}", f"{bad.checksum:x}"):
            assert part in str(refusal.value)
        assert harness.engine.version != manifest.version, "I8: what was not acknowledged is not served"
        await harness.publish()
        output = await harness.sample(prompt_of(7), max_new_tokens=20)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)

    async def test_new_requests_after_an_update_see_no_stale_prefix_cache(self, harness: Harness) -> None:
        prompt = prompt_of(310)  # longer than any engine's cache block
        for _ in range(2):
            await harness.sample(prompt, max_new_tokens=5)  # fills a prefix cache, if there is one
            await harness.publish()
            output = await harness.sample(prompt, max_new_tokens=20)
            assert output.spans[0].version == harness.engine.version
            np.testing.assert_allclose(output.logprobs, harness.expected(prompt, output), atol=1e-4)

    async def test_a_damaged_version_harms_nothing(self, harness: Harness) -> None:
        serving = harness.engine.version
        crowd = StreamingRequests(harness, [prompt_of(4, i) for i in range(8)], max_new_tokens=300)
        await crowd.all_moved()
        manifest = harness.manifest()
        harness.damage(manifest.version)
        with pytest.raises(WeightSyncError, match=r"received .*checksum"):
            await within(harness.engine.update_weights(manifest))
        assert harness.engine.version == serving
        await crowd.all_finished()
        assert all([span.version for span in output.spans] == [serving] for output in crowd.outputs)

    async def test_a_version_of_another_model_is_refused_and_the_old_one_serves(self, harness: Harness) -> None:
        serving, manifest = harness.engine.version, harness.manifest()
        shorter = dataclasses.replace(manifest, entries=manifest.entries[:-1])
        with pytest.raises(WeightSyncError, match=re.escape(manifest.entries[-1].name)):
            await within(harness.engine.update_weights(shorter))
        output = await harness.sample(prompt_of(7), max_new_tokens=20)
        assert output.spans == ((serving, 20),)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)

    @pytest.mark.parametrize("change", [{"shape": (7,)}, {"dtype": "bfloat16"}], ids=["shape", "dtype"])
    async def test_a_parameter_of_another_size_or_precision_is_named_and_the_old_version_serves(
        self, harness: Harness, change: dict[str, object]
    ) -> None:
        serving, manifest = harness.engine.version, harness.manifest()
        last = manifest.entries[-1]
        entries = (*manifest.entries[:-1], dataclasses.replace(last, **change))
        crowd = StreamingRequests(harness, [prompt_of(4, i) for i in range(4)], max_new_tokens=100)
        await crowd.all_moved()
        said = "bfloat16" if "dtype" in change else "7"
        with pytest.raises(WeightSyncError, match=rf"{re.escape(last.name)} (has|is) .*\b{said}\b"):
            await within(harness.engine.update_weights(dataclasses.replace(manifest, entries=entries)))
        await crowd.all_finished()
        assert all(output.spans == ((serving, 100),) for output in crowd.outputs)
        ack = await within(harness.engine.update_weights(manifest))
        assert ack.checksum == manifest.checksum, "the version itself is good"

    async def test_behind_a_swap_greedy_tokens_are_those_of_an_engine_that_never_had_other_weights(
        self, harness: Harness
    ) -> None:
        """A new request prefills under the new weights only, as a fresh engine would."""
        if harness.spec.update_mode != "recompute_kv":
            pytest.skip("keep_kv goes on over the old cache, whose logprobs test_32_requests compares with the oracle")
        prompt = prompt_of(9)
        crowd = StreamingRequests(harness, [prompt], max_new_tokens=200, temperature=0.0)
        for _ in range(2):
            await crowd.all_moved()
            await harness.publish()
        await crowd.all_finished()
        (running,) = crowd.outputs
        *_, (last, num_last) = running.spans
        assert (last, len(running.spans)) == (harness.engine.version, 3)
        before = running.token_ids[:-num_last]
        fresh = await harness.sample([*prompt, *before], max_new_tokens=num_last, temperature=0.0)
        assert fresh.spans == ((last, num_last),)
        assert fresh.token_ids == running.token_ids[-num_last:]
        np.testing.assert_allclose(fresh.logprobs, running.logprobs[-num_last:], atol=1e-4)
        oracle = harness.reference.logits(harness.seed_of_version[last], [*prompt, *before])[-1]
        assert int(oracle.argmax()) == running.token_ids[len(before)], "the first token behind the swap"

    async def test_publishes_of_the_same_weights_change_nothing(self, harness: Harness) -> None:
        is_main = harness.spec.update_mode == "keep_kv" and harness.spec.engine.tensor_parallel_size == 1
        await harness.publish(seed=5)
        prompt = prompt_of(9)
        before = await harness.sample(prompt, max_new_tokens=30, temperature=0.0)
        for _ in range(by_tier(50, full=200) if is_main else 20):
            await harness.publish(seed=5)
        after = await harness.sample(prompt, max_new_tokens=30, temperature=0.0)
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs

    async def test_32_requests_survive_five_updates_in_flight(self, harness: Harness) -> None:
        first = harness.engine.version
        prompts = [prompt_of(4 + i % 9, shift=i) for i in range(32)]
        requests = StreamingRequests(harness, prompts, max_new_tokens=400)
        for _ in range(5):
            await requests.all_moved()
            await harness.publish()
        await requests.all_finished()
        versions = list(range(first, first + 6))
        for prompt, output in zip(prompts, requests.outputs, strict=True):
            assert (len(output.token_ids), output.finish_reason) == (400, "length")  # none lost
            assert [span.version for span in output.spans] == versions  # none missed, none restarted
            self._check_against_each_writer(harness, prompt, output)

    @staticmethod
    def _check_against_each_writer(harness: Harness, prompt: Sequence[int], output: Output) -> None:
        """Each token's logprob is its own version's. A restarted or mislabelled request could not pass."""
        written_by = versions_per_token(output.spans)
        seeds = [harness.seed_of_version[int(version)] for version in written_by]
        if harness.spec.update_mode == "keep_kv":
            expected = harness.reference.logprobs_with_old_kv(seeds, prompt, output.token_ids)
        else:
            expected = np.empty(len(seeds), dtype=np.float32)
            for seed in set(seeds):
                mine = np.array(seeds) == seed
                expected[mine] = harness.reference.logprobs(seed, prompt, output.token_ids)[mine]
        np.testing.assert_allclose(output.logprobs, expected, atol=1e-3)
        pretended = harness.reference.logprobs(seeds[0], prompt, output.token_ids)
        assert np.abs(pretended - expected).max() > 0.1, "the oracle must tell versions apart"
