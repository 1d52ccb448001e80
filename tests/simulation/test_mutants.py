"""Planted bugs: each has occurred in such systems, and each is found by some seed.

A mutant goes between the checks and the shipping code (`class Checked(CheckedDataflow, Mutant)`), or replaces a
simulated part. The same seeds without a mutant are clean (tests/simulation/test_fault_seeds.py).
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.core import Dataflow
from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.gates import ConsumptionGate
from penstock.dataflow.ids import EngineId, GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Ledger
from penstock.dataflow.ports import Engine, GenerateRequest, WeightAck, WeightManifest, WrittenFile
from penstock.dataflow.saved_groups import encode
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import TaskQueue, TaskStream
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Trajectory
from penstock.dataflow.versions import Span, Spans, num_tokens
from penstock.envs.environment import Action
from penstock.platform.run.checkpoint import SPOOL, UNFINISHED, Checkpoint, Checkpointer, CheckpointFolder
from penstock.platform.run.durable_files import Files
from penstock.platform.run.engine_restarts import EngineRestarts
from penstock.platform.run.fleet import Fleet, Progress
from penstock.platform.run.flow import Flow, FlowSnapshot
from penstock.platform.run.group_run import GroupRun
from penstock.platform.simulator import simulation
from penstock.platform.simulator.engine import TokenStream
from penstock.platform.simulator.world import task_of
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.episodes import EpisodePlayer
from tests.simulation.checks import CheckedDataflow
from tests.simulation.config import parse_faulty
from tests.simulation.faulty_engines import CheckedClasses, CheckedEngine, CheckedPublisher, FaultyEngine
from tests.simulation.faulty_parts import FaultyRewards, FaultyTrainer
from tests.simulation.simulation import Seams, simulate
from tests.simulation.wirings import parse_wired, wired
from tests.simulation.world import POISON

SEEDS = 30
SMALL = ["profile=short", "sigma=1", "engines=3", "slots=6", "batch=3", "group_size=3", "steps=6", "check_every=4"]


def checked(mutant: type[Dataflow]) -> Seams:
    """The core with a bug, under the checks."""
    return Seams(core=type("Checked", (CheckedDataflow, mutant), {}))


def engine_side(**classes: Any) -> Seams:
    """A bug in a class of the engine side."""
    return Seams(engines=CheckedClasses(**classes))


class CreditLeaked(Dataflow):
    """A group that ends untrained keeps its credit."""

    @property
    def free_credits(self) -> int:
        return max(0, super().free_credits - self.ledger.counts().returned)


class TrainedTwice(Dataflow):
    """A completion that arrives again after its group was trained goes into the next batch."""

    again: GroupRef | None = None

    def ready(self, group: GroupRef) -> bool:
        accepted = super().ready(group)
        if not accepted:
            self.again = group
        return accepted

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        batch = super().close_batch()
        if batch is None or self.again is None:
            return batch
        again, self.again = self.again, None
        return (again, *batch[1:])


class OldestDropped(Dataflow):
    """A full buffer forgets its oldest group."""

    def ready(self, group: GroupRef) -> bool:
        if self.num_ready == 3:
            self._gate.remove(self._gate.next_ready())
        return super().ready(group)


class AdmittedNotCounted(Dataflow):
    """Now and then an admission is not counted."""

    def admit(self, task_id: TaskId, **options: Any) -> GroupId:
        group_id = super().admit(task_id, **options)
        if group_id % 5 == 4:
            self.ledger._admitted -= 1
        return group_id


class TerminalOverwritten(Dataflow):
    """A late report turns a trained group into a failed one."""

    def generated(self, group_id: GroupId) -> None:
        if self.ledger.get(group_id) is None and self.ledger._ended[GroupState.TRAINED]:
            self.ledger._ended[GroupState.TRAINED] -= 1
            self.ledger._ended[GroupState.FAILED] += 1
        super().generated(group_id)


class DispatchNotReported(Dataflow):
    """A group's deadline counts from its newest member."""

    def record_version(self, group_id: GroupId, member: int, version: int) -> None:
        for index in range(self.rules.group_size):
            super().record_version(group_id, index, max(version, self.version))


