"""A game of two players and drafts that fork and join train in one run, with config only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.small_run import TWO_ROUTES, Train
from tests.tiny_policy import tiny_shape

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = tiny_shape(vocab_size=32, hidden_size=64, head_dim=32)
STEPS, GROUPS = 4, 8


def rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    for table in sorted(run_dir.rglob("step_*.parquet")):
        yield from pq.read_table(table).to_pylist()


@TWO_ROUTES
def test_a_game_and_drafts_train(train: Train, tmp_path: Path) -> None:
    source = (EXAMPLES / "drafts.py").read_text()
    assert sum(bool(line.strip()) and not line.startswith('"""') for line in source.splitlines()) <= 30
    for name in ("drafts.py", "nim.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    policy = tmp_path / "policy"
    create_policy(ModelConfig(max_context_tokens=128, shape=SHAPE), character_tokenizer(), str(policy), seed=0)
    overrides = [
        "experiment=arithmetic",
        "env.factory=nim:NimGame",
        "env.args={low: 4, high: 40}",
        "env.episode.max_turns=40",
        "+env.streams.game={weight: 1}",
        "+env.streams.drafts={factory: 'drafts:Drafts', args: {digits: 1}}",
        "env.episode.max_threads=4",
        "reward=episode",
        "rollout/engine=torch",
        "rollout.sampling.max_new_tokens=6",
        "trainer.backend=torch",
        f"dataflow.batch_groups={GROUPS}",
        f"total_steps={STEPS}",
        "evaluation.num_tasks=2",
        "name=threads",
        f"model.path={policy}",
        "model.max_context_tokens=128",
    ]
    train(tmp_path, overrides)
    run_dir = tmp_path / "runs" / "threads"
    summary = read_summary(run_dir)
    assert (summary["ledger"]["trained"], summary["ledger"]["failed"]) == (STEPS * GROUPS, 0)
    assert summary["max_staleness_seen"] <= summary["max_staleness_configured"]
    threads = read_metric(run_dir, "env/threads")
    assert all(1 < mean <= 4 for mean in threads)
    # Behavior logprobs of every thread are the trainer's at the same version: forks begin with the right tokens.
    assert max(fresh_mismatches(run_dir)) < 1e-4
    shapes = [[(name, parent) for name, parent, _ in json.loads(row["threads"])] for row in rows(run_dir)]
    assert [("main", None), *((f"draft{index}", "main") for index in range(3))] in shapes
    assert any(shape[:1] == [("first", None)] for shape in shapes)
