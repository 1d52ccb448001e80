"""GRPO by TRL's `GRPOTrainer`, timed step by step. Runs in TRL's own environment; `vs_trl.py` makes it and calls this.

    python trl_grpo.py SPEC.json OUT.json

With `eval_tasks` and `eval_every` in SPEC, greedy accuracy on those tasks is measured too, while the clock stands. SPEC
holds what both sides share (read from Penstock's configuration by `vs_trl.py`); OUT gets one entry per
optimizer step: wall and CPU seconds from the end of the step before, response tokens, mean reward.
The settings that are TRL's alone, and why, are in `settings`.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
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

    def restart(self) -> None:
        """Count from now."""
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.restart()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now, now_cpu = time.perf_counter(), time.process_time()
        self.step_s.append(now - self._last)
        self.cpu_s.append(now_cpu - self._last_cpu)
        self._last, self._last_cpu = now, now_cpu


class Accuracy(TrainerCallback):
    """Greedy accuracy on held-out tasks after every so many steps, and before the first one.

    Attributes:
        found: (steps so far, share of the tasks that are solved).
    """

    def __init__(self, tasks: list[dict[str, str]], every: int, max_new_tokens: int, stopwatch: Stopwatch) -> None:
        self.found: list[tuple[int, float]] = []
        self._tasks, self._every, self._max_new_tokens, self._stopwatch = tasks, every, max_new_tokens, stopwatch

    def on_train_begin(self, *_: Any, model: Any, processing_class: Any, **__: Any) -> None:
        self._measure(0, model, processing_class)

    def on_step_end(self, _: Any, state: Any, *__: Any, model: Any, processing_class: Any, **___: Any) -> None:
        if state.global_step % self._every == 0:
            self._measure(state.global_step, model, processing_class)

    @torch.no_grad()
    def _measure(self, step: int, model: Any, tokenizer: Any) -> None:
        prompts = tokenizer([task["prompt"] for task in self._tasks], return_tensors="pt", padding=True)
        ids = model.generate(**prompts, do_sample=False, max_new_tokens=self._max_new_tokens)
        answers = ids[:, prompts["input_ids"].shape[1] :].tolist()
        ended = [
            ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else [] for ids in answers
        ]
        texts = tokenizer.batch_decode(ended, skip_special_tokens=True)
        rewards = ExactMatch(tokenizer.eos_token_id)(texts, ended, [task["answer"] for task in self._tasks])
        self.found.append((step, sum(rewards) / len(rewards)))
        self._stopwatch.restart()


class Named:
    """A function of examples/ as a reward of TRL, on chat prompts."""

    def __init__(self, name: str) -> None:
        self.rewards: list[float] = []  # mean of each generated batch
        self.num_tokens: list[int] = []  # response tokens of each generated batch, end token included
        module, _, self.__name__ = name.partition(":")
        sys.path.insert(0, str(Path(__file__).parents[1]))
        self._function = getattr(import_module(module), self.__name__)

    def __call__(
        self, completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        texts = (messages[-1]["content"] for messages in completions)
        rewards = [
            self._function(SimpleNamespace(response=text), answer=gold)
            for text, gold in zip(texts, answer, strict=True)
        ]
        self.rewards.append(sum(rewards) / len(rewards))
        self.num_tokens.append(sum(map(len, completion_ids)))
        return rewards


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
    stopwatch = Stopwatch()
    is_demo = spec["reward"].endswith(":exact_match")
    reward = ExactMatch(tokenizer.eos_token_id) if is_demo else Named(spec["reward"])
    callbacks: list[TrainerCallback] = [stopwatch]
    if "eval_tasks" in spec:
        held_out = [json.loads(line) for line in Path(spec["eval_tasks"]).read_text().splitlines()]
        callbacks.append(Accuracy(held_out, spec["eval_every"], spec["max_new_tokens"], stopwatch))
    with TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(spec, output_dir),
            train_dataset=Dataset.from_list(tasks),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        trainer.train()
    out = {
        "step_s": stopwatch.step_s,
        "cpu_s": stopwatch.cpu_s,
        "num_tokens": reward.num_tokens,
        "rewards": reward.rewards,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "accuracies": callbacks[-1].found if isinstance(callbacks[-1], Accuracy) else [],
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
    }
    out_path.write_text(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