class NoConsumptionGate(Dataflow):
    """Batches close as soon as enough groups are ready: admission is the only bound."""

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        if self.num_ready < self.limits.batch_groups:
            return None
        for _ in range(self.limits.batch_groups):
            self._take_next()
        return tuple(self._in_training)


class TrimmedTooLittle(Dataflow):
    """Tokens one version too old keep their loss weight."""

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        batch = super().close_batch()
        return batch and tuple(replace(group, min_version=max(group.min_version - 1, 0)) for group in batch)


class StampedLate(FaultyEngine):
    """Versions are written down when the tokens are delivered."""

    def stamp(self, spans: Spans) -> Spans:
        return (Span(self.version, num_tokens(spans)),) if spans else ()


class StampedBackwards(FaultyEngine):
    """The spans of a delta are listed newest first."""

    def stamp(self, spans: Spans) -> Spans:
        return tuple(reversed(spans))


class OldVersionKept(CheckedEngine):
    """A client keeps the version that its engine has forgotten."""

    async def forget_versions(self) -> None:
        version = self._version
        await super().forget_versions()
        self._version = version


class AcknowledgedAtOnce(CheckedEngine):
    """A client counts a version as acknowledged when it sends it."""

    async def _update_weights(self, manifest: WeightManifest, payload: Any) -> WeightAck:
        self._version = manifest.version
        return await super()._update_weights(manifest, payload)


class ServesWithoutCatchingUp(CheckedPublisher):
    """A restarted engine is put into service as if it had the version."""

    async def catch_up(self, engine: RemoteEngine) -> None:
        if self._published is not None:
            engine._version = self._published.manifest.version
        self._pool.add(engine)


class GivesUpAtOnce(EngineRestarts):
    """A supervisor that restarts nothing."""

    def _request_restart(self, engine_id: EngineId) -> bool:
        return False


class RemovedBeforeItsRequestsEnd(Fleet):
    """A leaving engine is ended at once."""

    async def _leave(self, engine: RemoteEngine, tell: Progress) -> None:
        self.pool.remove(engine.engine_id)
        await self.actors.ended(engine)
        tell(f"{engine.engine_id} has left")


class UnacknowledgedServes(EnginePool):
    """One engine gets no updates and continues to serve."""

    def engines(self) -> list[Engine]:
        return super().engines()[1:]

    def set_min_version(self, version: int) -> None:
        pass


class FailureAsZero(Flow):
    """A failed rollout is trained with reward 0."""

    async def group_finished(self, run: GroupRun, outcomes: Sequence[Trajectory | TrajectoryError]) -> None:
        good = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
        if good:
            zero = replace(good[0], reward=0.0)
            outcomes = [zero if isinstance(outcome, TrajectoryError) else outcome for outcome in outcomes]
        await super().group_finished(run, outcomes)


class PromptWeighted(FaultyTrainer):
    """Prompt tokens carry loss weight."""

    def loss_weights(self, groups: Sequence[GroupRef]) -> list[np.ndarray]:
        masks = [np.ones(len(member.token_ids)) for group in groups for member in group.handle.trajectories]
        return [mask / sum(map(len, masks)) for mask in masks]


class NormalisedPerMicroBatch(FaultyTrainer):
    """Each half of the batch is normalised by its own tokens."""

    def loss_weights(self, groups: Sequence[GroupRef]) -> list[np.ndarray]:
        halves = [super(NormalisedPerMicroBatch, self).loss_weights(half) for half in (groups[:1], groups[1:])]
        return [weights / 2 for half in halves for weights in half]


class GroupsForgotten(Flow):
    """A driver that resumes knows the counters, and nothing of the groups that were being sampled."""

    def snapshot(self) -> FlowSnapshot:
        saved = super().snapshot()
        core = saved.state["core"]
        kept = [group for group in core["groups"] if group["is_ready"]]
        return replace(saved, state={**saved.state, "core": {**core, "groups": kept}}, open_groups=())


