"""Episodes that fork and join: exact tokens, each with loss in one thread; waiting order; versions of the tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import EngineId, TaskId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Alternatives, Trajectory
from penstock.dataflow.versions import join_spans, versions_per_token
from penstock.envs.environment import Action, Done, Observation
from penstock.envs.workers.episode_child import EpisodeReply, to_episode_reply
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engine_pool.routing import EngineView, LeastLoaded, SlotRequest
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import OldestTurn, RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.fakes import FakeEngine

CODEC = TokenCodec(character_tokenizer())
TASK = Task(TaskId("t"), "1+1=", {}, "")
SAMPLING = SamplingParams(8, temperature=0.0, stop_token_ids=(1,))
BUDGET = EpisodeBudget(max_turns=20, max_tokens=200, max_threads=8)
Script = Callable[[Sequence[Action]], Any]


class Scripted:
    """Says first `opening`, then what `script` gives for the actions; keeps them."""

    def __init__(self, opening: Any, script: Script) -> None:
        self.opening = opening
        self.script = script
        self.heard: list[list[Action]] = []

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        yield self

    async def reset(self) -> EpisodeReply:
        return to_episode_reply(self.opening, "reset")

    async def step(self, action: Action) -> EpisodeReply:
        return self._answer([action], "step")

    async def step_all(self, actions: Sequence[Action]) -> EpisodeReply:
        return self._answer(list(actions), "step_all")

    def _answer(self, actions: list[Action], method: str) -> EpisodeReply:
        self.heard.append(actions)
        reply = to_episode_reply(self.script(actions), method)
        assert "error" not in reply, reply
        return reply


class Watched(RolloutContext):
    """A context that keeps the versions recorded for its only trajectory."""

    def __init__(self) -> None:
        super().__init__(TASK, "0", self._note)
        self.told: list[int] = []

    def _note(self, member: int, version: int) -> None:
        assert member == 3
        self.told.append(version)


class OldestFirst(LeastLoaded):
    """The oldest of the engines that are least busy."""

    def choose(self, views: Sequence[EngineView], request: SlotRequest) -> EngineView:
        return min(views, key=lambda view: (view.in_use, view.version))


async def play(
    opening: Any,
    script: Script,
    *engines: FakeEngine,
    budget: EpisodeBudget = BUDGET,
    context: Watched | None = None,
    sampling: SamplingParams = SAMPLING,
) -> tuple[Trajectory, Scripted]:
    environment = Scripted(opening, script)
    pool = EnginePool(engines or [FakeEngine()], 8, policy=OldestFirst())
    runner = TrajectoryRunner(pool, CODEC, 5.0, episodes=EpisodePlayer(environment.open, CODEC, budget))
    context = context or Watched()
    async with asyncio.timeout(10):
        return await runner.run(context, 3, sampling), environment


def drafts_then_refine(actions: Sequence[Action]) -> Any:
    """A plan, two drafts that fork from it, then main again, which quotes them."""
    if [action.thread for action in actions] == ["draft0", "draft1"]:
        return Observation("#" + "|".join(action.text for action in actions))
    if actions[0].turn == 0:
        return [Observation(f"{index}:", thread=f"draft{index}", fork_of="main", reward=0.5) for index in range(2)]
    return Done(1.0)


async def test_drafts_fork_from_the_plan_and_main_goes_on_with_their_words() -> None:
    engine = FakeEngine()
    trajectory, environment = await play(Observation("1+1="), drafts_then_refine, engine)
    main, *drafts = trajectory.split_threads()
    assert [(one.name, one.fork_of) for one in trajectory.threads] == [
        ("main", None), ("draft0", "main"), ("draft1", "main")
    ]  # fmt: skip
    plan = main.token_ids[:7].tolist()
    assert [one.token_ids[:9].tolist() for one in drafts] == [
        [*plan, *CODEC.encode_prompt(f"{index}:")] for index in range(2)
    ]
    assert [one.loss_mask.tolist() for one in drafts] == [[False] * 9 + [True] * 3] * 2
    quote = "#" + "|".join(action.text for action in environment.heard[1])
    assert main.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] * len(quote) + [True] * 3
    assert CODEC.decode(main.token_ids[7 : 7 + len(quote)].tolist()) == quote
    assert engine.most_running == 2, "the drafts are sampled at the same time"
    assert [[(one.thread, one.turn) for one in actions] for actions in environment.heard] == [
        [("main", 0)], [("draft0", 1), ("draft1", 2)], [("main", 3)]
    ]  # fmt: skip
    assert trajectory.episode is not None
    assert (trajectory.episode.reward, trajectory.finish_reason) == (2.0, "stop")
    assert [turn.thread for turn in trajectory.episode.turns] == ["main", "draft0", "draft1", "main"]
    assert [one.response for one in drafts] == [action.text for action in environment.heard[1]]


async def test_an_ordinary_episode_has_no_threads_and_a_lone_thread_keeps_its_name() -> None:
    plain, _ = await play(Observation("1+1="), lambda actions: Done(1.0))
    assert plain.threads == ()
    assert plain.split_threads() == (plain,)
    named, _ = await play(Observation("1+1=", thread="first"), lambda actions: Done(0.5, {}, {"first": 1.0}))
    assert [one.name for one in named.threads] == ["first"]
    assert named.token_ids.tolist() == plain.token_ids.tolist()
    assert named.episode is not None
    assert named.episode.parts == {"thread/first": 1.0}
    named.score(0.5, named.episode.parts)
    assert [one.reward for one in named.split_threads()] == [1.0]


def others(token: int) -> tuple[int, ...]:
    """Alternatives of a token: none, one or two."""
    return tuple(range(token + 1, token + 1 + token % 3))


@dataclass
class RecordingEngine(FakeEngine):
    """Records what it sampled for which prompt; its version rises every few tokens."""

    answers: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    rng: random.Random = field(default_factory=random.Random)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        ids, versions = [], []
        async for delta in super().generate(request):
            ids += delta.token_ids
            versions += [span.version for span in delta.spans for _ in range(span.num_tokens)]
            if delta.finish_reason is not None:
                self.answers.append((request.prompt_token_ids, tuple(ids), tuple(versions)))
            yield delta._replace(alternatives=Alternatives.of([others(token) for token in delta.token_ids]))
            self.version += self.rng.random() < 0.1


def random_tree(rng: random.Random) -> Script:
    """Continues, forks and opens threads at random, up to four at a time."""
    names = ["main"]

    def script(actions: Sequence[Action]) -> Any:
        if rng.random() < 0.1:
            return Done(1.0)
        said, chosen = [], rng.sample(names, min(len(names), rng.randint(0, 3)))
        said += [Observation(rng.choice(["", "<", "?="]), thread=name) for name in chosen]
        for _ in range(rng.randint(0 if said else 1, 2)):
            names.append(f"t{len(names)}")
            parent = rng.choice([None, *names[:-1]])
            is_new = parent is None or parent not in names[: len(names) - 1] or parent in fresh(said)
            content = rng.choice(["7", "8:"])
            said.append(Observation(content, thread=names[-1], fork_of=None if is_new else parent))
        rng.shuffle(said)
        return said if len(said) > 1 or rng.random() < 0.5 else said[0]

    return script


def fresh(said: Sequence[Observation]) -> set[str]:
    """Threads that are opened by this very list, and so cannot be forked yet."""
    return {one.thread for one in said if one.thread.startswith("t")}


@pytest.mark.parametrize("seed", range(60))
async def test_in_any_tree_every_sampled_token_carries_loss_once_behind_its_own_context(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5) for _ in range(50)]
    engine = RecordingEngine(length=lambda serial: lengths[serial], rng=random.Random(seed))
    context = Watched()
    budget = EpisodeBudget(rng.randint(1, 16), rng.randint(12, 60), 60)
    trajectory, environment = await play(Observation("1+1="), random_tree(rng), engine, budget=budget, context=context)
    found = Counter()
    for thread in trajectory.split_threads():
        ids, mask = thread.token_ids.tolist(), thread.loss_mask.tolist()
        versions = iter(versions_per_token(thread.spans).tolist())
        join_spans(thread.spans)  # raises if they decrease
        assert thread.alternatives is not None
        assert thread.alternatives.rows() == tuple(others(token) for token in itertools.compress(ids, mask))
        assert mask[-1]
        assert len(ids) <= budget.max_tokens
        position = 0
        while position < len(ids):
            end = position + 1
            while end < len(ids) and mask[end] and ids[end - 1] != 1:
                end += 1
            if mask[position]:
                answer = tuple(ids[position:end])
                found[tuple(ids[:position]), answer, tuple(next(versions) for _ in answer)] += 1
            position = end if mask[position] else position + 1
    assert found == Counter(engine.answers)
    np.testing.assert_array_equal(
        trajectory.behavior_logprobs[trajectory.loss_mask],
        (-1 / trajectory.token_ids[trajectory.loss_mask]).astype("f"),
    )
    assert not trajectory.behavior_logprobs[~trajectory.loss_mask].any()
    assert trajectory.episode is not None
    assert len(trajectory.episode.turns) == len(engine.answers) <= budget.max_turns
    assert trajectory.num_sampled_tokens == sum(turn.num_tokens for turn in trajectory.episode.turns)
    assert sum(map(len, environment.heard)) == len(engine.answers)
    assert context.told[-1] <= trajectory.oldest_version
    assert trajectory.oldest_version == min(version for _, _, versions in engine.answers for version in versions)


async def test_the_date_is_that_of_the_oldest_turn_and_later_threads_are_no_older() -> None:
    newer, older = FakeEngine(EngineId("newer"), version=5), FakeEngine(EngineId("older"), version=4)
    steps: list[str] = []

    def script(actions: Sequence[Action]) -> Any:
        steps.append("")
        older.version = 3  # as after a restart: nothing of this episode may begin there any more
        if len(steps) == 1:
            return [Observation("1", thread="c"), Observation("2", thread="d"), Observation("3", thread="e")]
        return Done(1.0)

    context = Watched()
    opening = [Observation("1+1=", thread="a"), Observation("2+2=", thread="b")]
    trajectory, _ = await play(opening, script, newer, older, context=context)
    assert [one.oldest_version for one in trajectory.split_threads()] == [4, 5, 5, 5, 5]
    assert (trajectory.oldest_version, trajectory.newest_version, len(older.requests)) == (4, 5, 1)
    assert context.told == [4]


def test_a_date_rises_only_when_the_oldest_turn_does() -> None:
    context = Watched()
    turns = OldestTurn(context, 3)
    first, second = turns.begin(), turns.begin()
    first.record_version(3, 5)
    second.record_version(3, 5)
    first.record_version(3, 7)  # its first token came after a publish
    assert (context.told, turns.min_version) == ([5], 5)
    second.record_version(3, 6)
    turns.begin().record_version(3, 9)
    assert (context.told, turns.min_version) == ([5, 6], 6)


async def test_a_failing_turn_ends_the_others_and_gives_their_slots_back() -> None:
    engine = FakeEngine(length=lambda serial: 100, fail_first=4)
    opening = [Observation("1+1=", thread=name) for name in "ab"]
    with pytest.raises(TrajectoryError, match=r"interrupted 4 times in a row without a new token") as caught:
        await play(opening, lambda actions: Done(), engine, sampling=replace(SAMPLING, max_new_tokens=10_000))
    assert caught.value.kind == "engine"
    assert engine.running == 0


async def test_threads_draw_with_seeds_of_their_own() -> None:
    engine = FakeEngine()
    opening = [Observation("1+1=", thread=name) for name in ("main", "a", "b")]
    await play(opening, lambda actions: Done(), engine, sampling=replace(SAMPLING, seed=11))
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3


MISTAKES = {
    "two turns of one thread": ([Observation("1"), Observation("2")], "two observations of one list are for 'main'"),
    "fork of an unknown thread": ([Observation("1", thread="a", fork_of="b")], "it forks 'b', which has had no turn"),
    "fork into an open one": (Observation("1", fork_of="main"), "it forks 'main' into 'main', which is open"),
    "no name": (Observation("1", thread=""), "a thread is named ''; use 1 to 64 characters"),
    "too many": (
        [Observation("1", thread=str(n)) for n in range(3)],
        "it opens 4 threads, env.episode.max_threads is 3",
    ),
    "rewards of an unknown thread": (
        Done(1.0, thread_rewards={"x": 1.0}),
        r"thread_rewards name 'x'; there are 'main'",
    ),
}


@pytest.mark.parametrize(("said", "message"), MISTAKES.values(), ids=MISTAKES.keys())
async def test_text_that_cannot_be_tokenised_fails_the_attempt(said: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message) as caught:
        await play(Observation("1+1="), lambda actions: said, budget=EpisodeBudget(9, 99, 3))
    assert caught.value.kind == "env"


async def test_a_list_that_does_not_fit_ends_the_episode_before_all_of_it() -> None:
    several = [Observation("1"), Observation("2", thread="a", fork_of="main"), Observation("3", thread="b")]
    by_turns, _ = await play(Observation("1+1="), lambda actions: several, budget=EpisodeBudget(3, 99, 8))
    by_tokens, _ = await play(
        Observation("1+1="),
        lambda actions: [*several[:2], Observation("1" * 30, thread="b")],
        budget=EpisodeBudget(9, 30, 8),
    )
    for trajectory, end in ((by_turns, "max_turns"), (by_tokens, "max_tokens")):
        assert trajectory.episode is not None
        assert (trajectory.episode.end, len(trajectory.token_ids), trajectory.threads) == (end, 7, ())
    opening = [Observation("1+1=", thread=name) for name in "abc"]
    with pytest.raises(TrajectoryError, match=r"asks for 3 turns, the episode has 2 .* nothing could be sampled"):
        await play(opening, lambda actions: Done(), budget=EpisodeBudget(2, 99, 8))
    with pytest.raises(
        TrajectoryError, match=r"the prompt has 4 tokens, the budget .* nothing could be sampled"
    ) as caught:
        await play(opening, lambda actions: Done(), budget=EpisodeBudget(9, 4, 8))
    assert (caught.value.kind, caught.value.is_final) == ("long_prompt", True)
