"""The cost of a weight update for requests in flight: the pause, and the drift caused by the old KV cache.

    python benchmarks/in_flight.py pause   (1 min; writes benchmarks/results/in_flight_pause.md)
    python benchmarks/in_flight.py drift   (1 min; writes benchmarks/results/in_flight_drift.md)

`pause`: the demo's policy in vLLM, 32 running requests. In turns: vLLM's own `pause_generation` and
`resume_generation` with nothing between them, and a whole publish of new weights through shared memory. The stall is
the time from freezing to resuming.

`drift`: a token after a swap with `update_mode=keep_kv` is sampled from the new weights with keys and values that the
old ones wrote. Its drift is |log q(y) − log π(y)|, nat: q is the distribution that the torch engine sampled it from, π
that of a fresh forward of the trainer with the weights that y is stamped with. Before each publish the trainer makes a
real AdamW step on a sequence task; the swap happens when answers are half complete. `recompute_kv` is measured as well:
its drift is rounding only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from provenance import provenance
from vs_trl_report import RESULTS

from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.versions import join_spans, versions_per_token
from penstock.platform.checks.load import compose_config
from penstock.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec, LocalEngine
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.build import build_trainer
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter

ROUNDS, PAUSED_ANSWERS = 40, 32
WARM_STEPS, PUBLISHES, ANSWERS, TOKENS = 30, 6, 16, 64
LEARNING_RATES = (5e-5, 1e-3)
UPDATE_MODES: tuple[Literal["keep_kv", "recompute_kv"], ...] = ("keep_kv", "recompute_kv")


class Publisher:
    """One training rank that publishes into an engine's version buffers."""

    def __init__(self, trainer: PolicyTrainer, layout: EngineLayout, folder: str) -> None:
        self._trainer = trainer
        self._transfer = ShardTransfer.between(trainer.training_sharding(), layout, "float32", folder)
        self._writer = ShardWriter(self._transfer, 0, ShardFiles(self._transfer))

    async def publish(self, version: int, engine: LocalEngine) -> float:
        """Seconds of the stall."""
        tensors = self._trainer.local_weights()
        self._writer.write(version, tensors)
        ack = await engine.update_weights(self._transfer.manifest(version, self._writer.sums(tensors)))
        return ack.stall_s


def trainer_of(model: ModelConfig, lr: float) -> PolicyTrainer:
    spec = TrainerSpec(
        model_path=str(model.path),
        model=model,
        trainer=TrainerConfig(backend="torch", max_tokens_per_micro_batch=4096, optimizer=OptimizerConfig(lr=lr)),
        algorithm=AlgorithmConfig(),
        device="cpu",
        threads=1,
        seed=0,
        temperature=1.0,
        max_new_tokens=TOKENS,
    )
    return build_trainer(spec)


