"""Parts of `make gpu-check` that need a process of their own: python benchmarks/gpu_probes.py PROBE MODEL_FOLDER

Each prints its figures, one JSON object, after the word `figures`, and fails with an error that says what is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.dataflow.trajectory import Trajectory
from penstock.platform.cluster import hardware

SHAPE = "Qwen/Qwen2.5-0.5B-Instruct"
PACKAGES = ("torch", "triton", "vllm", "deepspeed", "ray", "transformers", "liger-kernel")
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 48, 96
MAX_MEAN_DIFFERENCE, MAX_Q99_DIFFERENCE = 0.03, 0.25
"""In nats. vLLM on CPU in bfloat16 differs by at most 0.05 over 10,000 tokens (platform/run/logprob_parity.py)."""
SEED = 0
Figures = dict[str, Any]


def share_of_even_tokens(trajectory: Trajectory, **_: object) -> float:
    """A reward that differs between the answers of random weights, and that training can raise."""
    sampled = trajectory.token_ids[trajectory.loss_mask]
    return float((sampled % 2 == 0).mean()) if sampled.size else 0.0


def look_at_machine(_: Path) -> Figures:
    """Versions, devices, and which of them can read each other's memory."""
    import torch

    figures: Figures = {"driver": hardware.nvidia_driver_version() or "unknown", "cuda_of_torch": torch.version.cuda}
    for package in PACKAGES:
        try:
            figures[package] = version(package)
        except PackageNotFoundError:
            figures[package] = "not installed"
    if not torch.cuda.is_available():
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


def write_model_files(folder: Path) -> None:
    """Write the configuration of the 0.5B model and a tokenizer that needs no download."""
    from penstock.platform.config.checkpoint_shapes import packaged_config
    from penstock.rollout.tokenization.tokenizers import byte_tokenizer

    source = packaged_config(SHAPE)
    assert source is not None
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save_pretrained(folder)
    shutil.copy(source, folder / "config.json")


def make_model(folder: Path) -> Figures:
    """Write a model of the shape of Qwen2.5-0.5B with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_files(folder)
    torch.manual_seed(SEED)
    began = time.monotonic()
    # Wider than the 0.02 of a new model: so distributions are peaked, and wrong weights cannot look like right ones.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, initializer_range=0.05))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_model_files(folder)  # save_pretrained has changed the configuration
    return {"parameters": sum(one.numel() for one in model.parameters()), "seconds": time.monotonic() - began}


def compare_logprobs(folder: Path) -> Figures:
    """Logprobs of sampled tokens by vLLM, and by the trainer's forward pass, both in bfloat16."""
    import numpy as np
    import torch

    from penstock.trainer.models.policy_model import load_policy, restore_rotary_buffers

    model, device = model_config(folder), device_name()
    answers = asyncio.run(sample(folder, model, device))
    policy = load_policy(str(folder), model, gradient_checkpointing=False).eval()
    policy.to(torch.bfloat16)
    restore_rotary_buffers(policy)
    policy.to(device)
    differences = []
    for prompt, tokens, logprobs in answers:
        ids = torch.tensor([prompt + tokens], device=device)
        index = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1, device=device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        with torch.no_grad():
            expected, _ = policy(ids, positions, None, index, torch.tensor(tokens, device=device), 1.0)
        differences.append(np.abs(expected.float().cpu().numpy() - np.array(logprobs)))
    every = np.concatenate(differences)
    figures = {
        "tokens": every.size,
        "mean_difference_nat": float(every.mean()),
        "q99_difference_nat": float(np.quantile(every, 0.99)),
        "max_difference_nat": float(every.max()),
    }
    # Negated, so that NaN fails as well.
    if not (
        figures["mean_difference_nat"] <= MAX_MEAN_DIFFERENCE and figures["q99_difference_nat"] <= MAX_Q99_DIFFERENCE
    ):
        raise SystemExit(
            f"engine and trainer differ by {figures['mean_difference_nat']:.4f} nat in the mean and "
            f"{figures['q99_difference_nat']:.3f} at the 99th percentile; rounding explains {MAX_MEAN_DIFFERENCE} and "
            f"{MAX_Q99_DIFFERENCE}"
        )
    return figures


def measure_sleep(folder: Path) -> Figures:
    """Memory of the GPU with an engine that serves, sleeps (levels 1 and 2) and is awake again."""
    return asyncio.run(sleep_and_wake(folder))


async def sleep_and_wake(folder: Path) -> Figures:
    import torch

    def used_gib() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    figures: Figures = {"before_gib": used_gib()}
    model = model_config(folder)
    llm, asked = open_engine(folder, model, "cuda"), prompts(model)[:4]
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
    return figures


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

    from penstock.dataflow.ids import EngineId
    from penstock.rollout.config import VllmEngineConfig
    from penstock.rollout.engines.local_engine import EngineSpec
    from penstock.rollout.engines.vllm.engine import engine_args

    config = VllmEngineConfig(type="vllm", max_num_seqs=32, kv_cache_gib=0.5, gpu_memory_utilization=0.5)
    kind: Any = device
    spec = EngineSpec(EngineId("gpu-check"), str(folder), model, config, kind, "keep_kv", seed=SEED, threads=1)
    return AsyncLLMEngine.from_engine_args(engine_args(spec, config))


def prompts(model: Any) -> list[list[int]]:
    import numpy as np

    ids = np.random.default_rng(SEED).integers(3, min(259, model.shape.vocab_size), (NUM_PROMPTS, PROMPT_TOKENS))
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
        max_tokens=ANSWER_TOKENS, temperature=temperature, seed=SEED, ignore_eos=True, logprobs=0, detokenize=False
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
    "parity": compare_logprobs,
    "sleep": measure_sleep,
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
