"""What a run knows at a cut, and whether a resumed run knows the same (docs/concepts/durability.md).

`memory_of` reads the objects themselves, and never their `state_dict`, which would forget the same on both sides. Of
dataclasses all fields are read, so a counter that is added later and not restored is found as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from penstock.dataflow.ledger import GroupRecord
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import TaskQueue
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.run.flow import Flow
from penstock.platform.run.group_run import GroupRun
from penstock.platform.run.run import Run
from penstock.platform.simulator.parts import TrainingTasks
from tests.simulation.world import InvariantError

BEGIN_AGAIN = frozenset({"last", "last_version", "samples", "_candidates", "num_scored", "num_ready", "anomalies"})
"""Fields of `FlowStats` that are of one batch or of one process."""
MAX_DIFFERENCES = 5


def memory_of(run: Run, flow: Flow) -> dict[str, Any]:
    """Everything that a resume has to restore, as plain values. Call it at a cut, or after `Flow.restore`."""
    core, tasks = flow.core, flow._tasks
    ledger = core.ledger
    return {
        "version": [run.version, core.version],
        "counts": plain(ledger.counts()),
        "reasons": plain(ledger.reasons),
        "admitted by stream": plain(ledger.admitted_by_stream),
        "live by stream": plain(ledger.live_by_stream),
        "live trajectories": ledger.live_trajectories,
        "free credits": core.free_credits,
        "surplus": None if core.surplus_search is None else plain(vars(core.surplus_search)),
        "ready groups": core.num_ready,
        "retries": plain(core.retries),
        "ignored reports": plain(core.ignored),
        "groups": {int(record.group_id): _group(record, flow._groups.get(record.group_id)) for record in ledger.live()},
        "task cursor": {stream.name: cast("TrainingTasks", stream.tasks).num_taken for stream in tasks.streams},
        "task queue": _task_queue(tasks),
        "statistics": {name: value for name, value in plain(flow.stats).items() if name not in BEGIN_AGAIN},
        "evaluations": plain(run.evaluations.done),
        "failed evaluations": run.evaluations.num_failed,
        "skipped steps": run.log.skipped_steps,
        "rewards": plain(run._instruments.hub.rewards),
        "mismatch": plain(vars(run.log._mismatch)),
    }


def check_resumed(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Compare the memory at the cut with that of the resumed run.

    Raises:
        InvariantError: Naming the first differences.
    """
    found = list(differences(before, after))
    if found:
        raise InvariantError("resume", "; ".join(found[:MAX_DIFFERENCES]))


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield where two memories differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}, key=str):
            yield from differences(before.get(key), after.get(key), f"{where}.{key}" if where else str(key))
    elif before != after:
        yield f"{where} was {before} at the cut and is {after} after the resume"


def plain(value: Any) -> Any:
    """A copy as dicts, lists and scalars. Of counters, zeros are left out: a key that was read is no difference."""
    if isinstance(value, Counter):
        return {str(key): count for key, count in value.items() if count}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(entry) for entry in value]
    if isinstance(value, Task):
        return value.task_id
    if isinstance(value, Exception):
        return str(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _task_queue(tasks: TaskQueue) -> dict[str, Any]:
    """All fields but the streams, and the memory of the hooks."""
    hooks = {name: plain(vars(hook)) for name, hook in tasks._hooks() if hasattr(hook, "load_state_dict")}
    named = {field.name for field in fields(tasks)} - {"streams", "sizing", "lengths", "curriculum", "_listeners"}
    return {name: plain(getattr(tasks, name)) for name in sorted(named)} | {"hooks": hooks}


def _group(record: GroupRecord, run: GroupRun | None) -> dict[str, Any]:
    known = plain(record)
    for name in ("state", "ready"):  # a group whose members all have their tokens is generating again
        del known[name]
    known["is_ready"] = record.ready is not None
    if run is not None:
        known["length limit"] = run.queued.max_new_tokens
    if run is not None and record.ready is None:
        known["is_judged"] = run.is_judged
        known["members"] = {index: _member(run, index) for index in range(len(run.outcomes))}
    return known


def _member(run: GroupRun, index: int) -> list[Any]:
    outcome, sampled, turn = run.outcomes[index], run._sampled[index], run.context.turns.get(index)
    failures = [str(failure) for failure in run._failures[index]]
    if isinstance(outcome, Trajectory):
        return ["scored", outcome.reward, outcome.num_sampled_tokens, failures]
    if outcome is not None:
        return ["failed", failures]
    if sampled is not None:
        return ["sampled", sampled.num_sampled_tokens, failures]
    saved = run.context.saved_tokens.get(index)
    num_tokens = turn.num_tokens if turn is not None else 0 if saved is None else len(saved.token_ids)
    return ["sampling", num_tokens, failures]
