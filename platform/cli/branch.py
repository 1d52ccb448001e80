"""`penstock resume RUN --as NEW`: another run that begins at a checkpoint of RUN, which stays as it is.

What a branch may keep of the checkpoint, each with all before it:

    weights     a new run of the policy: step 0, a new optimizer
    optimizer   + the moments, counters and versions: it goes on at the step of the checkpoint
    data        + the position in the tasks; the tasks of groups that were not trained yet come again
    groups      + these groups: RUN itself, had it been changed there

A changed key decides how much can be kept (`limits`). What is then lost is said; the optimizer is only given up if that
was typed (`--restore weights`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.dataflow.ids import PARTNER
from penstock.platform.checks.load import settled
from penstock.platform.cli.export import export_policy
from penstock.platform.cluster.session import as_trained
from penstock.platform.config.schema import RunConfig, is_within
from penstock.platform.metrics.progress import waiting
from penstock.platform.metrics.run_files import BEST_FILE, METRICS_FILE, START_PARTNER, START_POLICY
from penstock.platform.metrics.trackers.jsonl import drop_later_records
from penstock.platform.run import training
from penstock.platform.run.checkpoint import Checkpoint, CheckpointFolder, choose_checkpoint
from penstock.platform.run.checkpoint_upload import check_is_free, download
from penstock.platform.run.durable_files import link_or_copy
from penstock.platform.run.evaluation import comparable_evaluations
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.flow_builder import flow_limits
from penstock.platform.run.resume import changed_tasks, nothing_left
from penstock.platform.run.run_dir import locked, prepare_run_dir, read_json
from penstock.platform.run.saved_config import (
    changed_config,
    differences,
    enter_folder_of,
    read_saved_config,
    write_changed,
)

Part = Literal["weights", "optimizer", "data", "groups"]
PARTS: tuple[Part, ...] = get_args(Part)
"""In this order; each includes those before it."""
_POSITION = ("seed", "env.factory", "env.args", "env.streams", "env.curriculum")
_ANSWERS = ("env", "reward", "rollout.sampling", "reference", "teacher")
_CREDITS = ("dataflow.batch_groups", "dataflow.max_staleness", "dataflow.surplus", "dataflow.on_expiry")
_MODEL = ("model.path", "model.from_scratch", "model.tokenizer")
_PARTNER = ("partner.model.path", "partner.model.from_scratch")


@dataclass(frozen=True, slots=True)
class Limit:
    """That a change does not let a branch keep everything."""

    part: Part | None
    """The last part that can be kept; None: nothing can."""
    why: str
    """A sentence with both values."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A branch that can be trained."""

    config: RunConfig
    run_dir: Path
    start: Checkpoint | None
    """Its first checkpoint; None if it begins with the weights alone."""
    told: list[str]
    """What it begins with, and what it lost, one sentence each."""


def branch(source: str, target: str, overrides: Sequence[str], step: int | None, restore: str | None) -> int:
    """Begin the run and train it to its end; returns the exit code. Arguments and errors are those of `begin`."""
    begun = begin(source, target, overrides, step, restore)
    for sentence in begun.told:
        print(sentence)
    with locked(begun.run_dir):
        return training.train_in(begun.config, begun.run_dir, begun.start)


def begin(source: str, target: str, overrides: Sequence[str], step: int | None, restore: str | None) -> Begun:
    """Make the directory of a new run that begins at a checkpoint of another one.

    Args:
        source: Directory of RUN, which is only read, or the place to which it copies its checkpoints.
        target: Name of the new run, which is made beside RUN, or a path to its directory.
        overrides: `KEY=VALUE` words.
        step: Which checkpoint; None is the newest complete one.
        restore: The last of `PARTS` that is kept of it; None is all that the changed keys leave.

    Raises:
        ConfigError: If the new run is not possible; nothing was written then.
        CheckpointError: If there is no checkpoint that can be read.
    """
    new_dir = branch_dir(source, target)
    if "://" not in source:
        return _begin(Path(source).resolve(), source, new_dir, overrides, step, restore)
    new_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=new_dir.parent, prefix=".fetched-") as folder:
        with waiting(f"fetching the checkpoint from {source}"):
            download(source, Path(folder), step)
        return _begin(Path(folder), source, new_dir, overrides, step, restore)


