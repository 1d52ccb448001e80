"""Truncated sampling on every engine: the recorded support and logprobs are those of the distribution drawn from.

The oracle truncates in float64, from the logits of a Hugging Face forward pass.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.dataflow.ids import GroupId, RequestId, TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Alternatives, GroupPayload
from penstock.dataflow.versions import versions_per_token
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.trainer.models.frozen_policy import FrozenPolicy

from .engine_harness import Harness, Output, prompt_of, within
from .partial_rollouts import CODEC, AbortsOnce

LIMITS = {
    "top-k": {"top_k": 5},
    "as Qwen recommends": {"top_k": 20, "top_p": 0.95},
    "min-p": {"top_k": 31, "min_p": 0.15},
    "all three": {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
}
BOUNDARY = 1e-5
"""A token this close to a limit may be in or out, by rounding."""


def support(logits: NDArray[np.float64], temperature: float, limits: dict[str, float]) -> tuple[list[int], bool]:
    """Ids that may be sampled after one position, likeliest first, and whether a limit is too close to tell."""
    scaled = logits / temperature
    order = np.argsort(-scaled, kind="stable")
    chances = np.exp(scaled[order] - scaled.max())
    bound = limits.get("min_p", 0.0)
    is_close = bool(np.any(np.abs(chances - bound) < BOUNDARY)) and bound > 0
    order, chances = order[chances >= bound], chances[chances >= bound]
    order, chances = order[: int(limits["top_k"])], chances[: int(limits["top_k"])]
    before = np.concatenate([[0.0], np.cumsum(chances)[:-1]]) / chances.sum()
    top_p = limits.get("top_p", 1.0)
    is_close |= bool(np.any(np.abs(before - top_p) < BOUNDARY))
    return order[before < top_p].tolist(), is_close


def check_support(harness: Harness, prompt: list[int], output: Output, temperature: float, limits: dict) -> list[int]:
    """Compare an answer of one version with the oracle; returns the sizes of its supports."""
    (span,) = output.spans
    logits = harness.reference.logits(harness.seed_of_version[span.version], [*prompt, *output.token_ids])
    at = logits[len(prompt) - 1 : -1].double().numpy()
    alternatives = Alternatives.joined(delta.alternatives for delta in output.deltas)
    assert alternatives is not None
    rows = alternatives.rows()
    assert len(rows) == len(output.token_ids)
    sizes, num_close = [], 0
    for scores, token, logprob, others in zip(at, output.token_ids, output.logprobs, rows, strict=True):
        assert token not in others
        assert len(set(others)) == len(others)
        expected, is_close = support(scores, temperature, limits)
        num_close += is_close
        if not is_close:
            assert {token, *others} == set(expected)
        kept = scores[[token, *others]] / temperature
        assert logprob == pytest.approx(kept[0] - np.log(np.exp(kept).sum()), abs=1e-4)
        sizes.append(1 + len(others))
    assert num_close < 0.2 * len(rows), "this proves nothing"
    return sizes


class PublishesOnAbort:
    """The engine of a harness, which gets new weights right after its first abort."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._has_published = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness.engine, name)

    async def abort(self, request_id: RequestId) -> None:
        await self._harness.engine.abort(request_id)
        if not self._has_published:
            self._has_published = True
            await self._harness.publish()


@pytest.mark.usefixtures("idle")
class TruncatedSamplingContract:
    """Subclasses name the loop scope of their `harness` fixture with a module-level `pytestmark`."""

    @pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
    async def test_the_recorded_support_is_what_was_drawn_from(self, harness: Harness, limits: dict) -> None:
        temperature = 0.7
        prompts = [prompt_of(12, shift) for shift in range(4)]
        runs = [harness.sample(prompt, max_new_tokens=60, temperature=temperature, **limits) for prompt in prompts]
        sizes = []
        for prompt, output in zip(prompts, await within(asyncio.gather(*runs)), strict=True):
            sizes += check_support(harness, prompt, output, temperature, limits)
        assert max(sizes) <= limits["top_k"]
        assert len(set(sizes)) > 1 or set(limits) == {"top_k"}, "nothing but top-k has cut anything"

    async def test_draws_follow_the_renormalised_distribution(self, harness: Harness) -> None:
        prompt, limits, count = prompt_of(5), {"top_k": 4}, 256
        outputs = await within(
            asyncio.gather(*[harness.sample(prompt, max_new_tokens=1, **limits) for _ in range(count)])
        )
        drawn = np.bincount([output.token_ids[0] for output in outputs], minlength=32) / count
        logits = harness.reference.logits(harness.seed_of_version[harness.engine.version], prompt)[-1]
        kept, _ = support(logits.double().numpy(), 1.0, limits)
        expected = np.zeros(32)
        expected[kept] = torch.softmax(logits[kept].double(), dim=-1).numpy()
        assert np.abs(drawn - expected).max() < 0.16  # 5 sigma at p = 0.5
        assert drawn[expected == 0].sum() == 0

    async def test_whole_distributions_and_greedy_answers_record_no_alternatives(self, harness: Harness) -> None:
        crowd = [
            harness.sample(prompt_of(6), max_new_tokens=20, **sampling)
            for sampling in ({}, {"temperature": 0.0, "top_k": 5}, {"top_k": 5})
        ]
        whole, greedy, truncated = await within(asyncio.gather(*crowd))  # in one batch
        assert not any(delta.alternatives for output in (whole, greedy) for delta in output.deltas)
        for output in (whole, greedy):
            np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(6), output), atol=1e-4)
        check_support(harness, prompt_of(6), truncated, 1.0, {"top_k": 5})

    async def test_the_trainer_computes_the_recorded_logprobs_over_interruptions_and_versions(
        self, harness: Harness
    ) -> None:
        sampling = SamplingParams(120, temperature=0.7, top_k=9, top_p=0.9)
        engine, first = AbortsOnce(PublishesOnAbort(harness)), harness.engine.version  # type: ignore[arg-type]
        runner = TrajectoryRunner(EnginePool([engine], 32), CODEC, 60.0)
        tasks = [Task(TaskId(f"t{index}"), "12+34=?; "[index:]) for index in range(4)]
        runs = [runner.run(RolloutContext(task, "truncated"), index, sampling) for index, task in enumerate(tasks)]
        group = tuple(await within(asyncio.gather(*runs)))
        assert {span.version for one in group for span in one.spans} == {first, first + 1}
        spec = harness.spec
        policy = FrozenPolicy.load(spec.model_path, spec.model, "cpu", 512, sampling.temperature)
        found: dict[int, NDArray[np.float32]] = {}
        for version in (first, first + 1):
            tensors = harness.reference.tensors(harness.seed_of_version[version])
            policy.model.causal_lm.load_state_dict(tensors, strict=False)
            found[version] = policy.logprobs(GroupPayload(GroupId(0), group))
        writers = np.concatenate([versions_per_token(one.spans) for one in group])
        recorded = np.concatenate([one.behavior_logprobs[one.loss_mask] for one in group])
        # A token behind an update in flight was sampled over the old KV cache; all others are exact.
        is_pure = np.concatenate([versions_per_token(one.spans) == one.spans[0].version for one in group])
        trained = np.where(writers == first, found[first], found[first + 1])
        np.testing.assert_allclose(trained[is_pure], recorded[is_pure], atol=1e-4)
        assert is_pure.mean() > 0.1
