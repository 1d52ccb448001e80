"""The trainer gets what the engines saw: 1,000 random conversations with tools, failing engines, two templates.

The oracle is the engines' own log: at which position of which sequence each sampled and what logprob it gave.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId, RequestId, TaskId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.dataflow.versions import Span, versions_per_token
from penstock.envs.environment import Action
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.chat_tokenizers import END_OF_TURN, chat_tokenizer

NUM_CONVERSATIONS = 500
"""Of each template."""
MAX_TOKENS = 700


@dataclass
class Logged:
    """One request as the engine served it."""

    prompt: tuple[int, ...]
    sampled: list[tuple[int, float, int]] = field(default_factory=list)


@dataclass
class RandomEngine:
    """Samples at random among tokens of visible text, so that ids are seldom what encoding their text would give."""

    engine_id: EngineId
    rng: random.Random
    vocabulary: list[int]
    end: int
    version: int = 0
    log: dict[str, list[Logged]] = field(default_factory=dict)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        trajectory = request.request_id.partition("#")[0]
        served = Logged(request.prompt_token_ids)
        self.log.setdefault(trajectory, []).append(served)
        while True:
            await asyncio.sleep(0)
            if self.rng.random() < 0.02:
                raise EngineLostError("planted")
            if self.rng.random() < 0.02:
                yield TokenDelta((), (), (), "abort")
                return
            if self.rng.random() < 0.01:
                self.version += 1
            space = request.sampling.max_new_tokens - len(served.sampled)
            tokens = [self.rng.choice(self.vocabulary) for _ in range(min(space, self.rng.randint(1, 4)))]
            if self.rng.random() < 0.25:
                tokens[-1] = self.end
            logprobs = [-self.rng.randint(1, 1000) / 1024 for _ in tokens]  # exact in float32
            served.sampled += [(token, value, self.version) for token, value in zip(tokens, logprobs, strict=True)]
            is_full = len(served.sampled) == request.sampling.max_new_tokens
            reason = "stop" if tokens[-1] == self.end else "length" if is_full else None
            yield TokenDelta(tuple(tokens), tuple(logprobs), (Span(self.version, len(tokens)),), reason)  # type: ignore[arg-type]
            if reason:
                return

    async def abort(self, request_id: RequestId) -> None:
        pass

    async def load(self) -> EngineLoad:
        return EngineLoad(self.version, 0, 0, 0.0, 0, 0.0)


class RandomConversations:
    """Environments that say something at random; keeps the messages of each conversation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.messages: dict[str, list[dict[str, str]]] = {}

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        yield _Conversation(self, task)

    def text(self) -> str:
        words = ["the", "tool", "12", "né", "✓", '{"a": 1}', "line\nline", "numbers", "<b>"]
        return " ".join(self.rng.choice(words) for _ in range(self.rng.randint(1, 6)))


class _Conversation:
    def __init__(self, owner: RandomConversations, task: Task) -> None:
        self._owner = owner
        self._messages = owner.messages[task.task_id] = list(task.prompt)  # type: ignore[arg-type]

    async def reset(self) -> EpisodeReply:
        return {"content": list(self._messages), "role": "user"}

    async def step(self, action: Action) -> EpisodeReply:
        rng = self._owner.rng
        await asyncio.sleep(0)
        self._messages.append({"role": "assistant", "content": action.text})
        if rng.random() < 0.15:
            return {"done": True, "reward": 1.0}
        if rng.random() < 0.4:
            text = self._owner.text()
            self._messages.append({"role": "tool", "content": text})
            return {"content": text, "role": "tool"}
        said = [{"role": rng.choice(["tool", "user"]), "content": self._owner.text()} for _ in range(rng.randint(1, 3))]
        self._messages += said
        return {"content": said, "role": "user"}


def prompts(conversations: RandomConversations) -> list[dict[str, str]]:
    system = [{"role": "system", "content": "Use the tool."}] if conversations.rng.random() < 0.5 else []
    return [*system, {"role": "user", "content": conversations.text()}]


