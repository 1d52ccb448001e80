"""Programs that do anything with their histories: what is recorded, and what carries loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.dataflow.versions import Span
from penstock.envs.config import TrainedThreads
from penstock.envs.endpoint.chat_api import parse_chat
from penstock.envs.endpoint.requests import BudgetError, Caller
from penstock.envs.endpoint.session import Exchange
from penstock.rollout.trajectory.conversation import EpisodeBudget, PartialTurn
from penstock.rollout.trajectory.recording import Recording
from tests.agents import CODEC
from tests.tiers import by_tier

Message = dict[str, str]
TOOLS: list[list[dict[str, Any]]] = [
    [],
    [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
    [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}],
]


@dataclass
class Answered:
    """One answered request: what the program sent and got, and the tokens on the engine's side."""

    tools: int
    messages: list[Message]
    prompt: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    text: str = ""

    @property
    def history(self) -> list[Message]:
        return [*self.messages, {"role": "assistant", "content": self.text}]


@dataclass
class Program:
    """Draws requests from a seed, some of them several at once, and keeps what it got."""

    recording: Recording
    rng: random.Random
    answered: list[Answered] = field(default_factory=list)
    num_refused: int = 0

    def next_request(self) -> Answered:
        rng, known = self.rng, self.answered
        if not known or rng.random() < 0.1:
            return Answered(rng.randrange(3), self.beginning())
        one = rng.choice(known[-4:] if rng.random() < 0.7 else known)
        kind = rng.choice(["on", "on", "on", "again", "edit", "summary", "back", "other tools", "drop a result"])
        messages, new = list(one.history), {"role": "user", "content": f"and {rng.randrange(9)}?"}
        if kind == "again":
            return Answered(one.tools, one.messages)
        if kind == "edit":
            messages[-1] = {"role": "assistant", "content": messages[-1]["content"] + " (cut)"}
        if kind == "summary":
            messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "In short: x"}]
        if kind == "back":
            messages = messages[: rng.randrange(len(messages))]
        if kind == "drop a result" and len(messages) > 3:
            del messages[rng.randrange(1, len(messages) - 1)]
        tools = rng.randrange(3) if kind == "other tools" else one.tools
        return Answered(tools, [*messages, new])

    def beginning(self) -> list[Message]:
        system = {"role": "system", "content": self.rng.choice(["You are helpful.", "Write a title."])}
        return [system, {"role": "user", "content": self.rng.choice(["the tool answered", "12 34"])}]

    async def ask(self, one: Answered) -> None:
        body = {"model": "policy", "messages": one.messages} | ({"tools": TOOLS[one.tools]} if one.tools else {})
        try:
            one.text = (await self.recording.answer(Exchange(parse_chat(body, Caller()).request))).text
        except BudgetError:
            self.num_refused += 1
        else:
            self.answered.append(one)

    async def run(self, num_steps: int, served: Served) -> None:
        for _ in range(num_steps):
            several = [self.next_request() for _ in range(self.rng.choice([1, 1, 1, 2, 3]))]
            if self.rng.random() < 0.3:
                several = [Answered(one.tools, one.messages) for one in [several[0]] * len(several)]
            await asyncio.gather(*map(self.ask, several))
        for one in self.answered:
            one.prompt, one.sampled = served.by_text[one.text]


@dataclass
class Served:
    """Samples turns whose texts are all different, letter by letter, so that no encoding of the text has their ids."""

    rng: random.Random
    by_text: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    version: int = 0

    async def sample(self, turn: PartialTurn) -> None:
        self.version += self.rng.random() < 0.3
        assert turn.min_version() <= self.version
        text = f"the answer {len(self.by_text)}"
        letters = [CODEC.tokenizer.encode(letter, add_special_tokens=False) for letter in text]
        ids = (*(token for letter in letters for token in letter), CODEC.stop_token_ids[0])
        self.by_text[text] = turn.prompt_ids, ids
        await asyncio.sleep(0)
        logprobs = tuple([-1.0 / (1 + token) for token in ids])
        turn.extend(TokenDelta(ids, logprobs, (Span(self.version, len(ids)),), "stop"))