def _begin(
    run_dir: Path, source: str, new_dir: Path, overrides: Sequence[str], step: int | None, restore: str | None
) -> Begun:
    newest, target = read_saved_config(run_dir), new_dir.name
    if new_dir.exists() and (not new_dir.is_dir() or any(new_dir.iterdir())):
        raise ConfigError([f"--as {target}: {new_dir} exists. Give a name that is free, so that nothing is lost."])
    if restore is not None and restore not in PARTS:
        raise ConfigError([f"--restore {restore}: there is no such part of a checkpoint. One of {', '.join(PARTS)}."])
    wanted: Part | None = restore
    with waiting("reading the checkpoint"):
        checkpoint = choose_checkpoint(run_dir, step)
    enter_folder_of(run_dir)
    saved = checkpoint.manifest["run"]["config"]  # which `penstock set` and resumes may have changed since
    before = changed_config(saved, (), run_dir)
    own = [] if before.checkpoint.upload is None else ["checkpoint.upload=null"]  # that place is RUN's
    config = changed_config(saved, [*own, *overrides], run_dir, new_dir)
    if (place := config.checkpoint.upload) is not None and place == before.checkpoint.upload:
        raise ConfigError([f"checkpoint.upload={place} has the checkpoints of {run_dir}. Give another place."])
    check_is_free(place)
    kept, lost = decide(list(limits(before, config, run_dir)), wanted)
    if own and place is None:
        lost.append(
            "checkpoint.upload=null: the place of the other run is its own; give one to copy checkpoints of this"
        )
    config, derived, findings = settled(config, "train")
    if problems := [finding.message for finding in findings if finding.refuses(dry_run=False)]:
        raise ConfigError(list(dict.fromkeys(problems)))
    by_now = as_trained(changed_config(newest, (), run_dir))
    later = differences(before.model_dump(mode="json"), by_now.model_dump(mode="json"))
    typed = {word.partition("=")[0] for word in overrides}
    lost += [
        f"{key}={old}, as at step {checkpoint.version}; the run was changed to {new} after that"
        for key, (old, new) in later.items()
        if key not in (*typed, "run_dir", "overwrite", "resume")
    ]
    if kept != "weights" and (why_none := comparable_evaluations(checkpoint.manifest["run"], config)[1]):
        lost.append(why_none)
    if kept != "weights" and (problem := nothing_left(config, checkpoint, f"--as {target}")):
        raise ConfigError([problem])
    origin = source if "://" in source else str(run_dir)
    prepare_run_dir(config, branched_from={"run": origin, "step": checkpoint.version, "restored": kept})
    start = None
    try:
        if kept == "weights":
            with waiting("writing the policy of the checkpoint"):
                export_policy(before, checkpoint.path, new_dir / START_POLICY)
                if before.partner is not None and config.partner is not None:
                    export_policy(before.partner_view, checkpoint.path / PARTNER, new_dir / START_PARTNER)
        else:
            for folder in (START_POLICY, START_PARTNER):
                for path in filter(Path.is_file, (run_dir / folder).rglob("*")):
                    link_or_copy(path, new_dir / path.relative_to(run_dir))
        config = changed_config(config.model_dump(mode="json"), (), new_dir)  # which has these policies now
        if kept != "weights":
            start = copied(run_dir, checkpoint, new_dir, kept, config)
        changed = differences(saved, config.model_dump(mode="json"))
        write_changed(new_dir, config, 0 if start is None else start.version, changed, by=f"branch of {origin}")
    except BaseException as error:  # also Ctrl-C: the same command starts it again
        shutil.rmtree(new_dir, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{new_dir}: the branch could not be written ({error}), and was removed") from error
        raise
    told = [f"warning {sentence}" for sentence in (*derived, *lost)]
    told.append(f"{new_dir} begins at step {checkpoint.version} of {origin} with its {', '.join(upto(kept))}")
    return Begun(config, new_dir, start, told)


def branch_dir(source: str, target: str) -> Path:
    """Directory of the new run: beside the other one, or in runs/, unless `target` is a path."""
    if os.sep in target:
        return Path(target).absolute()
    return (Path("runs").absolute() if "://" in source else Path(source).resolve().parent) / target


def upto(part: Part) -> tuple[Part, ...]:
    """The parts that are kept, up to this one."""
    return PARTS[: PARTS.index(part) + 1]


def limits(before: RunConfig, now: RunConfig, run_dir: Path) -> Iterator[Limit]:
    """Yield what the changes between two configurations do not let a branch keep.

    Args:
        before: Of the run.
        now: Of its branch.
        run_dir: Directory of the run.
    """
    changed = differences(before.model_dump(mode="json"), now.model_dump(mode="json"))

    def of(keys: Sequence[str], part: Part | None, why: str) -> Iterator[Limit]:
        for key, (old, new) in changed.items():
            if any(is_within(key, one) for one in keys):
                yield Limit(part, f"{key} was {old} and is {new}: {why}")

    has_partners = before.partner is not None and now.partner is not None
    models = (*_MODEL, *_PARTNER) if has_partners else _MODEL
    yield from of(models, None, "a branch has the weights of its run; for others start a run (penstock train)")
    if before.algorithm.needs_critic and now.algorithm.needs_critic:
        yield from of(("critic.path",), "weights", "the checkpoint has the critic that was trained from the other one")
    yield from of(("trainer.lora",), "weights", "the checkpoint has the moments of other trained parameters")
    optimizers = {"trainer.optimizer": (before.trainer.optimizer, now.trainer.optimizer)}
    if before.algorithm.needs_critic:
        optimizers["critic.optimizer"] = before.critic.optimizer, now.critic.optimizer
    for key, (old, new) in optimizers.items():
        if (old.muon is None) != (new.muon is None):
            yield Limit(
                "weights", f"{key}.muon: one of the two runs has it, and the checkpoint has states of one optimizer"
            )
    if (before.partner is None) != (now.partner is None):
        yield Limit("weights", "partner: one of the two runs has a second policy, and the checkpoint is of the other")
    if before.algorithm.needs_critic != now.algorithm.needs_critic:
        names = [config.algorithm.advantage.name for config in (before, now)]
        yield Limit(
            "weights", f"algorithm.advantage was {names[0]} and is {names[1]}: only one has a critic to continue"
        )
    yield from of(_POSITION, "optimizer", "the tasks are others, so a position in them says nothing")
    for change in changed_tasks(run_dir, now):
        yield Limit("optimizer", change)
    others = [key for key in changed if any(is_within(key, one) for one in _POSITION)]
    for limit in of(_ANSWERS, "data", "the groups that were not trained yet were sampled and scored before that"):
        if not any(limit.why.startswith(key) for key in others):
            yield limit
    yield from of(_CREDITS, "data", "the groups that were not trained yet were admitted under the other bounds")
    for role in ("reference", "teacher"):
        if now.num_frozen(role) and not before.num_frozen(role):
            yield Limit("data", f"the groups that were not trained yet have no logprobs of a {role}")


def decide(found: Sequence[Limit], wanted: Part | None) -> tuple[Part, list[str]]:
    """What a branch keeps, and a sentence for everything that it therefore loses.

    Raises:
        ConfigError: If nothing can be kept, or not what was asked for, or the optimizer would be lost unasked.
    """
    most = min((PARTS.index(one.part) for one in found if one.part is not None), default=len(PARTS) - 1)
    hopeless = [one.why for one in found if one.part is None]
    if hopeless:
        raise ConfigError(hopeless)
    asked = PARTS.index(wanted) if wanted is not None else max(most, PARTS.index("optimizer"))
    if asked > most:
        lost = ", ".join(PARTS[most + 1 :])
        raise ConfigError(
            [
                f"{one.why}. The {lost} of the checkpoint would have to be dropped: add --restore {PARTS[most]}, or "
                "leave the key as it was"
                for one in found
                if one.part is not None and PARTS.index(one.part) < asked
            ]
        )
    kept = PARTS[min(asked, most)]
    return kept, [f"{one.why}; kept: {', '.join(upto(kept))}" for one in found if wanted is None]


def copied(run_dir: Path, checkpoint: Checkpoint, new_dir: Path, kept: Part, config: RunConfig) -> Checkpoint:
    """Copy a checkpoint into the directory of a branch, with the metrics up to it.

    Args:
        run_dir: Directory of the run.
        checkpoint: One of its checkpoints.
        new_dir: Directory of the branch.
        kept: How much of the checkpoint.
        config: Of the branch.

    Returns:
        The checkpoint in `new_dir`.

    Raises:
        CheckpointError: If a file is gone meanwhile.
    """
    try:
        start = _copied(run_dir, checkpoint, new_dir, kept, config)
        best = read_json(run_dir / BEST_FILE).get("step")
        source = CheckpointFolder(run_dir)
        is_compared = any(one["step"] == best for one in start.manifest["run"]["evaluations"])
        if config.evaluation.keep_best and best in source.versions() and best < checkpoint.version and is_compared:
            _copied(run_dir, source.read(best), new_dir, kept, config)  # for `export --best`
        if (run_dir / METRICS_FILE).exists():
            shutil.copyfile(run_dir / METRICS_FILE, new_dir / METRICS_FILE)
            drop_later_records(new_dir, checkpoint.version + 1)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename}: it was removed while it was copied; the run goes on and keeps checkpoint.keep of them. "
            "Try again."
        ) from error
    return start