async def play(
    template: str, seed: int
) -> tuple[TokenCodec, RandomConversations, list[RandomEngine], list[Trajectory]]:
    tokenizer = chat_tokenizer(template)
    codec, rng = TokenCodec(tokenizer), random.Random(f"{template}/{seed}")
    visible = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).isascii() and tokenizer.decode([i]).isalnum()]
    (end,) = codec.stop_token_ids
    engines = [RandomEngine(EngineId(name), rng, visible, end) for name in "ab"]
    conversations = RandomConversations(rng)
    pool = EnginePool(engines, 16, version_timeout_s=5.0)
    pool.lost = lambda lease, error, group: None  # type: ignore[method-assign]  # random losses fence no engine
    player = EpisodePlayer(conversations.open, codec, EpisodeBudget(6, MAX_TOKENS))
    runner = TrajectoryRunner(pool, codec, 60.0, max_resumes=1000, episodes=player)

    async def keep_up() -> None:
        while True:  # a trajectory may wait for the other engine's version
            newest = max(engine.version for engine in engines)
            for engine in engines:
                engine.version = newest
            pool.refresh()
            await asyncio.sleep(0)

    publisher = asyncio.create_task(keep_up())
    tasks = [Task(TaskId(f"t/{index}"), prompts(conversations), {}, "") for index in range(NUM_CONVERSATIONS)]
    sampling = SamplingParams(24, stop_token_ids=codec.stop_token_ids)
    runs = [runner.run(RolloutContext(task, f"{index}"), 0, sampling) for index, task in enumerate(tasks)]
    trajectories = list(await asyncio.wait_for(asyncio.gather(*runs), 200))
    publisher.cancel()
    assert sum(runner.stats.interruptions.values()) > NUM_CONVERSATIONS // 4
    return codec, conversations, engines, trajectories


@pytest.mark.full
@pytest.mark.parametrize("template", sorted(END_OF_TURN))
async def test_the_trainers_sequence_is_the_engines_and_the_mask_is_exactly_what_they_sampled(template: str) -> None:
    codec, conversations, engines, trajectories = await play(template, 0)
    assert len(trajectories) == NUM_CONVERSATIONS
    ends = set()
    for index, trajectory in enumerate(trajectories):
        served = [logged for engine in engines for logged in engine.log.get(f"{index}/0", [])]
        token_ids = trajectory.token_ids.tolist()
        sampled = {
            len(logged.prompt) + offset: entry for logged in served for offset, entry in enumerate(logged.sampled)
        }
        assert all(token_ids[: len(logged.prompt)] == list(logged.prompt) for logged in served), "a prefix was changed"
        assert trajectory.loss_mask.tolist() == [position in sampled for position in range(len(token_ids))]
        versions = iter(versions_per_token(trajectory.spans).tolist())
        for position, (token, logprob, version) in sorted(sampled.items()):
            assert (token_ids[position], float(trajectory.behavior_logprobs[position])) == (token, logprob)
            assert next(versions) == version
        assert not trajectory.behavior_logprobs[~trajectory.loss_mask].any()
        assert len(token_ids) <= MAX_TOKENS
        check_text(codec, template, conversations.messages[trajectory.task_id], trajectory)
        assert trajectory.episode is not None
        ends.add(trajectory.episode.end)
        assert sum(turn.num_tokens for turn in trajectory.episode.turns) == trajectory.num_sampled_tokens
    assert {"done", "max_turns"} <= ends
    assert any(turn.num_interruptions for one in trajectories for turn in one.episode.turns)  # type: ignore[union-attr]
    assert any(turn.finish_reason == "length" for one in trajectories for turn in one.episode.turns)  # type: ignore[union-attr]


def check_text(codec: TokenCodec, template: str, messages: list[dict[str, str]], trajectory: Trajectory) -> None:
    """These templates keep the history as it was, so the tokens read as the rendered conversation."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    rendered = codec.tokenizer.apply_chat_template(messages[: last + 1], tokenize=False)
    text = codec.tokenizer.decode(trajectory.token_ids.tolist())
    end = END_OF_TURN[template]
    assert text.rstrip("\n").removesuffix(end) == rendered.rstrip("\n").removesuffix(end)


async def test_sampled_ids_are_not_what_encoding_their_text_would_give() -> None:
    """Otherwise the test above could not distinguish re-tokenised history from kept history."""
    codec, _, _, trajectories = await play("chatml", 1)
    again = [tuple(codec.tokenizer.encode(codec.tokenizer.decode(one.token_ids))) for one in trajectories]
    assert (
        sum(tuple(one.token_ids) != ids for one, ids in zip(trajectories, again, strict=True)) > NUM_CONVERSATIONS // 10
    )
