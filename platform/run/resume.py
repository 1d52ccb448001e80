"""`penstock resume`, and `penstock train resume=auto`: continue a run from a checkpoint, exactly once.

What is compared first: the configuration (changed keys are named, and only some may change without `--allow-changed`),
the tasks, and the files of the checkpoint. Then the run continues as `penstock train` does, in the same directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.envs.fingerprint import changes, fingerprints
from penstock.platform.checks.load import settled
from penstock.platform.checks.run_dir import read_data
from penstock.platform.config.schema import RunConfig, is_within
from penstock.platform.metrics.evaluation_table import EvaluationTable
from penstock.platform.metrics.progress import waiting
from penstock.platform.metrics.run_files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from penstock.platform.metrics.summary import note_resume
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.metrics.trajectory_table import TrajectoryTable
from penstock.platform.run import training
from penstock.platform.run.checkpoint import Checkpoint, CheckpointFolder, choose_checkpoint
from penstock.platform.run.evaluation import comparable_evaluations, evaluation_from, num_since_best
from penstock.platform.run.lifecycle import EXIT_OK
from penstock.platform.run.live_settings import with_what_was_set
from penstock.platform.run.run_dir import locked, read_json
from penstock.platform.run.saved_config import (
    changed_config,
    differences,
    enter_folder_of,
    read_saved_config,
    write_changed,
)

FREE_KEYS = (
    "total_steps",
    "max_hours",
    "stop_grace_s",
    "checkpoint",
    "evaluation",
    "console",
    "tracker",
    "cluster",
    "rollout.num_engines",
    "rollout.engine.tensor_parallel_size",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "trainer.num_ranks",
    "trainer.fsdp_copies",
    "trainer.expert_parallel",
    "trainer.zero_stage",
    "trainer.start_timeout_s",
    "trainer.step_timeout_s",
    "reward.num_workers",
    "weights",
    "dataflow.batch_timeout_s",
)
"""Keys that change where and how long a run computes, but not what it learns. All others need `--allow-changed`."""


def resume(run_dir: Path, overrides: Sequence[str], step: int | None = None, *, allows_changed: bool = False) -> int:
    """Run `penstock resume` to its end; returns the exit code.

    Args:
        run_dir: Directory of the run.
        overrides: `KEY=VALUE` words.
        step: Which checkpoint; None is the newest complete one.
        allows_changed: Whether any key and the tasks may have changed.

    Raises:
        ConfigError: If the configuration cannot continue this run.
        CheckpointError: If there is no checkpoint that can be read.
    """
    run_dir = run_dir.resolve()
    saved = read_saved_config(run_dir)
    with locked(run_dir):
        with waiting("reading the checkpoint"):
            checkpoint = choose_checkpoint(run_dir, step)
        enter_folder_of(run_dir)
        config = changed_config(saved, overrides, run_dir)
        return _continue(config, saved, checkpoint, allows_changed=allows_changed)


def train(config: RunConfig) -> int:
    """Run `penstock train`; with `resume=auto` it continues the run that is in its directory, if there is one.

    Raises:
        ConfigError: As `resume`.
    """
    run_dir = Path(config.run_dir)
    if config.resume == "never" or not (run_dir / CONFIG_FILE).exists():
        return training.train(config)
    if not CheckpointFolder(run_dir).versions():
        is_untrained = read_json(run_dir / SUMMARY_FILE).get("steps", 0) == 0  # so nothing is lost
        return training.train(config.model_copy(update={"overwrite": is_untrained or config.overwrite}))
    with locked(run_dir):
        checkpoint = choose_checkpoint(run_dir)
        config = with_what_was_set(config, run_dir)
        if finished := nothing_left(config, checkpoint, f"penstock resume {run_dir}"):
            print(finished)
            return EXIT_OK
        return _continue(config, read_saved_config(run_dir), checkpoint, allows_changed=False)


def _continue(config: RunConfig, saved: Mapping[str, Any], checkpoint: Checkpoint, *, allows_changed: bool) -> int:
    """Continue a run whose lock is held."""
    run_dir = Path(config.run_dir)
    config, derived, findings = settled(config, "train", is_resumed=True)
    problems = [] if allows_changed else list(changes_of_learning(run_dir, saved, config, checkpoint))
    before, now = (saved["rollout"]["sampling"]["top_k"], config.rollout.sampling.top_k)
    if bool(before) != bool(now):
        problems.append(
            f"rollout.sampling.top_k={now}: the run began with {before}, and its checkpoint holds answers that were "
            "sampled with that. A batch cannot mix truncated and whole distributions. Resume with "
            f"top_k={before}, or start a run from the exported policy (penstock export)."
        )
    summary = read_json(run_dir / SUMMARY_FILE)
    lacks_evaluation = checkpoint.version == config.total_steps and lacks_last_evaluation(summary)
    if not lacks_evaluation and (finished := nothing_left(config, checkpoint, f"penstock resume {run_dir}")):
        problems.append(finished)
    problems += [finding.message for finding in findings if finding.refuses(dry_run=False)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    changed = differences(saved, config.model_dump(mode="json"))
    write_changed(run_dir, config, checkpoint.version, changed, by="resume")
    note_resume(run_dir, summary, checkpoint.version)
    TrajectoryTable(run_dir).files.drop_after(checkpoint.version)
    EvaluationTable(run_dir).files.drop_after(checkpoint.version)
    reached = 0
    if (run_dir / METRICS_FILE).exists():
        reached = max((record.step for record in read_metrics(run_dir)), default=0)
    again = f"; the run had reached step {reached}" if reached > checkpoint.version else ""
    for sentence in derived:
        print(f"warning {sentence}")
    print(f"continuing {run_dir} from the checkpoint of step {checkpoint.version}{again}")
    return training.train_in(config, run_dir, checkpoint)


def lacks_last_evaluation(summary: Mapping[str, Any]) -> bool:
    """Whether the evaluation after the last step of this summary has failed, or may have been cut off by a signal."""
    has_failed = summary.get("evaluated_on") is not None and summary.get("eval_after") is None
    return summary.get("status") == "interrupted" or (summary.get("status") == "completed" and has_failed)


def nothing_left(config: RunConfig, checkpoint: Checkpoint, longer: str) -> str | None:
    """Why a run has nothing to train after a checkpoint; None if it has.

    Args:
        config: Of the run.
        checkpoint: The last one.
        longer: Beginning of the command that trains longer.
    """
    if (step := checkpoint.version) >= config.total_steps:
        return (
            f"total_steps={config.total_steps}: the checkpoint is of step {step}, so nothing is left to train. Give a "
            f"larger one: {longer} total_steps={2 * step}"
        )
    evaluations, _ = comparable_evaluations(checkpoint.manifest["run"], config)
    patience = config.evaluation.patience
    if patience is not None and num_since_best([evaluation_from(one) for one in evaluations]) >= patience:
        return (
            f"evaluation.patience={patience}: the run had ended by step {step}, since its evaluations were no longer "
            f"better, so nothing is left to train. Give a larger one: {longer} evaluation.patience=null"
        )
    return None


def changes_of_learning(
    run_dir: Path, saved: Mapping[str, Any], config: RunConfig, checkpoint: Checkpoint
) -> Iterator[str]:
    """Yield a sentence for everything that would make the run learn something else, or forget a later checkpoint."""
    yield from changed_keys(saved, config)
    yield from changed_tasks(run_dir, config)
    later = [version for version in CheckpointFolder(run_dir).versions() if version > checkpoint.version]
    if later:
        yield (
            f"--step {checkpoint.version}: the checkpoints of the later steps {later} would be removed, since the run "
            "goes another way from here. Leave --step out, or use --allow-changed."
        )


def changed_keys(saved: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each changed key that changes what the run learns.

    A key that is newer than the run had its default.
    """
    with suppress(ConfigError):  # of a key that this version does not have any more
        saved = changed_config(saved, (), Path(config.run_dir)).model_dump(mode="json")
    for key, (before, now) in differences(saved, config.model_dump(mode="json")).items():
        is_free = key in ("run_dir", "overwrite", "resume") or any(is_within(key, one) for one in FREE_KEYS)
        if not is_free:
            yield (
                f"{key}={now}: the run began with {before}, and this changes what it learns. Leave it, or use "
                "--allow-changed. Or leave this run as it is, and begin another one here: --as NEW."
            )


def changed_tasks(run_dir: Path, config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each source of tasks that has changed since the run began."""
    for change in changes(read_data(run_dir), fingerprints(config.env, config.seed), includes_order=True):
        yield f"env: the tasks have changed: {change}. Bring the data back, or use --allow-changed."