class FlowOfTheCheckpointBefore(Flow):
    """The groups and counters of a checkpoint are those of an older cut than its weights: some train again."""

    before: FlowSnapshot | None = None

    def snapshot(self) -> FlowSnapshot:
        saved = super().snapshot()
        older, FlowOfTheCheckpointBefore.before = self.before or saved, saved
        return older


class WeightsOfLater(FaultyTrainer):
    """The trainer writes its state as it is when it writes, and not as it was at the cut."""

    async def write_checkpoint(self, folder: str, rank: int) -> WrittenFile:
        for _ in range(200):
            await asyncio.sleep(self._config.train_fixed_s)
        await self.snapshot(self.version)
        return await super().write_checkpoint(folder, rank)


class CursorTooEarly(TaskQueue):
    """The position in the stream is saved one task late, so one task is taken twice."""

    def load_state_dict(self, state: Any, num_taken: Any, wanted: Any = ()) -> Any:
        return super().load_state_dict(state, {name: count - 1 for name, count in num_taken.items()}, wanted)


class CursorTooLate(TaskQueue):
    """The position in the stream is saved one task early, so one task is never trained."""

    def load_state_dict(self, state: Any, num_taken: Any, wanted: Any = ()) -> Any:
        return super().load_state_dict(state, {name: count + 1 for name, count in num_taken.items()}, wanted)


class RequeuedForgotten(TaskQueue):
    """A checkpoint does not keep the tasks that wait to be admitted again."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "requeued": []}


class HooksForgotten(TaskQueue):
    """A checkpoint does not keep the memory of the hooks: measured difficulty, stages."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "hooks": {}}


class RetriesRebuilt(Dataflow):
    """Granted retries are counted from 0 after a resume."""

    def load_state_dict(self, state: Mapping[str, Any], ready: Mapping[GroupId, GroupRef]) -> None:
        super().load_state_dict({**state, "retries": {}}, ready)


class FailuresOfMembersForgotten(Flow):
    """Members of restored groups get all their retries again."""

    def snapshot(self) -> FlowSnapshot:
        saved = super().snapshot()
        for group in saved.open_groups:
            for member in group.members:
                member.failures = () if not member.has_failed else member.failures
        return saved


class StatisticsOfTheCheckpointBefore(Flow):
    """The statistics of a checkpoint are those of the one before it."""

    before: Mapping[str, Any] | None = None

    def snapshot(self) -> FlowSnapshot:
        saved = super().snapshot()
        older, StatisticsOfTheCheckpointBefore.before = self.before or saved.state["stats"], saved.state["stats"]
        return replace(saved, state={**saved.state, "stats": older})


class AdmissionEnds(Flow):
    """After some versions nothing is admitted any more, whatever credits there are."""

    def _admit_now(self) -> None:
        if self.core.version < 3:
            super()._admit_now()


class CountersRebuilt(Dataflow):
    """Counters begin at 0 after a resume."""

    def load_state_dict(self, state: Mapping[str, Any], ready: Mapping[GroupId, GroupRef]) -> None:
        super().load_state_dict(state, ready)
        self.ledger._ended[GroupState.TRAINED] = 0


class ReadyGroupsGenerateAgain(Dataflow):
    """Groups that were ready are sampled again."""

    def load_state_dict(self, state: Mapping[str, Any], ready: Mapping[GroupId, GroupRef]) -> None:
        groups = [{**group, "is_ready": False} for group in state["groups"]]
        super().load_state_dict({**state, "groups": groups}, ready)


class NotSynced(Files):
    """Forwards all but the sync of files whose name ends like `suffix`."""

    def __init__(self, files: Files, suffix: str) -> None:
        self._inner, self._suffix = files, suffix

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name != "sync":
            return own["_inner"].__getattribute__(name) if name in dir(Files) else object.__getattribute__(self, name)
        return lambda path: None if path.name.endswith(own["_suffix"]) else own["_inner"].sync(path)


