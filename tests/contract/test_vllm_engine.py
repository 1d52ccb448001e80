from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from penstock.dataflow.errors import ConfigError, EngineLostError, TrajectoryError, WeightSyncError
from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest, WeightManifest
from penstock.dataflow.sampling import SamplingParams
from penstock.envs.endpoint.answer_parser import ParsedAnswer, ParserNames, SampledTurn
from penstock.envs.endpoint.requests import Call
from penstock.rollout.config import VllmEngineConfig
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shared_memory import write_version

from .engine_contract import EngineContract
from .engine_harness import (
    JOURNAL_INTERVAL,
    MAX_NUM_SEQS,
    Harness,
    OpenHarness,
    make_spec,
    prompt_of,
    within,
)
from .multi_turn import MultiTurnContract
from .partial_rollouts import PartialRolloutContract
from .stop_texts import StopTextContract
from .transfer_group import TransferGroupContract
from .truncated_sampling import TruncatedSamplingContract

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]
CONFIG = VllmEngineConfig(
    type="vllm",
    max_num_seqs=MAX_NUM_SEQS,
    kv_cache_gib=0.25,
    enforce_eager=True,
    journal_interval_tokens=JOURNAL_INTERVAL,
)
ENGINES = [
    ("keep_kv", 1, "host", "synchronous"),
    pytest.param(("recompute_kv", 2, "device", "synchronous"), marks=pytest.mark.full),
    pytest.param(("keep_kv", 1, "host", "asynchronous"), marks=pytest.mark.full),
]
"""Update mode, tensor-parallel workers, where versions are written, and scheduling; an engine takes 15 s to start."""


def schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    """Schedule the next step while one runs, as vLLM does on GPUs; its CPU platform turns that off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    plain = platform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        plain(vllm_config)
        assert vllm_config.scheduler_config.async_scheduling is False, "this patch is not needed any more"
        vllm_config.scheduler_config.async_scheduling = True

    patch.setattr(platform, "check_and_update_config", classmethod(check_and_update_config))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES, ids=str)
async def harness(
    request: pytest.FixtureRequest, cpu_profile: None, open_harness: OpenHarness
) -> AsyncIterator[Harness]:
    from penstock.rollout.engines.vllm.engine import VllmEngine

    update_mode, tp_size, memory, scheduling = request.param
    config = CONFIG.model_copy(update={"tensor_parallel_size": tp_size})
    with pytest.MonkeyPatch.context() as patch:
        if scheduling == "asynchronous":
            schedule_asynchronously(patch)
        async with open_harness(VllmEngine, config, update_mode, memory) as harness:
            settings = harness.engine._llm.vllm_config.scheduler_config  # type: ignore[attr-defined]
            assert settings.async_scheduling == (scheduling == "asynchronous")
            yield harness


class TestVllmEngine(
    EngineContract,
    PartialRolloutContract,
    MultiTurnContract,
    StopTextContract,
    TruncatedSamplingContract,
    TransferGroupContract,
):
    """The contract on vLLM's CPU build: both update modes, one worker and two, slots of both kinds, both schedulers."""


@pytest.mark.usefixtures("cpu_profile")
async def test_only_a_dead_core_is_the_loss_of_the_engine(tiny_model_config: ModelConfig) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    from penstock.rollout.engines.vllm.engine import VllmEngine

    class Llm:
        """Replaces AsyncLLM and raises."""

        def __init__(self, error: Exception, errored: bool) -> None:
            self._error, self.errored = error, errored

        async def generate(self, *_: object) -> AsyncIterator[None]:
            raise self._error
            yield

    async def told(error: Exception, errored: bool = False) -> EngineLostError | TrajectoryError:
        engine = VllmEngine(make_spec(tiny_model_config, CONFIG, "keep_kv"))
        engine._llm, engine.version = Llm(error, errored), 0  # type: ignore[assignment]
        request = GenerateRequest(RequestId("r"), (2, 3), SamplingParams(4))
        with pytest.raises((EngineLostError, TrajectoryError)) as raised:
            async for _ in engine.generate(request):
                pass
        return raised.value

    unexpected = EngineGenerateError()
    unexpected.__cause__ = KeyError("planted")
    for error, errored in ((EngineDeadError(), False), (VLLMValidationError("too long"), True), (unexpected, True)):
        lost = await told(error, errored)
        assert isinstance(lost, EngineLostError)
        assert lost.is_final
    for error, cause, is_final in (
        (VLLMValidationError("too long"), "VLLMValidationError: too long", True),
        (ValueError("no such id"), "ValueError: no such id", True),
        (unexpected, "KeyError: 'planted'", False),
    ):
        failed = await told(error)
        assert isinstance(failed, TrajectoryError)
        assert (failed.kind, failed.is_final) == ("engine", is_final)
        assert cause in failed.detail


