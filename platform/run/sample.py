"""`penstock sample`: samples answers to tasks, scores them, and writes both as JSON lines.

`answers.jsonl` has a row per answer. `pairs.jsonl` has a row `prompt, chosen, rejected` for answers to one task that
differ in reward, the format that `penstock rm` and `penstock dpo` read with `env=dataset`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory, rounding_error
from penstock.envs.streams import load_held_out, load_task_streams
from penstock.platform.cluster.actor_factory import model_path
from penstock.platform.config.schema import RunConfig, SampleConfig
from penstock.platform.metrics.console import RunConsole
from penstock.platform.metrics.progress import Progress, format_duration
from penstock.platform.run.evaluation import sample_and_score
from penstock.platform.run.lifecycle import EXIT_OK, Stop, run_to_end
from penstock.platform.run.run_dir import in_new_run_dir, mark_finished
from penstock.platform.run.serving import STARTING, Serving, prompt_limit, rollout_sampling, serving
from penstock.rollout.trajectory.rollout_context import RolloutContext

ANSWERS_FILE, PAIRS_FILE = "answers.jsonl", "pairs.jsonl"
TASKS_PER_BATCH = 512


def run_sample(config: RunConfig) -> int:
    """Run `penstock sample`. Prints one JSON line with the counts at the end and returns the exit code."""
    return run_to_end(lambda: in_new_run_dir(config, partial(_run, config, config.sample)), Stop(config.stop_grace_s))


async def _run(config: RunConfig, sample: SampleConfig, run_dir: Path) -> int:
    console, started = RunConsole(0, config.console), time.monotonic()
    console.header(
        config.name,
        {
            "policy": model_path(config),
            "answers": f"{sample.answers_per_task} each to {sample.num_tasks} {sample.split} tasks",
            "run": str(run_dir),
        },
    )
    counts: Counter[str] = Counter()
    rewards: list[float] = []

    def progress() -> Progress:
        wanted = (sample.num_tasks - counts["skipped"]) * sample.answers_per_task
        return Progress("sampling", counts["answers"], wanted, "answers") if is_serving else STARTING

    is_serving = False
    async with AsyncExitStack() as stack:
        stack.enter_context(console.showing(progress))
        policy = await stack.enter_async_context(serving(config, "sample"))
        is_serving = True
        sampling, limit = rollout_sampling(config, policy.runner.codec), prompt_limit(config, policy.runner.codec)
        with (run_dir / ANSWERS_FILE).open("w") as answers, (run_dir / PAIRS_FILE).open("w") as pairs:
            numbered = enumerate(_tasks(config, sample))
            while batch := list(islice(numbered, TASKS_PER_BATCH)):
                tasks = [(index, task) for index, task in batch if limit is None or limit.fits(task)]
                counts["tasks"] += len(batch)
                counts["skipped"] += len(batch) - len(tasks)
                groups = (_sample_group(policy, GroupId(index), task, sampling, sample) for index, task in tasks)
                for (_, task), group in zip(tasks, await asyncio.gather(*groups), strict=True):
                    counts["failed"] += sample.answers_per_task - len(group)
                    for trajectory in group:
                        answers.write(_line(answer_row(task, trajectory)))
                        counts["answers"] += 1
                        counts["truncated"] += trajectory.finish_reason != "stop"
                    counts["abstained"] += sum(trajectory.has_abstained for trajectory in group)
                    judged = [trajectory for trajectory in group if not trajectory.has_abstained]
                    rewards += map(_reward, judged)
                    for chosen, rejected in islice(ranked_pairs(judged), sample.pairs_per_task):
                        pairs.write(_line({"prompt": task.prompt, "chosen": chosen.text, "rejected": rejected.text}))
                        counts["pairs"] += 1
                elapsed = format_duration(time.monotonic() - started)
                console.note(f"{counts['answers']} answers  {counts['pairs']} pairs  {elapsed}")
    if counts["skipped"]:
        answer = f"{sampling.max_new_tokens} tokens in model.max_context_tokens={config.model.max_context_tokens}"
        if counts["skipped"] == counts["tasks"]:
            raise PenstockError(
                f"sample: the prompts of all {counts['tasks']} tasks leave no space for an answer of {answer}, so "
                "there is nothing to write. Use a larger model.max_context_tokens, or other tasks."
            )
        console.note(f"{counts['skipped']} of {counts['tasks']} tasks left out: no space for an answer of {answer}")
    if not counts["answers"]:
        raise PenstockError(f"sample: all {counts['failed']} answers failed, so there is nothing to write.")
    mark_finished(config)
    figures = {name: counts[name] for name in ("answers", "skipped", "failed", "abstained", "truncated", "pairs")}
    reward_mean = round(fmean(rewards), 6) if rewards else None
    print(json.dumps({"model": model_path(config), "reward_mean": reward_mean, **figures, "run": str(run_dir)}))
    return EXIT_OK


def _tasks(config: RunConfig, sample: SampleConfig) -> Iterator[Task]:
    if sample.split == "held_out":
        yield from load_held_out(config.env, config.seed, sample.num_tasks)
        return
    streams = load_task_streams(config.env, config.seed)
    for stream in streams:
        yield from islice(stream.tasks, -(-sample.num_tasks // len(streams)))


async def _sample_group(
    policy: Serving, group_id: GroupId, task: Task, sampling: SamplingParams, sample: SampleConfig
) -> list[Trajectory]:
    """Sample and score the answers to one task. Answers whose every attempt failed are left out."""
    context = RolloutContext(task, group_id)

    async def answer(index: int) -> Trajectory | None:
        seeded = sampling.of(group_id, index)
        try:
            return await sample_and_score(policy.runner, policy.rewards, context, index, seeded)
        except TrajectoryError:
            return None

    answers = await asyncio.gather(*(answer(index) for index in range(sample.answers_per_task)))
    return [trajectory for trajectory in answers if trajectory is not None]


def answer_row(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """Row of an answer in `answers.jsonl`."""
    return {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "response": trajectory.text,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "finish_reason": trajectory.finish_reason,
        "num_tokens": trajectory.num_sampled_tokens,
        "fields": dict(task.fields),
    }


def ranked_pairs(group: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, Trajectory]]:
    """Yield pairs (better, worse) whose rewards differ by more than rounding, the largest difference first.

    Each pair of texts is yielded once. Truncated answers are left out, because their end cannot be judged, and so are
    multi-turn conversations, because the prompts of their later turns differ.
    """
    complete = [answer for answer in group if answer.finish_reason == "stop" and answer.episode is None]
    if not complete:
        return
    tolerance = rounding_error([_reward(answer) for answer in complete])
    ranked = sorted(complete, key=lambda answer: -_reward(answer))
    seen: set[tuple[str, str]] = set()
    for better, worse in sorted(product(ranked, ranked), key=lambda pair: _reward(pair[1]) - _reward(pair[0])):
        texts = (better.text, worse.text)
        if _reward(better) - _reward(worse) > tolerance and texts not in seen:
            seen.add(texts)
            yield better, worse


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "the trajectory was scored"
    return trajectory.reward


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
