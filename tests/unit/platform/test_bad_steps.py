"""Skipped steps in the training loop: the dumped batch, how training continues, and when the run stops."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.dataflow.errors import TrainingError
from penstock.platform.metrics.trajectory_table import MAX_KEPT, BadBatches
from penstock.platform.run import controller, mismatch_trend
from tests.runs import GROUPS, STEPS, run_of


async def test_a_skipped_batch_is_written_whole_with_its_metrics(tmp_path: Path) -> None:
    notes: list[str] = []
    run = run_of({1, 2, 4}, tmp_path, notes)
    await controller.train(run)
    assert run.version == STEPS
    assert sorted(path.name for path in (tmp_path / "bad_batches").iterdir()) == [f"{n}.parquet" for n in (1, 2, 3)]
    written = [pq.ParquetFile(tmp_path / "bad_batches" / f"{number}.parquet").read() for number in (1, 2, 3)]
    groups = [set(table["group_id"].to_pylist()) for table in written]
    assert [len(one) for one in groups] == [GROUPS] * 3
    assert not groups[0] & groups[1], "each is a batch of its own"
    assert [table.schema.metadata[b"version"] for table in written] == [b"1", b"1", b"2"]
    assert json.loads(written[0].schema.metadata[b"metrics"]) == {"loss/grad_norm": "inf"}
    assert written[0].num_rows == 2 * GROUPS, "all, not a sample"
    for row in written[0].to_pylist():
        assert row["reward"] is not None
        lengths = {len(row[name]) for name in ("token_ids", "loss_mask", "behavior_logprobs")}
        assert len(lengths) == 1
        assert sum(row["loss_mask"]) == row["num_tokens"] > 0
        assert [logprob < 0 for logprob in row["behavior_logprobs"]] == row["loss_mask"]
    assert sum("skipped" in note and "bad_batches" in note for note in notes) == 3


async def test_a_skipped_batch_leaves_the_sample_of_the_last_good_step_alone(tmp_path: Path) -> None:
    await controller.train(run_of({1}, tmp_path, []))
    bad = set(pq.ParquetFile(tmp_path / "bad_batches" / "1.parquet").read()["group_id"].to_pylist())
    samples = sorted((tmp_path / "trajectories").iterdir())
    assert [path.name for path in samples] == [f"step_{version:06d}.parquet" for version in range(1, STEPS + 1)]
    for path in samples:
        assert not bad & set(pq.ParquetFile(path).read()["group_id"].to_pylist())


async def test_too_many_skipped_steps_in_a_row_stop_the_run_and_name_the_batch(tmp_path: Path) -> None:
    run = run_of({1, 2, 3}, tmp_path, [])
    last = re.escape(str(tmp_path / "bad_batches" / "3.parquet"))
    with pytest.raises(TrainingError, match=rf"3 steps in a row .* at v1, .*max_bad_steps is 3\..* in {last}\."):
        await controller.train(run)
    assert run.trainer.num_steps == 4


async def test_a_good_step_between_bad_ones_resets_the_count(tmp_path: Path) -> None:
    run = run_of({0, 1, 3, 4, 6, 7}, tmp_path, [])
    await controller.train(run)
    assert (run.version, run.trainer.num_steps) == (STEPS, 10)


async def test_a_mismatch_that_rises_is_a_metric_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch_trend, "WINDOW_STEPS", 1)
    notes: list[str] = []
    run, seen = run_of(set(), tmp_path, notes), []
    run.trainer.mismatches = [0.01] + [0.05] * (STEPS - 1)
    run._instruments.hub.log = lambda _, metrics: seen.append(metrics.get("mismatch/trend"))
    await controller.train(run)
    assert [trend for trend in seen if trend is not None] == [pytest.approx(5.0)] * (STEPS - 1)
    assert sum("mismatch/abs_logprob_mean has risen from 0.01" in note for note in notes) == 1


async def test_a_warm_up_of_the_critic_is_no_batch_without_a_gradient(tmp_path: Path) -> None:
    for warmup_steps, told in ((0, ["v1"]), (2, ["v3"])):
        notes: list[str] = []
        run = run_of(set(), tmp_path, notes)
        run.trainer.is_silent = True
        run.log._critic_warmup_steps = warmup_steps
        await controller.train(run)
        assert [note.split()[0] for note in notes if "no token of its batch has a gradient" in note] == told


async def test_the_density_of_delta_reaches_the_metrics_of_a_step_and_is_left_out_where_it_was_not_counted(
    tmp_path: Path,
) -> None:
    for share in (0.25, None):
        run, seen = run_of(set(), tmp_path, []), []
        run.publisher.changed_share = share
        run._instruments.hub.log = lambda _, metrics, seen=seen: seen.append(metrics)
        await controller.train(run)
        steps = [metrics for metrics in seen if "weights/bytes" in metrics]
        assert len(steps) == STEPS
        assert {metrics.get("weights/changed_share") for metrics in steps} == {share}


def test_only_the_newest_bad_batches_are_kept(tmp_path: Path) -> None:
    batches = BadBatches(tmp_path)
    for _ in range(MAX_KEPT + 2):
        newest = batches.write(0, [], {})
    numbers = {int(path.stem) for path in newest.parent.iterdir()}
    assert numbers == set(range(3, MAX_KEPT + 3))
