"""What recording and replaying experts costs: interleaved pairs of generation and of training steps.

    python benchmarks/routing_cost.py [--pairs 20]

Two vLLM engines of one model, one of which records, answer the same requests by turns; so do two trainer steps of the
same answers, with and without their routes. A dense model has nothing to record: there it is what asking costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from in_flight import Publisher
from provenance import provenance

from penstock.dataflow.ids import EngineId, GroupId, RequestId, TaskId, TrajectoryId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.saved_groups import PartialTokens
from penstock.dataflow.trajectory import GroupPayload, Trajectory, padded_routes
from penstock.rollout.config import VllmEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.algorithms.corrections import CorrectionConfig
from penstock.trainer.build import build_trainer
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.spec import TrainerSpec
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.model_config import ModelConfig, ModelShape

NUM_REQUESTS, NUM_PROMPT, NUM_NEW = 64, 24, 48
SHAPE = ModelShape(
    vocab_size=32, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
    tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
MODELS = {"dense": SHAPE, "mixture": SHAPE.model_copy(update={"num_experts": 8, "expert_size": 192})}
"""Of `model=arithmetic` and `model=arithmetic_experts`."""


TRAINER = TrainerConfig(backend="torch", max_tokens_per_micro_batch=1024, optimizer=OptimizerConfig(lr=1e-5))


async def generate(engine: object, name: str) -> tuple[float, list[PartialTokens]]:
    """Seconds for all requests, and what they gave."""

    async def one(index: int) -> PartialTokens:
        prompt = tuple(2 + (index + place) % 20 for place in range(NUM_PROMPT))
        sampling = SamplingParams(NUM_NEW, 1.0, seed=index)
        request = GenerateRequest(RequestId(f"{name}/{index}"), prompt, sampling)
        return PartialTokens.of([delta async for delta in engine.generate(request)])  # type: ignore[attr-defined]

    start = time.perf_counter()
    answers = await asyncio.gather(*map(one, range(NUM_REQUESTS)))
    return time.perf_counter() - start, answers


def payload_of(answers: list[PartialTokens]) -> GroupPayload:
    """The answers as a scored group."""
    members = []
    for index, said in enumerate(answers):
        prompt = np.array([2 + (index + place) % 20 for place in range(NUM_PROMPT)], np.int32)
        ids = np.concatenate([prompt, said.token_ids])
        mask = np.arange(len(ids)) >= NUM_PROMPT
        behavior = np.zeros(len(ids), np.float32)
        behavior[mask] = said.logprobs
        members.append(
            Trajectory(
                TrajectoryId(str(index)), TaskId("t"), ids, mask, behavior, said.spans, "", "", "stop",
                reward=float(index % 2), routes=None if said.routes is None else padded_routes(said.routes, len(ids)),
            )
        )  # fmt: skip
    return GroupPayload(GroupId(0), tuple(members))


async def measure(name: str, shape: ModelShape, folder: Path, num_pairs: int) -> None:
    """Print the rows of one model."""
    from penstock.rollout.engines.vllm.engine import VllmEngine

    model = ModelConfig(path=str(folder), max_context_tokens=128, shape=shape)
    create_policy(model, character_tokenizer(), str(folder), seed=0)
    config = VllmEngineConfig(type="vllm", max_num_seqs=NUM_REQUESTS, kv_cache_gib=0.2)
    spec = EngineSpec(EngineId("e"), str(folder), model, config, "cpu", "keep_kv", seed=0, threads=1)
    engines = [VllmEngine(replace(spec, records_routes=records)) for records in (False, True)]
    trainer = build_trainer(
        TrainerSpec(
            str(folder), model, TRAINER,
            AlgorithmConfig(correction=CorrectionConfig()), "cpu", 1, 0, 1.0, NUM_NEW,
        )
    )  # fmt: skip
    seconds: list[tuple[float, float]] = []
    try:
        for engine in engines:
            await engine.start()
            layout = EngineLayout("vllm", await engine.layout(trainer.training_sharding().tensors))
            await Publisher(trainer, layout, str(folder)).publish(0, engine)
        for pair in range(-2, num_pairs):
            found = [await generate(engines[index], f"{pair}") for index in ((0, 1) if pair % 2 else (1, 0))]
            took = [one[0] for one in found]
            seconds.append(tuple(took if pair % 2 else took[::-1]))  # type: ignore[arg-type]
            recorded = found[1 if pair % 2 else 0][1]
    finally:
        for engine in engines:
            await engine.shutdown()
    row(f"{name}: generation, s", seconds[2:])
    payload = payload_of(recorded)
    routes = payload.trajectories[0].routes
    print(f"| {name}: bytes of routes per token | {0 if routes is None else routes[0].nbytes} | | | |")
    without = replace(payload, trajectories=tuple(replace(one, routes=None) for one in payload.trajectories))
    steps: list[tuple[float, float]] = []
    for pair in range(-2, num_pairs):
        took = []
        for group in (without, payload) if pair % 2 else (payload, without):
            start = time.perf_counter()
            trainer.step([group], 0)
            took.append(time.perf_counter() - start)
        steps.append(tuple(took if pair % 2 else took[::-1]))  # type: ignore[arg-type]
    row(f"{name}: trainer's step, s", steps[2:])


def row(name: str, pairs: list[tuple[float, float]]) -> None:
    """Print medians and the ratio of the pairs."""
    ratios = np.array([second / first for first, second in pairs])
    spread = np.percentile(ratios, [25, 75])
    print(
        f"| {name} | {median(one for one, _ in pairs):.3f} | {median(two for _, two in pairs):.3f} | "
        f"{np.median(ratios):.3f} | {spread[0]:.3f} to {spread[1]:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    os.environ.update(vllm_environment("cpu", threads=1))
    print("\n".join(f"- {line}" for line in provenance()))
    print(f"\n| {options.pairs} pairs | without | with | ratio, median | quartiles |\n|---|---|---|---|---|")
    for model_name, model_shape in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            asyncio.run(measure(model_name, model_shape, Path(place), options.pairs))