def play(seed: int, threads: TrainedThreads, num_steps: int = 8, max_turns: int = 100) -> tuple[Program, Trajectory]:
    rng = random.Random(seed)
    served = Served(rng)
    sampling = SamplingParams(200, stop_token_ids=CODEC.stop_token_ids, seed=seed)
    recording = Recording(CODEC, EpisodeBudget(max_turns, 2000), sampling, served.sample, threads)
    program = Program(recording, rng)
    asyncio.run(program.run(num_steps, served))
    task = Task(TaskId("t"), "?", {}, "")
    return program, recording.trajectory(task, TrajectoryId("1/0"), {"done": True, "reward": 1.0}, {})


def num_times_with_loss(one: Answered, parts: list[Trajectory]) -> int:
    """In how many threads the tokens of an answer stand after its prompt and carry loss."""
    tokens, start = [*one.prompt, *one.sampled], len(one.prompt)
    found = 0
    for part in parts:
        if part.token_ids[: len(tokens)].tolist() == tokens:
            mask = part.loss_mask[start : len(tokens)]
            assert mask.all() or not mask.any(), "a turn carries loss as a whole"
            found += bool(mask.all())
    return found


def check(program: Program, trajectory: Trajectory, has_loss: Callable[[Answered], bool]) -> None:
    parts = list(trajectory.split_threads())
    for one in program.answered:
        assert num_times_with_loss(one, parts) == has_loss(one), one
    trained = [one for one in program.answered if has_loss(one)]
    assert int(trajectory.loss_mask.sum()) == sum(len(one.sampled) for one in trained), "and no other token"
    mask, ids = trajectory.loss_mask, trajectory.token_ids
    expected = np.where(mask, np.float32(-1.0) / (1 + ids), np.float32(0)).astype(np.float32)
    np.testing.assert_allclose(trajectory.behavior_logprobs, expected, rtol=1e-6)
    assert trajectory.episode is not None
    assert sorted(turn.response for turn in trajectory.episode.turns) == sorted(one.text for one in trained)
    others = sorted(one.text for one in program.answered if not has_loss(one))
    assert sorted(turn.response for turn in trajectory.episode.side_turns) == others
    for now in program.answered:  # nothing that was sampled is tokenised again
        before = [
            one
            for one in program.answered
            if one.tools == now.tools
            and len(one.history) < len(now.messages)
            and now.messages[: len(one.history)] == one.history
        ]
        for one in before:
            whole = (*one.prompt, *one.sampled)
            assert now.prompt[: len(whole)] == whole


SEEDS = range(by_tier(20, 334))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sampled_token_carries_loss_once_where_all_threads_are_trained(seed: int) -> None:
    program, trajectory = play(seed, "all")
    check(program, trajectory, lambda one: True)


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_with_the_agents_tools_are_trained_and_the_others_are_kept_to_be_read(seed: int) -> None:
    program, trajectory = play(seed + 1000, "agent")
    (tools,) = {one.tools for one in program.answered if num_times_with_loss(one, list(trajectory.split_threads()))}
    check(program, trajectory, lambda one: one.tools == tools)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_led_to_the_last_answer_is_one_sequence_if_that_alone_is_trained(seed: int) -> None:
    program, trajectory = play(seed + 2000, "last")
    assert trajectory.threads == ()
    parts = [trajectory]
    path = [one for one in program.answered if num_times_with_loss(one, parts)]
    check(program, trajectory, lambda one: any(one is other for other in path))
    assert path[-1] is max((one for one in program.answered if one.tools == path[-1].tools), key=program.answered.index)
    for one, after in pairwise(path):
        assert after.prompt[: len(one.prompt) + len(one.sampled)] == (*one.prompt, *one.sampled)


def test_a_program_that_never_stops_is_refused_and_takes_no_more_memory() -> None:
    program, trajectory = play(7, "all", num_steps=200, max_turns=6)
    assert program.num_refused > 100
    assert len(program.answered) <= 3 * 6, "turns are counted for each set of tools"
    assert trajectory.episode is not None
    assert trajectory.episode.end == "max_turns"
    assert trajectory.finish_reason == "length"
