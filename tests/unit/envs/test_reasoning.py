"""Thinking is separated from the answer, in pieces as in one, without changing a token."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupPayload
from penstock.envs.config import EnvConfig, ReasoningConfig
from penstock.envs.environment import Action
from penstock.envs.reasoning import ReasoningReader, split_turn
from penstock.envs.tasks.math_tasks import math_verify_reward
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.platform.metrics.trajectory_table import trajectory_row
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.trainer.optimizer_steps import batch_metrics
from tests.agents import ReplyingEngine, chat, check_tokens, run_agent, user
from tests.chat_tokenizers import chat_tokenizer

THINK = ReasoningConfig()
OWN = ReasoningConfig(open="[[", close="]]")
ALWAYS = ReasoningConfig(open=None)
THINKING = TokenCodec(chat_tokenizer("chatml"), reasoning=THINK)
SAMPLING = SamplingParams(200, stop_token_ids=THINKING.stop_token_ids)


@pytest.mark.parametrize(
    ("marks", "before", "text", "reasoning", "answer"),
    [
        (THINK, "?", "<think>so</think>\n\n42", "<think>so</think>\n\n", "42"),
        (THINK, "?", " \n<think></think>42 \n", " \n<think></think>", "42 \n"),
        (THINK, "assistant\n<think>\n", "so</think>42", "so</think>", "42"),
        (THINK, "assistant\n<think>\n", "<think>so</think>42", "<think>so</think>", "42"),
        (THINK, "<think>\n\n</think>\n\n", "42", "", "42"),
        (THINK, "?", "<think>so, 42", "<think>so, 42", ""),
        (THINK, "assistant\n<think>\n", "so, 42", "so, 42", ""),
        (THINK, "?", "42", "", "42"),
        (THINK, "?", "", "", ""),
        (THINK, "?", "  <thi", "", "  <thi"),
        (THINK, "?", "it is <think>so</think> 42", "", "it is <think>so</think> 42"),
        (THINK, "?", "<think>a</think>b<think>c</think>d", "<think>a</think>", "b<think>c</think>d"),
        (OWN, "?", "[[so]] 42", "[[so]] ", "42"),
        (OWN, "?", "<think>so</think>42", "", "<think>so</think>42"),
        (ALWAYS, "?", "so</think>42", "so</think>", "42"),
        (ALWAYS, "?", "so", "so", ""),
    ],
)
def test_an_answer_is_what_follows_the_thinking(
    marks: ReasoningConfig, before: str, text: str, reasoning: str, answer: str
) -> None:
    assert split_turn(marks, text, before) == (reasoning, answer)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a", "<"]), max_size=8),
    st.sampled_from(["?", "<think>\n"]),
    st.sampled_from([THINK, ALWAYS]),
)
def test_parsing_in_pieces_equals_parsing_the_whole_text(
    pieces: list[str], before: str, marks: ReasoningConfig
) -> None:
    text = "".join(pieces)
    whole, letters = ReasoningReader(marks, before), ReasoningReader(marks, before)
    said = [*(whole.read(piece) for piece in pieces), whole.finish()]
    again = [*(letters.read(letter) for letter in text), letters.finish()]
    assert (whole.thought, whole.answer) == (letters.thought, letters.answer)
    assert [("".join(parts)) for parts in zip(*said, strict=True)] == [whole.thought, whole.answer]
    assert [("".join(parts)) for parts in zip(*again, strict=True)] == [whole.thought, whole.answer]
    assert "".join(split_turn(marks, text, before)) == text
    assert split_turn(marks, text, before).answer == whole.answer


def test_the_marks_are_one_key() -> None:
    assert EnvConfig.model_validate({"factory": "arithmetic", "reasoning": "think"}).reasoning == THINK
    assert (
        EnvConfig.model_validate({"factory": "arithmetic", "reasoning": {"open": "[[", "close": "]]"}}).reasoning == OWN
    )
    assert EnvConfig(factory="arithmetic").reasoning is None


def test_a_mark_that_no_text_shows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.reasoning.close='<\|im_end\|>': a special token"):
        TokenCodec(chat_tokenizer("chatml"), reasoning=ReasoningConfig(close="<|im_end|>"))


async def test_a_reward_gets_the_answer_and_the_trainer_all_tokens() -> None:
    said = "<think>\\boxed{41}? No.</think>\n\nIt is \\boxed{42}."
    engine = ReplyingEngine(lambda context: said, THINKING)
    runner = TrajectoryRunner(EnginePool([engine], 4), THINKING, 5.0)
    task = Task(TaskId("t"), [user("6 * 7?")], {"answer": "42"})
    trajectory = await runner.run(RolloutContext(task, "0"), 0, SAMPLING)
    assert (trajectory.reasoning, trajectory.response) == (said[: -len("It is \\boxed{42}.")], "It is \\boxed{42}.")
    assert trajectory.text == said
    assert math_verify_reward(trajectory, "42") == 1.0
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == engine.served[0][2]
    trajectory.score(1.0, {})
    metrics = batch_metrics([GroupPayload(GroupId(0), (trajectory, trajectory))])
    assert metrics["length/reasoning_share"] == pytest.approx(len(trajectory.reasoning) / len(said))
    assert trajectory_row(0, trajectory, 0)["response"] == said


async def test_an_environment_gets_answers_while_the_history_keeps_the_thinking() -> None:
    heard: list[Action] = []

    class Twice:
        def open(self, task: Task) -> Any:
            return self

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        async def reset(self) -> EpisodeReply:
            return {"content": [user("?")], "role": "user"}  # type: ignore[typeddict-item]

        async def step(self, action: Action) -> EpisodeReply:
            heard.append(action)
            if len(heard) == 2:
                return {"done": True, "reward": 1.0}
            return {"content": [user("Check that again.")], "role": "user"}  # type: ignore[typeddict-item]

    engine = ReplyingEngine(lambda context: f"<think>{context.count('user')}</think>yes", THINKING)
    player = EpisodePlayer(Twice().open, THINKING, EpisodeBudget(4, 500))
    runner = TrajectoryRunner(EnginePool([engine], 4), THINKING, 5.0, episodes=player)
    trajectory = await asyncio.wait_for(
        runner.run(RolloutContext(Task(TaskId("t"), "?", {}, ""), "0"), 0, SAMPLING), 10
    )
    assert [(one.text, one.reasoning) for one in heard] == [
        ("yes", "<think>1</think>"),
        ("yes", "<think>2</think>"),
    ]
    check_tokens(engine, trajectory)
    assert "<think>1</think>yes" in THINKING.decode(engine.served[1][1])
    assert (trajectory.response, trajectory.text) == ("yesyes", "<think>1</think>yes<think>2</think>yes")


def opened_by_the_template() -> TokenCodec:
    """A chat template that begins each answer with the open mark."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, clean_up_tokenization_spaces=False
    )
    template = chat_tokenizer("chatml").chat_template
    assert isinstance(template, str)
    generation_prompt = "<|im_start|>assistant\\n"
    assert template.count(generation_prompt) == 1
    tokenizer.chat_template = template.replace(generation_prompt, generation_prompt + "<think>\\n")
    return TokenCodec(tokenizer, reasoning=THINK)


