"""Stop texts of a run: the turn ends with the token that completes one, wherever its tokens came from."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Alternatives
from penstock.dataflow.versions import Span
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import PartialTurn
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.rollout.trajectory.stop_texts import StopTextReader, end_at_stop_texts
from tests.agents import CODEC, ReplyingEngine, chat, check_tokens, run_agent, user

TEXT = "né ✓ END and more"
STOPPING = SamplingParams(200, stop_token_ids=CODEC.stop_token_ids, stop=("never", "✓ E"))


def letters(text: str) -> list[int]:
    """Tokens of each letter on its own, as `ReplyingEngine` samples them: ✓ is several."""
    return [token for letter in text for token in CODEC.tokenizer.encode(letter, add_special_tokens=False)]


async def test_an_answer_ends_with_the_token_that_completes_a_stop_text() -> None:
    engine = ReplyingEngine(lambda _context: TEXT)
    runner = TrajectoryRunner(EnginePool([engine], 4), CODEC, 20.0)
    answer = await runner.run(RolloutContext(Task(TaskId("t"), "?"), "g"), 0, STOPPING)
    assert (answer.response, answer.finish_reason) == ("né ✓ E", "stop")
    sampled = answer.token_ids[answer.loss_mask].tolist()
    assert sampled == letters("né ✓ E")
    expected = [-1.0 / (1 + token) for token in sampled]
    np.testing.assert_allclose(answer.behavior_logprobs[answer.loss_mask], expected, rtol=1e-6)
    await asyncio.sleep(0)
    assert len(engine.aborted) == 1, "the engine was not told to stop"


async def test_tokens_of_a_checkpoint_and_of_the_engine_make_up_one_stop_text() -> None:
    before, after = letters("né ✓"), letters(" END and more")
    engine = ReplyingEngine(lambda context: " END and more" if context.endswith("✓") else "?")
    runner = TrajectoryRunner(EnginePool([engine], 4), CODEC, 20.0)
    context = RolloutContext(Task(TaskId("t"), "?"), "g")
    context.saved_tokens[0] = TokenDelta(tuple(before), (-0.5,) * len(before), (Span(0, len(before)),))
    answer = await runner.run(context, 0, STOPPING)
    assert answer.response == "né ✓ E"
    assert answer.token_ids[answer.loss_mask].tolist() == before + after[:2]


def test_what_a_delta_holds_behind_the_stop_text_is_dropped_with_its_logprobs_versions_and_alternatives() -> None:
    turn = PartialTurn((5,), STOPPING)
    end_at_stop_texts(turn, CODEC)
    ids = letters(TEXT)
    count, kept = len(ids), len(letters("né ✓ E"))
    rows = tuple((index,) * (index % 3) for index in range(count))
    logprobs = tuple(-1.0 - index for index in range(count))
    delta = TokenDelta(
        tuple(ids), logprobs, (Span(3, kept - 1), Span(4, count - kept + 1)), None, Alternatives.of(rows)
    )
    turn.extend(delta)
    assert (turn.is_cut, turn.finish_reason, turn.num_tokens) == (True, "stop", kept)
    whole = turn.joined()
    assert whole.alternatives is not None
    assert (whole.token_ids, whole.logprobs) == (tuple(ids[:kept]), logprobs[:kept])
    assert whole.alternatives.rows() == rows[:kept]
    assert whole.spans == (Span(3, kept - 1), Span(4, 1))
    assert turn.finish_if_complete(), "nothing is left to sample after an interruption"


def test_the_text_ends_before_the_stop_text_that_begins_first() -> None:
    reader = StopTextReader(CODEC, ("bc", "abcd"))
    assert [reader.completes(token) for token in letters("xabc")] == [False, False, False, True]
    assert reader.text == "xa"


@pytest.mark.parametrize("stop", ["\n\n", "\nUser:", "\t", "\r\n", "\u3000", "👨\u200d👩", "\x00", "<|im_end|>"])
def test_a_stop_text_may_hold_any_character(stop: str) -> None:
    reader = StopTextReader(CODEC, (stop,))
    spelled = CODEC.encode_prompt(f"a {stop}b")
    ended = next(index for index, token in enumerate(spelled) if reader.completes(token))
    assert (reader.text, CODEC.decode(spelled[ended + 1 :])) == ("a ", "b")


def test_a_stop_text_is_found_behind_bytes_that_are_no_character() -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "EN": 258, "D": 259}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    codec = TokenCodec(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>"))
    reader = StopTextReader(codec, ("END",))
    ids = [2 + ord("9"), 2 + 0xFF, 258, 259]  # read alone, the first byte is "9"; with the second one, neither is text
    assert [reader.completes(token) for token in ids] == [False, False, False, True]
    assert reader.text.startswith("9")


async def test_an_agent_gets_the_text_without_the_stop_text_of_the_run() -> None:
    async def program(client: AsyncOpenAI) -> None:
        answer = await chat(client, [user("?")], stop=["zzz"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("né ", "stop")

    engine = ReplyingEngine(lambda _context: TEXT)
    trajectory = await run_agent(program, engine, stop=STOPPING.stop)
    check_tokens(engine, trajectory)
    assert trajectory.response == "né ✓ E"