def unsynced(suffix: str) -> type[CheckpointFolder]:
    class Forgetful(CheckpointFolder):
        def __init__(self, run_dir: Path, files: Files | None = None) -> None:
            assert files is not None
            super().__init__(run_dir, NotSynced(files, suffix))

    return Forgetful


class CompleteTooEarly(CheckpointFolder):
    """A checkpoint has its name before it has its files."""

    def unfinished(self, version: int) -> Path:
        folder = super().unfinished(version)
        final = folder.with_suffix("")
        self._files.rename(folder, final)
        return final

    def commit(self, folder: Path, saved: FlowSnapshot, manifest: dict[str, Any]) -> Checkpoint:
        temporary = folder.with_suffix(UNFINISHED)
        self._files.rename(folder, temporary)
        return super().commit(temporary, saved, manifest)


class SpoolRemovedFirst(CheckpointFolder):
    """Groups are removed before the checkpoint that does not need them is complete."""

    def commit(self, folder: Path, saved: FlowSnapshot, manifest: dict[str, Any]) -> Checkpoint:
        for name in self._files.names(self._spool):
            if f"{SPOOL}/{name}" not in manifest["spooled"].values():
                self._files.remove(self._spool / name)
        self._files.sync(self._spool)
        return super().commit(folder, saved, manifest)


class SpooledUnderItsNumber(CheckpointFolder):
    """Groups are spooled under their number only, and an existing file is not written again."""

    def spool(self, name: str, payload: GroupPayload) -> tuple[str, int, int]:
        name, data = name.partition("-")[2], encode(payload)
        if self._files.size(self._spool / name) is None:
            return super().spool(name, payload)
        return f"{SPOOL}/{name}", len(data), zlib.crc32(data)

    def prune(self, keep: int, newest: int, spared: Collection[int] = ()) -> None:
        """Nothing is removed."""


class OldVersionsStart(EnginePool):
    """While a version is on its way, requests go on starting at the one before."""

    def set_min_version(self, version: int) -> None:
        pass


class QuotasForgotten(TaskQueue):
    """A stream takes the whole admission window."""

    def _is_below_quota(self, _stream: TaskStream, _ledger: Ledger) -> bool:
        return True


class BytesForgotten(Dataflow):
    """Groups are admitted by count alone."""

    @property
    def free_credits(self) -> int:
        bounded, self.limits = self.limits, replace(self.limits, max_live_trajectories=None)
        free = super().free_credits
        self.limits = bounded
        return free


class QueueForgotten(ConsumptionGate):
    """Groups that no engine has taken do not count as waiting."""

    @property
    def num_waiting(self) -> int:
        return self.num_ready


class WaitingForgotten(Dataflow):
    """Groups start however many wait for an engine."""

    def __init__(self, limits: FlowLimits, *arguments: Any, **named: Any) -> None:
        super().__init__(limits, *arguments, **named)
        self._gate = QueueForgotten(limits)


class FilterForgotten(Flow):
    """What the user's filter refuses is trained."""

    async def group_finished(self, run: GroupRun, outcomes: Sequence[Trajectory | TrajectoryError]) -> None:
        self._filters = FilterChain([], 1)
        await super().group_finished(run, outcomes)


class AbstentionsAreZero(Flow):
    """Where the reward has no opinion, it counts as 0."""

    async def group_finished(self, run: GroupRun, outcomes: Sequence[Trajectory | TrajectoryError]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Trajectory) and outcome.has_abstained:
                outcome.has_abstained, outcome.reward = False, 0.0
        await super().group_finished(run, outcomes)


class TurnTakenTwice(EpisodePlayer):
    """A turn that was sampled is handed to the environment again, as a careless retry of a tool call does."""

    async def play(self, task: Task, *arguments: Any) -> Trajectory:
        played = await super().play(task, *arguments)
        async with self._open_episode(task) as again:
            await again.reset()
            await again.step(Action("", turn=len(played.episode.turns) if played.episode else 0))
        return played


