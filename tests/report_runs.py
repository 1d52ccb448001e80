"""A run directory with everything that the report shows, of any length, without running anything."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.ledger import GroupState, Ledger, Reason
from penstock.dataflow.trajectory import Episode, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.platform.metrics.summary import LedgerCounts, RunSummary, write_staleness, write_summary
from penstock.platform.metrics.timeline import Timeline
from penstock.platform.metrics.trackers.jsonl import JsonlTracker
from penstock.platform.metrics.trajectory_table import TrajectoryTable

HOSTILE = "</td></script><script>document.title='hostile'</script><img src=x onerror=document.title='hostile'>"
WORDS = ["The ", "sum ", "of ", "47 ", "and ", "85 ", "is ", "132", ".\n", "So ", "we ", "add ", "7 ", "+ ", "5"]
GROUPS, SIZE = 4, 8


def write_run(run_dir: Path, num_steps: int, num_recorded: int = 40) -> Path:
    """Write the files of a finished run of `num_steps` steps; of `num_recorded` of them with trajectories."""
    rng = np.random.default_rng(0)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(
        f"name: a-run-with-a-rather-long-name-of-several-words\nseed: 7\ntotal_steps: {num_steps}\n"
        "model: {path: organisation/some-model-with-a-long-name-7B-Instruct}\n"
        "dataflow: {max_staleness: 2, batch_groups: 4, group_size: 8}\n"
        "reward: {fn: my_project.rewards.a_reward_with_a_long_name}\n"
    )
    (run_dir / "environment.json").write_text(
        json.dumps({"command": "penstock train experiment=arithmetic trainer.optimizer.lr=1e-4 " + "x=1 " * 20})
    )
    (run_dir / "failures.json").write_text(
        json.dumps([{"kind": "reward", "detail": f"Traceback\n  File 'r.py'\nKeyError: 'answer' {HOSTILE}"}])
    )
    tracker = JsonlTracker(run_dir)
    for step in range(0, num_steps + 1, max(1, num_steps // 20)):
        tracker.log(step, {f"eval/accuracy/{name}": 0.4 + 0.5 * step / num_steps for name in ("algebra", "geometry")})
        tracker.log(step, {"eval/accuracy": 0.5, "eval/reward_mean": 0.5 + 0.3 * step / num_steps})
        tracker.log(step, {f"eval/pass_at/{k}": 1 - 0.4 / k for k in (2, 4, 16)})
    for step in range(1, num_steps + 1):
        learned = 1 - math.exp(-3 * step / num_steps)
        noise = float(rng.normal())
        tracker.log(step, {
            "reward/mean": 0.3 + 0.6 * learned + 0.05 * noise, "reward/zero_variance_share": 0.2 + 0.3 * learned,
            "length/mean_tokens": 40 + 20 * learned + noise, "length/truncated_share": 0.02,
            "loss/entropy": 1.5 - learned, "loss/grad_norm": 0.4 + 0.1 * abs(noise), "ratio/behavior_mean": 1.0,
            "mismatch/abs_logprob_mean": 0.01, "weights/stall_s": 0.02, "weights/changed_share": 0.9,
            "staleness/mean_versions": 0.8, "staleness/max_versions": 2.0, "idle/trainer_share": 0.25,
            "idle/engine_share": 0.1, "throughput/step_s": 1.5, "throughput/generated_tokens_per_s": 5000 + 100 * noise,
            "throughput/trained_tokens_per_s": 4800.0, "flow/retries": 12.0 * learned,
            **{f"reward/part/{index}": noise for index in range(60)},
        })  # fmt: skip
    tracker.close()
    table = TrajectoryTable(run_dir, token_texts=lambda ids: [WORDS[token % len(WORDS)] for token in ids])
    for step in np.unique(np.linspace(1, num_steps, num_recorded).astype(int)).tolist():
        members = [member(step * GROUPS + group, index, rng) for group in range(2) for index in range(SIZE)]
        trained = {
            one.trajectory_id: (
                np.where(one.loss_mask, one.behavior_logprobs + 0.02, np.nan).astype(np.float32),
                np.where(one.loss_mask, (one.reward or 0.0) - 0.5, np.nan).astype(np.float32),
            )
            for one in members
        }
        table.write_step(step, members, version=step + 1, trained=trained)
    write_timeline(run_dir, num_steps, rng)
    write_staleness(run_dir, {0: 300, 1: 500, 2: 200})
    admitted = num_steps * GROUPS
    write_summary(run_dir, RunSummary(
        name="a-run-with-a-rather-long-name-of-several-words", seed=7, status="completed", version="0.1.0",
        eval_before=0.4, eval_after=0.9, reward_first=0.31, reward_last=0.87, steps=num_steps, wall_s=num_steps * 1.5,
        trained_groups=admitted - 9, max_staleness_configured=2, max_staleness_seen=2, share_tokens_stale=0.7,
        multi_version_trajectories=900, tokens_generated=10**7, tokens_trained=9 * 10**6, peak_memory_gib=3.2,
        ledger=LedgerCounts(admitted, admitted - 9, 4, 3, 2, 0),
        untrained={"dropped(stale)": 4, "filtered(zero_variance)": 3, "failed(reward)": 2},
        failed_attempts={f"reward: KeyError: 'answer' {HOSTILE}": 14},
    ))  # fmt: skip
    return run_dir


def member(group: int, index: int, rng: np.random.Generator) -> Trajectory:
    """A trajectory of two turns with an observation between them; the text of one is hostile."""
    counts = [6, int(rng.integers(10, 60)), 8, int(rng.integers(10, 60))]
    mask = np.repeat([False, True, False, True], counts)
    num_sampled, observed = counts[1] + counts[3], HOSTILE if index == 3 else "the tool answers 132"
    turns = (
        Turn("I call the tool", "stop", counts[1], observed, counts[2]),
        Turn("So it is 132", "length" if index == 2 else "stop", counts[3]),
    )
    return Trajectory(
        trajectory_id=TrajectoryId(f"{group}/{index}"),
        task_id=TaskId(f"algebra/train/{group}"),
        token_ids=rng.integers(0, 1000, len(mask)).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(0.6, len(mask)), 0.0).astype(np.float32),
        spans=(Span(3, 5), Span(4, num_sampled - 5)) if index % 2 else (Span(4, num_sampled),),
        prompt="What is 47 + 85? Think first, then call the tool `add`, and give the answer as a number." * 3,
        response=HOSTILE,
        finish_reason="length" if index == 2 else "stop",
        reward=float(rng.integers(0, 2)),
        reward_parts={"exact": 1.0, "<i>form</i>": 0.5},
        episode=Episode(turns, "done"),
        retried_after="reward: it took too long" if index == 5 else "",
    )


def write_timeline(run_dir: Path, num_steps: int, rng: np.random.Generator) -> None:
    """A timeline whose groups overlap the steps."""
    now = [1.7e9]

    def clock() -> float:
        now[0] += float(rng.exponential(0.05))
        return now[0]

    timeline = Timeline(run_dir, GROUPS, num_steps, clock)
    ledger = Ledger(listeners=(timeline,))
    live = [ledger.admit(TaskId(f"task-{index}"), SIZE).group_id for index in range(2 * GROUPS)]
    for step in range(1, num_steps + 1):
        batch, live = live[:GROUPS], live[GROUPS:]
        for group in batch:
            ledger.move(group, GroupState.SCORING)
            ledger.move(group, GroupState.READY)
        began = now[0]
        for group in batch:
            ledger.move(group, GroupState.TRAINING)
        live += [ledger.admit(TaskId(f"task-{step}-{index}"), SIZE).group_id for index in range(GROUPS)]
        for group in batch:
            ledger.move(group, GroupState.TRAINED)
        timeline.add("trainer", f"step v{step}", began, now[0])
        timeline.add("publish", f"publish v{step}", now[0], clock(), bytes=1_000_000, stall_s=0.01)
        ledger.mark(step)
        if step % 8 == 0:
            timeline.add("evaluation", f"evaluation at v{step}", began, clock(), tasks=64)
            timeline.add("checkpoint", f"checkpoint v{step}", began, clock())
    ledger.end(live[0], GroupState.FAILED, Reason.REWARD)
    timeline.close()
