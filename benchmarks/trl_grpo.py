"""GRPO by TRL's `GRPOTrainer`, timed step by step. Runs in TRL's own environment; `vs_trl.py` makes it and calls this.

    python trl_grpo.py SPEC.json OUT.json

SPEC holds what both sides share (read from Penstock's configuration by `vs_trl.py`); OUT gets one entry per
optimizer step: wall and CPU seconds from the end of the step before, response tokens, mean reward.
The settings that are TRL's alone, and why, are in `settings`.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets")


class Stopwatch(TrainerCallback):
    """Time from the end of one optimizer step to the end of the next: generation, reward and training."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []  # of all threads
        self._last, self._last_cpu = 0.0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now, now_cpu = time.perf_counter(), time.process_time()
        self.step_s.append(now - self._last)
        self.cpu_s.append(now_cpu - self._last_cpu)
        self._last, self._last_cpu = now, now_cpu


class ExactMatch:
    """Penstock's `envs.arithmetic.exact_match`: the answer ended by itself and what follows its last `;` is right."""

    __name__ = "exact_match"

    def __init__(self, eos_token_id: int) -> None:
        self.rewards: list[float] = []  # mean of each generated batch
        self.num_tokens: list[int] = []  # response tokens of each generated batch, end token included
        self._eos_token_id = eos_token_id

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        rewards = [
            float(bool(ids) and ids[-1] == self._eos_token_id and text.rpartition(";")[2] == gold)
            for text, ids, gold in zip(completions, completion_ids, answer, strict=True)
        ]
        self.rewards.append(sum(rewards) / len(rewards))
        self.num_tokens.append(sum(map(len, completion_ids)))
        return rewards


def settings(spec: dict[str, Any], output_dir: str) -> GRPOConfig:
    """The same algorithm as the demo's, with TRL's settings that make its CPU step fastest."""
    batch = spec["batch_groups"] * spec["group_size"]
    return GRPOConfig(
        output_dir=output_dir,
        max_steps=spec["steps"],
        seed=spec["seed"],
        # The algorithm, from Penstock's configuration.
        num_generations=spec["group_size"],
        generation_batch_size=batch,
        max_completion_length=spec["max_new_tokens"],
        temperature=spec["temperature"],
        beta=0.0,  # no reference model
        loss_type="dapo",  # mean over all response tokens of the batch: Penstock's token_mean
        scale_rewards="group",
        epsilon=spec["clip_low"],
        epsilon_high=spec["clip_high"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        adam_beta1=spec["betas"][0],
        adam_beta2=spec["betas"][1],
        adam_epsilon=spec["eps"],
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["gradient_clip_norm"],
        # What makes TRL fast here.
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=batch // spec["micro_batch"],
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,  # float32 as in the demo, and emulated bfloat16 is slower
        shuffle_dataset=False,  # the task source's own order
        dataloader_pin_memory=False,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main(spec_path: Path, out_path: Path) -> None:
    spec = json.loads(spec_path.read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["policy"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["policy"], dtype=torch.float32, attn_implementation="sdpa")
    tasks = [json.loads(line) for line in Path(spec["tasks"]).read_text().splitlines()]
    stopwatch, reward = Stopwatch(), ExactMatch(tokenizer.eos_token_id)
    with TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(spec, output_dir),
            train_dataset=Dataset.from_list(tasks),
            processing_class=tokenizer,
            callbacks=[stopwatch],
        )
        trainer.train()
    out = {
        "step_s": stopwatch.step_s,
        "cpu_s": stopwatch.cpu_s,
        "num_tokens": reward.num_tokens,
        "rewards": reward.rewards,
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
    }
    out_path.write_text(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