class ObservationsLearned(EpisodePlayer):
    """Observations carry loss, like the tokens of the policy."""

    async def play(self, *arguments: Any) -> Trajectory:
        played = await super().play(*arguments)
        first = int(played.loss_mask.argmax())
        played.loss_mask[first:] = True
        return played


class SilenceOfRewardsIgnored(FaultyRewards):
    """A reward worker that does not answer is waited for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for worker in self._client._workers:
            worker._lose = partial(self._ignore_silence, worker._lose)  # type: ignore[method-assign]

    def lose_worker(self, _rng: random.Random) -> None:
        """Without deaths: one would end the hang."""

    @staticmethod
    def _ignore_silence(lose: Callable[[str], None], cause: str) -> None:
        if "did not answer" not in cause:
            lose(cause)


class RoomMadeFirst(CheckpointFolder):
    """The checkpoint before is removed to make room for the next one, which a full disk then refuses."""

    def unfinished(self, version: int) -> Path:
        for before in self.versions():
            self._files.remove(self.folder / f"step_{before}")
        return super().unfinished(version)


class RefusedPromptIsALoss(FaultyEngine):
    """An engine that refuses a prompt says that it is lost. Half of the prompts are refused."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world.poison_share = 0.5

    def generate(self, request: GenerateRequest) -> TokenStream:
        stream = super().generate(request)
        if self.world.is_poison(task_of(request.prompt_token_ids[0])):
            stream = TokenStream()
            stream.put(EngineLostError(f"{self.engine_id}: {POISON}"))
        return stream


DURABILITY = (
    "durability|resume|KeyError|CheckpointError|trainer|I1|I2|I3|I4|I5|AccountingError|StalenessError|"
    "tasks of the checkpoint"
)
"""What a resume from a wrong or damaged checkpoint breaks."""
OFTEN = ("faults=heavy", "checkpoint_every=1")
EPISODES = (*OFTEN, "turns=3", "steps=12")


@dataclass(frozen=True)
class Case:
    seams: Seams
    found_as: str
    overrides: tuple[str, ...] = ("faults=heavy",)
    queue: type[TaskQueue] = TaskQueue