@asynccontextmanager
async def running(engine: LocalEngine) -> AsyncIterator[LocalEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


async def follow(engine: LocalEngine, request: GenerateRequest, deltas: list[TokenDelta], moved: asyncio.Event) -> None:
    async for delta in engine.generate(request):
        deltas.append(delta)
        if sum(len(one.token_ids) for one in deltas) >= request.sampling.max_new_tokens // 2:
            moved.set()


async def pauses(model: ModelConfig, folder: str) -> dict[str, list[float]]:
    """Seconds from freezing to resuming, by what happened in between."""
    from penstock.rollout.engines.vllm.engine import VllmEngine

    config = VllmEngineConfig(type="vllm", max_num_seqs=PAUSED_ANSWERS, kv_cache_gib=0.25, enforce_eager=True)
    spec = EngineSpec(EngineId("engine-0"), str(model.path), model, config, "cpu", "keep_kv", seed=0, threads=1)
    trainer = trainer_of(model, 1e-4)
    found: dict[str, list[float]] = {"vLLM's own pause and resume": [], "a publish": []}
    async with running(VllmEngine(spec)) as engine:
        layout = EngineLayout("vllm", await engine.layout(trainer.training_sharding().tensors))
        publisher = Publisher(trainer, layout, folder)
        await publisher.publish(0, engine)
        llm: Any = engine._open()  # type: ignore[attr-defined]  # noqa: SLF001 - its own pause, without ours
        max_new_tokens = model.max_context_tokens - 8
        numbers = iter(range(10**9))

        async def answer_repeatedly() -> None:
            while True:
                request = GenerateRequest(RequestId(f"{next(numbers)}"), (3, 4, 5, 6), SamplingParams(max_new_tokens))
                await follow(engine, request, [], asyncio.Event())

        tasks = [asyncio.create_task(answer_repeatedly()) for _ in range(PAUSED_ANSWERS)]
        await asyncio.sleep(1.0)
        for version in range(1, ROUNDS + 1):
            started = time.monotonic()
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.resume_generation()
            found["vLLM's own pause and resume"].append(time.monotonic() - started)
            await asyncio.sleep(0.2)
            found["a publish"].append(await publisher.publish(version, engine))
            await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def examples(seed: int) -> list[tuple[list[int], list[int]]]:
    """Counting with a step width: a task that can be learned."""
    rng = np.random.default_rng(seed)
    starts, steps = rng.integers(3, 30, ANSWERS), rng.integers(1, 5, ANSWERS)
    return [([3 + s % 27], [3 + (s + k * d) % 27 for k in range(1, 80)]) for s, d in zip(starts, steps, strict=True)]


async def drifts(model: ModelConfig, update_mode: Literal["keep_kv", "recompute_kv"], lr: float) -> np.ndarray:
    """`[n] float64`, nat: the drift of all tokens after a swap."""
    trainer = trainer_of(model, lr)
    config = TorchEngineConfig(type="torch", max_num_seqs=ANSWERS, journal_interval_tokens=4)
    spec = EngineSpec(EngineId("engine-0"), str(model.path), model, config, "cpu", update_mode, seed=0, threads=1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        async with running(TorchEngine(spec)) as engine:
            layout = EngineLayout("torch", await engine.layout(trainer.training_sharding().tensors))
            publisher = Publisher(trainer, layout, folder)
            await publisher.publish(0, engine)
            for version in range(1, PUBLISHES + 1):
                prompts = [prompt for prompt, _ in examples(100 + version)]
                answers: list[list[TokenDelta]] = [[] for _ in prompts]
                half_way = [asyncio.Event() for _ in prompts]
                trainer.supervised_step(examples(version))
                requests = [
                    GenerateRequest(RequestId(f"{version}/{index}"), tuple(prompt), SamplingParams(TOKENS))
                    for index, prompt in enumerate(prompts)
                ]
                each = zip(requests, answers, half_way, strict=True)
                tasks = [asyncio.create_task(follow(engine, *one)) for one in each]
                await half_way[0].wait()
                await publisher.publish(version, engine)
                await asyncio.gather(*tasks)
                tokens = [[token for delta in one for token in delta.token_ids] for one in answers]
                expected = trainer.token_logprobs(list(zip(prompts, tokens, strict=True)))
                sampled = np.array([value for one in answers for delta in one for value in delta.logprobs])
                spans = [join_spans([span for delta in one for span in delta.spans]) for one in answers]
                is_behind = np.concatenate([versions_per_token(one) == version for one in spans])
                found.append(np.abs(sampled - expected)[is_behind])
    return np.concatenate(found)


def demo_policy(folder: str) -> ModelConfig:
    """The demo's policy, new."""
    path = str(Path(folder) / "policy")
    model = compose_config(["experiment=arithmetic"]).model.model_copy(update={"path": path})
    create_policy(model, character_tokenizer(), path, seed=0)
    return model


def report_pause() -> None:
    os.environ.update(vllm_environment("cpu", threads=1))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(pauses(demo_policy(folder), folder))
    rows = [
        [name, f"{1e3 * median(values):.1f}", f"{1e3 * min(values):.1f} … {1e3 * max(values):.1f}", str(len(values))]
        for name, values in found.items()
    ]
    own, ours = (median(values) for values in found.values())
    rows.append(["ours beyond vLLM's, of the medians", f"{1e3 * (ours - own):.1f}", "", ""])
    notes = f"the demo's policy in vLLM, {PAUSED_ANSWERS} running requests, in turns; one worker, one thread"
    write("pause", "Pause of generation for a weight update, ms", ["", "median", "least … greatest", "n"], rows, notes)


def report_drift() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = demo_policy(folder)
        warm = trainer_of(model, 1e-3)
        losses = [warm.supervised_step(examples(1000 + step))["sft/loss"] for step in range(WARM_STEPS)]
        warm.backend.save_hf(str(model.path), [warm.backend.held_weights()])
        rows = []
        for update_mode in UPDATE_MODES:
            for lr in LEARNING_RATES:
                values = asyncio.run(drifts(model, update_mode, lr))
                figures = [f"{figure:.2g}" for figure in (values.mean(), np.quantile(values, 0.99), values.max())]
                rows.append([update_mode, f"{lr:g}", f"{len(values):,}", *figures])
    header = ["update mode", "learning rate", "tokens after a swap", "mean", "99th percentile", "largest"]
    notes = f"the demo's policy after {WARM_STEPS} steps (loss {losses[0]:.2f} → {losses[-1]:.2f}); one swap per answer"
    write("drift", "Change of logprobs after a weight update, due to the old KV cache, nat", header, rows, notes)


def write(section: str, title: str, header: list[str], rows: list[list[str]], note: str) -> None:
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    notes = [note, *provenance(), f"torch {torch.__version__}", f"by: python benchmarks/in_flight.py {section}"]
    text = "\n".join([f"# {title}", "", *lines, "", *(f"- {note}" for note in notes)])
    (RESULTS / f"in_flight_{section}.md").write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = {"pause": report_pause, "drift": report_drift}
    parser.add_argument("section", choices=sections)
    sections[parser.parse_args().section]()


if __name__ == "__main__":
    main()
