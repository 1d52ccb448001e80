"""`python benchmarks/weights.py delta [--policy DIR]`: bytes that the codecs of published weights send for real steps.

The demo's warm-start policy (0.8 M parameters, `penstock sft experiment=arithmetic_sft`) is trained by the trainer of
the demo on the plain-torch backend, without Ray: each step samples groups with `transformers` generate, scores them
with the demo's reward and takes one optimizer step (AdamW, float32 master weights). There are two series: at the demo's
learning rate with 10 steps of warm-up, and at 1e-6 (the default of conf/trainer), as is usual for policies of
billions of parameters. After each step every codec publishes the policy, in float32 and in bfloat16, one buffer per
tensor.

- The sampling policy has the weights that `delta` has decoded in float32.
- After each publish the receiver's bits are compared: `full` and `delta` with the trainer's weights, `int8_delta` with
  the sender's copy of the receiver's values.
- Bytes are those of the tensors sent; names and sizes, a few dozen bytes per buffer, are left out for every codec.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from alone import Others
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.envs.loading import load_reward, load_task_source
from penstock.platform.checks.load import compose_config
from penstock.rollout.tokenization.tokenizers import load_codec
from penstock.trainer.build import build_trainer
from penstock.trainer.spec import TrainerSpec
from penstock.weights.codec.codec import ReceiverState, SenderState, words
from penstock.weights.codec.wire import CODECS
from penstock.weights.config import CodecName
from penstock.weights.dtypes import TORCH_DTYPES

NUM_STEPS, WARMUP_STEPS = 20, 10
SERIES: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "demo": ((f"trainer.optimizer.warmup_steps={WARMUP_STEPS}",), ((0, WARMUP_STEPS), (WARMUP_STEPS, NUM_STEPS))),
    "lr 1e-6": (("trainer.optimizer.lr=1e-6", "trainer.optimizer.warmup_steps=0"), ((0, NUM_STEPS),)),
}
"""Name -> overrides of experiment=arithmetic, and the ranges of steps that are reported together."""
WIRES = ("float32", "bfloat16")
KIB = 1024.0


class Channel:
    """One codec in one wire dtype: a sender and a receiver of every buffer."""

    def __init__(self, codec: CodecName, wire: str, weights: dict[str, Tensor]) -> None:
        self._codec, self._dtype = CODECS[codec], TORCH_DTYPES[wire]
        self._is_exact = codec != "int8_delta"
        self._senders = {name: SenderState(name) for name in weights}
        self._receivers = {name: ReceiverState(name) for name in weights}
        self.live = {name: torch.zeros_like(values, dtype=self._dtype) for name, values in weights.items()}

    def publish(self, weights: dict[str, Tensor], version: int) -> dict[str, Any]:
        """Send one version; returns bytes, changed elements, forms, seconds and the error relative to the update."""
        row: dict[str, Any] = dict.fromkeys(("num_bytes", "num_changed", "encode_s", "decode_s"), 0)
        forms, error, update = Counter[str](), 0.0, 0.0
        for name, values in weights.items():
            current, live = values.to(self._dtype, copy=True), self.live[name]
            update += float((current.double() - live.double()).square().sum())
            started = time.perf_counter()
            encoded = self._codec.encode(current, self._senders[name], version)
            sent = time.perf_counter()
            self._codec.decode(encoded, self._receivers[name], live)
            row["decode_s"] += time.perf_counter() - sent
            row["encode_s"] += sent - started
            # Not timed: every publish is verified.
            expected = current if self._is_exact else self._senders[name].values
            assert expected is not None
            assert torch.equal(words(live), words(expected)), f"{name} of v{version} was received with other bits"
            row["num_bytes"] += encoded.num_bytes
            row["num_changed"] += encoded.num_changed or 0
            forms[encoded.form] += 1
            error += float((current.double() - live.double()).square().sum())
        return row | {"forms": dict(forms), "relative_error": (error / update) ** 0.5 if update else 0.0}


class Sampler:
    """Sampled and scored groups, from a copy of the policy."""

    def __init__(self, policy: str, config: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        self._codec = load_codec(policy)
        self._tasks = load_task_source(config.env, config.seed).train()
        self._reward = load_reward(config.reward)
        self._num_groups, self._group_size = config.dataflow.batch_groups, config.dataflow.group_size
        self._max_new_tokens = config.rollout.sampling.max_new_tokens
        self._temperature = config.rollout.sampling.temperature

    @torch.no_grad()
    def batch(self, weights: dict[str, Tensor], version: int) -> list[GroupPayload]:
        """Groups of the next tasks, sampled by these weights."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name].view_as(parameter))
        tasks = list(islice(self._tasks, self._num_groups))
        prompts = [self._codec.encode_prompt(task.prompt) for task in tasks]
        length = max(map(len, prompts))
        padded = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        result = self._model.generate(
            padded,
            attention_mask=mask,
            do_sample=True,
            temperature=self._temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._max_new_tokens,
            num_return_sequences=self._group_size,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answers = result.sequences[:, length:]
        logits = torch.stack(result.logits, 1) / self._temperature
        logprobs = logits.log_softmax(-1).gather(2, answers.unsqueeze(2)).squeeze(2)
        rows = list(zip(answers.numpy(), logprobs.numpy(), strict=True))
        payloads = []
        for group, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
            members = rows[group * self._group_size : (group + 1) * self._group_size]
            scored = [
                self._scored(task, prompt, *row, f"{group}/{index}", version) for index, row in enumerate(members)
            ]
            payloads.append(GroupPayload(GroupId(group), tuple(scored)))
        return payloads

    def _scored(self, task: Task, prompt: Any, answer: Any, logprobs: Any, name: str, version: int) -> Trajectory:
        stops = np.flatnonzero(np.isin(answer, self._codec.stop_token_ids))
        count = int(stops[0]) + 1 if len(stops) else len(answer)
        trajectory = Trajectory(
            trajectory_id=TrajectoryId(name),
            task_id=task.task_id,
            token_ids=np.array([*prompt, *answer[:count]], np.int32),
            loss_mask=np.arange(len(prompt) + count) >= len(prompt),
            behavior_logprobs=np.concatenate([np.zeros(len(prompt)), logprobs[:count]]).astype(np.float32),
            spans=(Span(version, count),),
            prompt=str(task.prompt),
            response=self._codec.decode(answer[:count]),
            finish_reason="stop" if len(stops) else "length",
        )
        reward = self._reward(trajectory, **task.fields)
        assert isinstance(reward, float)
        trajectory.score(reward, {})
        return trajectory


def measure(policy: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train `NUM_STEPS` steps and publish after each; one entry per step."""
    config = compose_config(
        [
            "experiment=arithmetic",
            f"model.path={policy}",
            "trainer.backend=torch",
            "weights.transport=gather",
            *overrides,
        ]
    )
    spec = TrainerSpec(
        model_path=str(policy),
        model=config.model,
        trainer=config.trainer,
        algorithm=config.algorithm,
        device="cpu",
        threads=1,
        seed=config.seed,
        temperature=config.rollout.sampling.temperature,
        max_new_tokens=config.rollout.sampling.max_new_tokens,
    )
    trainer = build_trainer(spec)
    sampler, weights = Sampler(str(policy), config), trainer.local_weights()
    channels = {wire: {codec: Channel(codec, wire, weights) for codec in CODECS} for wire in WIRES}
    for channel in (channel for some in channels.values() for channel in some.values()):
        channel.publish(weights, 0)
    steps = []
    for version in range(NUM_STEPS):
        report = trainer.step(sampler.batch(channels["float32"]["delta"].live, version), version)
        if report.skipped or not 0 < report.metrics["reward/mean"] < 1:
            raise SystemExit(f"{policy} earned {report.metrics['reward/mean']}: is it of experiment=arithmetic_sft?")
        weights = trainer.local_weights()
        step: dict[str, Any] = {
            name: report.metrics[name] for name in ("loss/lr", "loss/grad_norm", "reward/mean", "mismatch/kl_k3")
        }
        for wire, some in channels.items():
            step[wire] = {codec: channel.publish(weights, report.version) for codec, channel in some.items()}
        steps.append(step)
    return {
        "num_parameters": sum(values.numel() for values in weights.values()),
        "num_buffers": len(weights),
        "trajectories_per_step": config.dataflow.batch_groups * config.dataflow.group_size,
        "optimizer": config.trainer.optimizer.model_dump(),
        "steps": steps,
    }


def measure_codecs(policy: Path) -> dict[str, Any]:
    """Both series.

    Raises:
        SystemExit: If there is no such policy, or it earns nothing.
    """
    if not policy.is_dir():
        raise SystemExit(f"{policy} does not exist. Run: penstock sft experiment=arithmetic_sft, or give --policy DIR.")
    others, series = Others(os.getpid()), {}
    for name, (overrides, _) in SERIES.items():
        series[name] = measure(policy, overrides)
        others.sample()
    return {"series": series, "wall_s": time.monotonic() - others.started, "others_percent": others.percent()}


def delta_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes of the report."""
    header = ["steps", "wire", "density, %", "full, KiB", "delta, KiB", "÷ full", "int8_delta, KiB", "÷ full"]
    rows, notes = [], []
    for name, (_, ranges) in SERIES.items():
        one = results["series"][name]
        for start, stop in ranges:
            steps = one["steps"][start:stop]
            lrs = sorted({f"{step['loss/lr']:.0e}" for step in steps}, key=float)
            label = f"{name}, {start + 1}–{stop}, lr {' … '.join(dict.fromkeys((lrs[0], lrs[-1])))}"
            rows += [[label, wire, *_columns([step[wire] for step in steps], one["num_parameters"])] for wire in WIRES]
        densities = [100 * step["bfloat16"]["delta"]["num_changed"] / one["num_parameters"] for step in one["steps"]]
        rewards = [step["reward/mean"] for step in one["steps"]]
        notes.append(
            f"{name}: bfloat16 density by step, %: {', '.join(f'{density:.2f}' for density in densities)}; "
            f"mean reward {rewards[0]:.3f} at the first step, {rewards[-1]:.3f} at the last"
        )
    one = results["series"]["demo"]
    all_steps = [step for some in results["series"].values() for step in some["steps"]]
    errors = {
        wire: _spread([step[wire]["int8_delta"]["relative_error"] for step in all_steps], "{:.4f}") for wire in WIRES
    }
    notes = [
        f"{one['num_parameters']:,} parameters in {one['num_buffers']} buffers, {one['trajectories_per_step']} sampled "
        f"trajectories per step, {NUM_STEPS} steps of AdamW per series, each from the same warm start; "
        "median (least … greatest)",
        "density: elements whose bits in the wire dtype differ from the previous version",
        *notes,
        "after every publish receivers held the trainer's bits (full, delta) or the sender's copy (int8_delta)",
        f"int8_delta, ‖weights − received‖ ÷ ‖weights − held before‖: float32 {errors['float32']}, bfloat16 "
        f"{errors['bfloat16']}",
        "encode / decode of the whole policy on one thread, ms: "
        + ", ".join(
            f"{codec} {wire} {_milliseconds(all_steps, wire, codec, 'encode_s')} / "
            f"{_milliseconds(all_steps, wire, codec, 'decode_s')}"
            for wire in WIRES
            for codec in CODECS
        ),
        f"took {results['wall_s']:.0f} s; others had {results['others_percent']:.1f} % of the cores meanwhile, which "
        "bears on the times and not on the bytes",
    ]
    return header, rows, notes


def _columns(steps: list[dict[str, Any]], num_parameters: int) -> list[str]:
    """Density and bytes over some steps in one wire dtype."""
    full = steps[0]["full"]["num_bytes"]
    sizes = {codec: [step[codec]["num_bytes"] for step in steps] for codec in CODECS}
    columns = [_spread([100 * step["delta"]["num_changed"] / num_parameters for step in steps]), f"{full / KIB:,.0f}"]
    for codec in ("delta", "int8_delta"):
        columns.append(_spread([size / KIB for size in sizes[codec]], "{:,.0f}"))
        columns.append(f"{median(sizes[codec]) / full:.3f}")
    return columns


def _milliseconds(steps: list[dict[str, Any]], wire: str, codec: str, what: str) -> str:
    return f"{1e3 * median(step[wire][codec][what] for step in steps):.1f}"


def _spread(values: list[float], style: str = "{:.2f}") -> str:
    shown = [style.format(value) for value in (median(values), min(values), max(values))]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} … {shown[2]})"