async def test_whole_tensors_go_through_vllms_own_loader(
    harness: Harness, tiny_tensors: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """`weights=gather`. Damaged tensors, and tensors that the model does not have, are refused before a freeze."""
    if harness.spec.engine.tensor_parallel_size > 1:
        pytest.skip(
            "refused by the configuration: whole tensors cannot be compared with what each worker holds of them"
        )

    def whole(**more: torch.Tensor) -> WeightManifest:
        version = harness.next_version
        harness.seed_of_version[version] = version
        return write_version((tiny_tensors(version) | more).items(), version, "float32", tmp_path)

    for _ in range(2):
        manifest = whole()
        ack = await within(harness.engine.update_weights(manifest))
        assert (ack.version, ack.checksum) == (manifest.version, manifest.checksum)
        output = await harness.sample(prompt_of(7), max_new_tokens=20)
        np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)
    serving = harness.engine.version
    with pytest.raises(WeightSyncError, match=r"layers\.0\.attn\.Wqkv has no place in this engine's model"):
        await within(harness.engine.update_weights(whole(**{"layers.0.attn.Wqkv": torch.ones(4, 4)})))
    manifest = whole()
    entries = (replace(manifest.entries[0], checksum=1), *manifest.entries[1:])
    with pytest.raises(WeightSyncError, match=r"received .*checksum"):
        await within(harness.engine.update_weights(replace(manifest, entries=entries)))
    output = await harness.sample(prompt_of(7), max_new_tokens=20)
    assert output.spans == ((serving, 20),), "the old version serves on"
    np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)
    await harness.publish()


async def test_a_turn_is_read_by_vllms_parser_while_the_engine_serves(harness: Harness) -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"b": "zwölf", "a": 1}}\n</tool_call>'
    turn = SampledTurn(text, [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    parsed, _ = await asyncio.gather(
        within(harness.engine.parse_answer(turn, ParserNames("hermes"))),
        harness.sample(prompt_of(7), max_new_tokens=20),
    )
    assert parsed == ParsedAnswer("I add.", (Call("add", json.dumps({"a": 1, "b": "zwölf"})),))
    assert "hermes" in await within(harness.engine.find_parsers([(turn, parsed)]))
    with pytest.raises(ConfigError, match=r"env\.tool_calls=llama3_json: vLLM says: "):
        await within(harness.engine.parse_answer(turn, ParserNames("llama3_json")))


async def test_the_support_is_read_from_outputs_that_vllm_has_joined_too() -> None:
    """Joining outputs lists the sampled id once. Ids that were removed have −∞, and ids that tie may be missing."""
    from vllm.logprobs import FlatLogprobs

    from penstock.rollout.engines.vllm.engine import support

    def listed(*tokens: tuple[list[int], list[float]]) -> FlatLogprobs:
        found = FlatLogprobs()
        for ids, chances in tokens:
            with np.errstate(divide="ignore"):
                found.append_fast(ids, np.log(chances).tolist(), itertools.repeat(1), itertools.repeat(None))
        return found

    first = listed(([7, 5, 7, 9], [0.3, 0.6, 0.3, 0.1]), ([5, 5, 7, 9], [1.0, 1.0, 0.0, 0.0]))
    first.extend(listed(([9, 5, 9, 7], [0.2, 0.8, 0.2, 0.0])))
    logprobs, alternatives = support(first, "here")
    np.testing.assert_allclose(np.exp(logprobs), [0.3, 1.0, 0.2])
    assert alternatives.rows() == ((5, 9), (), (5,))
    logprobs, alternatives = support(FlatLogprobs(), "here")
    assert (logprobs, alternatives.rows()) == ((), ())
    with pytest.raises(
        TrajectoryError, match=r"here: the listed tokens .* probability of 0\.9000, not 1: .* rollout\.sampling\.top_k"
    ):
        support(listed(([7, 5, 7], [0.3, 0.6, 0.3])), "here")