async def test_where_the_template_opens_the_block_the_close_mark_alone_ends_it_in_every_turn() -> None:
    codec, answers = opened_by_the_template(), []

    async def talk(client: AsyncOpenAI) -> EpisodeReply:
        messages: list[Any] = []
        for _ in range(2):
            messages.append(user("?"))
            message = (await chat(client, messages)).choices[0].message
            answers.append((message.content, message.reasoning_content))
            messages.append({"role": "assistant", "content": message.content})
        return {"done": True, "reward": 1.0}

    engine = ReplyingEngine(lambda context: "hm</think>\n42", codec)
    trajectory = await run_agent(talk, engine, codec=codec)
    assert answers == [("42", "hm"), ("42", "hm")]
    check_tokens(engine, trajectory)
    assert trajectory.response == "4242"


async def test_the_endpoint_returns_thinking_and_content_separately_whole_and_streamed() -> None:
    async def talk(client: AsyncOpenAI) -> EpisodeReply:
        first = (await chat(client, [user("?")])).choices[0].message
        assert (first.content, first.reasoning_content) == ("It is 42.", "6 times 7\n")
        history = [user("?"), first.model_dump(exclude_none=True), user("Sure?")]
        thought = answer = ""
        async for chunk in await chat(client, history, stream=True):
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            answer += delta.content or ""
        assert (answer, thought) == ("It is 42.", "6 times 7\n")
        history += [{"role": "assistant", "content": answer}, user("Really?")]
        third = (await chat(client, history, stop=["42"])).choices[0].message
        assert (third.content, third.reasoning_content) == ("It is ", "6 times 7\n")
        return {"done": True, "reward": 1.0}

    engine = ReplyingEngine(lambda context: "<think>6 times 7\n</think>\n\nIt is 42.", THINKING)
    trajectory = await run_agent(talk, engine, codec=THINKING)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert [turn.response for turn in trajectory.episode.turns] == ["It is 42.", "It is 42.", "It is 42"]
    assert np.count_nonzero(trajectory.loss_mask) == trajectory.num_sampled_tokens


async def test_thinking_of_a_history_that_is_not_continued_is_written_by_the_template() -> None:
    tokenizer = deepcopy(THINKING.tokenizer)
    shown = "(message['reasoning_content'] | default('')) + message['content']"
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", shown)
    codec = TokenCodec(tokenizer, reasoning=ReasoningConfig())

    async def talk(client: AsyncOpenAI) -> EpisodeReply:
        await chat(
            client, [user("?"), {"role": "assistant", "content": "a", "reasoning_content": "I guess. "}, user("!")]
        )
        message = (await chat(client, [user("?")])).choices[0].message
        changed = {"role": "assistant", "content": message.content, "reasoning_content": "I know. "}
        await chat(client, [user("?"), changed, user("!")])
        return {"done": True, "reward": 1.0}

    engine = ReplyingEngine(lambda context: "<think>a</think>b", codec)
    trajectory = await run_agent(talk, engine, codec=codec)
    assert len(trajectory.threads) == 3
    first, _, third = (codec.decode_prompt(prompt) for _, prompt, _ in engine.served)
    assert "I guess.a" in first
    assert "I know.b" in third


async def test_plain_completions_and_unset_marks_give_the_text_as_it_is() -> None:
    said = "<think>a</think>b"

    async def complete(client: AsyncOpenAI) -> EpisodeReply:
        first = (await client.completions.create(model="policy", prompt="?")).choices[0].text
        assert first == said
        await client.completions.create(model="policy", prompt=f"?{first}!")
        return {"done": True, "reward": 1.0}

    async def talk(client: AsyncOpenAI) -> EpisodeReply:
        message = (await chat(client, [user("?")])).choices[0].message
        assert message.content == said
        assert not hasattr(message, "reasoning_content")
        return {"done": True, "reward": 1.0}

    trajectory = await run_agent(complete, ReplyingEngine(lambda context: said, THINKING), codec=THINKING)
    assert trajectory.response == "bb"
    assert (await run_agent(talk, ReplyingEngine(lambda context: said))).response == said