CASES = {
    "a credit leaks when a group ends untrained": Case(checked(CreditLeaked), "I6"),
    "a group trains twice after a duplicate": Case(checked(TrainedTwice), "I5"),
    "the oldest group is dropped when the buffer is full": Case(checked(OldestDropped), "I2|KeyError|AssertionError"),
    "an admission is not counted": Case(checked(AdmittedNotCounted), "I3|I2"),
    "a terminal state is overwritten": Case(checked(TerminalOverwritten), "I3"),
    "deadlines count from the newest member": Case(checked(DispatchNotReported), "I1|I8"),
    "there is no consumption gate": Case(checked(NoConsumptionGate), "I1", ("sigma=1.5", "eta=1")),
    "tokens are trimmed one version too late": Case(checked(TrimmedTooLittle), "I1", ("on_expiry=trim", "eta=1")),
    "versions are stamped late": Case(engine_side(engine=StampedLate), "I4"),
    "spans decrease": Case(engine_side(engine=StampedBackwards), "I4"),
    "an engine that refuses a prompt says that it is lost": Case(engine_side(engine=RefusedPromptIsALoss), "fence"),
    "a client keeps a version that its engine forgot": Case(
        engine_side(client=OldVersionKept), "I8|no engine acknowledged", ("faults=heavy", "update_mode=multi_version")
    ),
    "a version counts before it is acknowledged": Case(engine_side(client=AcknowledgedAtOnce), "I8"),
    "a restarted engine serves without catching up": Case(engine_side(publisher=ServesWithoutCatchingUp), "I8"),
    "a supervisor gives up at once": Case(engine_side(restarts=GivesUpAtOnce), "no rollout engine is left|no engine"),
    "an engine is ended before its requests are": Case(engine_side(fleet=RemovedBeforeItsRequestsEnd), "fleet"),
    "room is made before the next checkpoint is complete": Case(
        Seams(checkpoints=RoomMadeFirst), "durability: v", OFTEN
    ),
    "an engine serves without having acknowledged": Case(Seams(pool=UnacknowledgedServes), "I8", ()),
    "a failed rollout trains as reward 0": Case(
        Seams(flow=FailureAsZero), "failure as data", ("faults=heavy", "max_retries=0")
    ),
    "a token that was not sampled carries loss weight": Case(Seams(trainer=PromptWeighted), "I7", ()),
    "groups that were being sampled when the driver died are forgotten": Case(Seams(flow=GroupsForgotten), "I2|I3"),
    "a resumed driver trains again what the weights know": Case(
        Seams(flow=FlowOfTheCheckpointBefore), DURABILITY, OFTEN
    ),
    "weights are written as they are later": Case(Seams(trainer=WeightsOfLater), DURABILITY, OFTEN),
    "the position in the task stream is saved late": Case(Seams(), DURABILITY, OFTEN, CursorTooEarly),
    "the position in the task stream is saved early": Case(Seams(), "resume: task cursor", OFTEN, CursorTooLate),
    "the line of requeued tasks is forgotten": Case(
        Seams(), "resume: task queue", (*OFTEN, "on_expiry=drop", "eta=1", "sigma=2", "steps=12"), RequeuedForgotten
    ),
    "the memory of the hooks is forgotten": Case(
        Seams(), "resume: task queue.hooks", (*OFTEN, "streams=2", "hooks=true"), HooksForgotten
    ),
    "granted retries are counted again": Case(checked(RetriesRebuilt), "resume: retries", EPISODES),
    "failed attempts of members are forgotten": Case(
        Seams(flow=FailuresOfMembersForgotten), "resume: groups", EPISODES
    ),
    "statistics are those of an older cut": Case(
        Seams(flow=StatisticsOfTheCheckpointBefore), "resume: statistics", OFTEN
    ),
    "admission ends": Case(Seams(flow=AdmissionEnds), "progress: no token", ()),
    "admission ends under faults": Case(Seams(flow=AdmissionEnds), "progress: no token"),
    "a reward worker that does not answer is waited for": Case(
        Seams(rewards=SilenceOfRewardsIgnored), "progress: no token", ("faults=heavy", "reward_mean_s=5")
    ),
    "counters are rebuilt as 0": Case(checked(CountersRebuilt), "I3"),
    "ready groups are sampled again": Case(checked(ReadyGroupsGenerateAgain), "I2|KeyError|AssertionError"),
    "the sync of a spooled group is left out": Case(Seams(checkpoints=unsynced(".group")), DURABILITY, OFTEN),
    "the sync of the manifest is left out": Case(Seams(checkpoints=unsynced("driver.json")), DURABILITY, OFTEN),
    "the sync of the spool folder is left out": Case(Seams(checkpoints=unsynced("spool")), DURABILITY, OFTEN),
    "a checkpoint has its name before its files": Case(Seams(checkpoints=CompleteTooEarly), DURABILITY, OFTEN),
    "groups are removed too early": Case(Seams(checkpoints=SpoolRemovedFirst), DURABILITY, OFTEN),
    "spooled groups of a lost lineage are taken": Case(
        Seams(checkpoints=SpooledUnderItsNumber), DURABILITY, (*OFTEN, "eta=4", "steps=12", "sigma=2")
    ),
    "requests start below a version that is on its way": Case(
        Seams(pool=OldVersionsStart), "I8", ("overlap=true", "publish_bytes_per_s=1e9")
    ),
    "a stream exceeds its quota": Case(Seams(), "quota", ("streams=3",), QuotasForgotten),
    "more trajectories live than fit": Case(checked(BytesForgotten), "I6", ("max_live=13", "eta=3")),
    "groups wait for engines in numbers": Case(checked(WaitingForgotten), "I6", ("eta=4",)),
    "a filtered group trains": Case(Seams(flow=FilterForgotten), "filter", ("filter_share=0.3",)),
    "no opinion of the reward counts as 0": Case(Seams(flow=AbstentionsAreZero), "abstained", ("abstain_share=0.4",)),
    "an environment gets a turn out of order": Case(Seams(player=TurnTakenTwice), "episode", ("turns=3",)),
    "an observation carries loss": Case(Seams(player=ObservationsLearned), "I7", ("turns=3",)),
    "the normaliser is computed per micro-batch": Case(Seams(trainer=NormalisedPerMicroBatch), "I9", ()),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("bug", CASES)
def test_some_seed_finds_that(bug: str) -> None:
    case = CASES[bug]
    config, wiring = parse_wired([*SMALL, *case.overrides])
    seams = wired(wiring, case.seams, case.queue)
    found: list[str] = []
    for seed in range(SEEDS):
        violation = simulate(config, seed, seams).violation
        if violation and any(mark in violation for mark in case.found_as.split("|")):
            return
        found += [violation] if violation else []
    pytest.fail(f"{SEEDS} seeds found {found[:3] or 'nothing'}")


@pytest.mark.full
def test_a_feasibility_test_that_looks_one_version_ahead_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several old groups may be due in one batch; a test that looks one version ahead sees it too late (DESIGN §3)."""
    due_counts = ConsumptionGate.due_counts

    def next_version_only(gate: ConsumptionGate, version: int) -> list[int]:
        return due_counts(gate, version)[:2]

    config = parse_faulty(["batch=4", "group_size=2", "eta=4", "steps=40", "batch_timeout_s=1800"])
    assert simulate(config, 0).violation is None
    monkeypatch.setattr(ConsumptionGate, "due_counts", next_version_only)
    found = [violation for seed in range(SEEDS) if (violation := simulate(config, seed).violation)]
    assert any("no token, score or ready group within" in violation for violation in found), found[:3]


class StepHangs(FaultyTrainer):
    """No step returns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hang_rate = 1.0


def test_a_step_that_is_waited_for_without_a_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "STEP_TIMEOUT_S", 1e9)
    violation = simulate(parse_faulty(SMALL), 0, Seams(trainer=StepHangs)).violation
    assert violation is not None
    assert "progress: no token" in violation
    assert "controller" in violation