def _copied(run_dir: Path, checkpoint: Checkpoint, new_dir: Path, kept: Part, config: RunConfig) -> Checkpoint:
    folder, manifest = CheckpointFolder(new_dir), checkpoint.manifest
    folder.prepare()
    unfinished = folder.unfinished(checkpoint.version)
    spooled: Mapping[str, str] = manifest["spooled"] if kept == "groups" else {}
    for name, *_ in manifest["trainer_files"]:
        link_or_copy(checkpoint.path / name, unfinished / name)
    for name in spooled.values():
        link_or_copy(run_dir / name, new_dir / name)
    state = manifest["flow"]
    saved = FlowSnapshot(state, (), ())
    if kept == "groups":
        saved = FlowSnapshot(state, (), CheckpointFolder(run_dir).open_groups(checkpoint))
    elif kept == "data":
        saved = FlowSnapshot({**state, "limits": None}, (), ())  # under other bounds `Flow.restore` starts them again
    elif kept == "optimizer":
        saved = FlowSnapshot(at_the_first_task(state, config), (), ())
    of_trainer = {f"checkpoints/{checkpoint.path.name}/{name}" for name, *_ in manifest["trainer_files"]}
    named = of_trainer | set(spooled.values())
    evaluations, _ = comparable_evaluations(manifest["run"], config)
    run = {**manifest["run"], "config": as_trained(config).model_dump(mode="json"), "evaluations": evaluations}
    again: dict[str, Any] = {key: manifest[key] for key in ("version", "incarnation", "trainer_files")} | {"run": run}
    again |= {"spooled": spooled, "files": [one for one in manifest["files"] if one[0] in named]}
    return folder.commit(unfinished, saved, again)


def at_the_first_task(state: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The state of a flow whose live groups have ended untrained and whose tasks begin again; its version stays."""
    core = Dataflow(
        flow_limits(config),
        GroupRules(config.dataflow.group_size, config.dataflow.fewest_members, config.dataflow.max_retries),
    )
    core.load_state_dict(state["core"], {})
    core.roll_back()
    tasks: dict[str, Any] = {"weights": {}, "base": dict(core.ledger.admitted_by_stream), "skipped": [{}, None]}
    tasks |= {"rewards": {}, "requeued": [], "hooks": {}}
    fresh: dict[str, Any] = {"max_new_tokens": {}, "num_taken": {}}
    return {**state, **fresh, "core": core.state_dict(), "tasks": tasks}