STALLED = [*SMALL, "faults=stalls", "reward_mean_s=20"]


@pytest.mark.parametrize("client", ["penstock.actors.batched_calls", "penstock.actors.ray_errors"])
def test_a_limit_that_a_stall_of_the_driver_uses_up_is_found(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    monkeypatch.setattr(simulation, "STEP_TIMEOUT_S", 200.0)
    monkeypatch.setattr(simulation, "LONG_STEPS", 1.0)
    config = parse_faulty([*STALLED, "train_fixed_s=140"])
    assert not any(simulate(config, seed).violation for seed in range(4))
    monkeypatch.setattr(f"{client}.silence_limit", asyncio.timeout)
    marks = ("stall:", "no answer within", "fence:")
    for seed in range(SEEDS):
        if any(mark in str(simulate(config, seed).violation) for mark in marks):
            return
    pytest.fail(f"{SEEDS} seeds found nothing")


@pytest.mark.full
def test_requests_that_count_as_silent_for_a_stall_of_the_driver_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout.trajectory.runner.LATE_S", 1e9)
    found = [simulate(parse_faulty(STALLED), seed).violation for seed in range(SEEDS)]
    assert any(violation and ("stall:" in violation or "fence:" in violation) for violation in found), found[:3]


@pytest.mark.full
def test_a_checkpointer_that_gives_up_after_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    is_due = Checkpointer.is_due

    def unless_one_has_failed(checkpointer: Checkpointer, version: int, *, is_last: bool) -> bool:
        return not checkpointer._num_failed and is_due(checkpointer, version, is_last=is_last)

    monkeypatch.setattr(Checkpointer, "is_due", unless_one_has_failed)
    config = parse_faulty([*SMALL, "faults=heavy", "checkpoint_every=1"])
    found = [violation for seed in range(SEEDS) if (violation := simulate(config, seed).violation)]
    assert any("no checkpoint of the last step" in violation for violation in found), found[:3]
