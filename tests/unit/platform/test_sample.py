"""Which tasks are answered, which answers of a policy become pairs, and what is printed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import Episode, FinishReason, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.platform.checks.load import compose_config
from penstock.platform.run import sample
from penstock.platform.run.sample import ranked_pairs, run_sample
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.rollout_context import RolloutContext


def answer(
    text: str, reward: float, finish_reason: FinishReason = "stop", episode: Episode | None = None
) -> Trajectory:
    return Trajectory(
        TrajectoryId("t"),
        TaskId("t"),
        np.array([5, 6], np.int32),
        np.array([False, True]),
        np.zeros(2, np.float32),
        (Span(0, 1),),
        "p",
        text,
        finish_reason,
        reward,
        episode=episode,
    )


def texts(*answers: Trajectory) -> list[tuple[str, str]]:
    return [(better.response, worse.response) for better, worse in ranked_pairs(answers)]


def test_pairs_differ_in_reward_and_the_widest_come_first() -> None:
    assert texts(answer("half", 0.5), answer("none", 0.0), answer("full", 1.0)) == [
        ("full", "none"),
        ("full", "half"),
        ("half", "none"),
    ]
    assert texts(answer("a", 1.0), answer("b", 1.0)) == []
    assert texts(answer("a", 0.3), answer("b", 0.1 + 0.2)) == [], "rounding is no preference"
    assert texts() == []


def test_a_text_is_compared_with_another_once() -> None:
    assert texts(answer("right", 1.0), answer("wrong", 0.0), answer("wrong", 0.0), answer("right", 1.0)) == [
        ("right", "wrong")
    ]


def test_truncated_answers_and_conversations_are_in_no_pair() -> None:
    conversation = Episode((Turn("right", "stop", 1),), "done")
    assert texts(answer("right", 1.0), answer("cut", 0.0, "length"), answer("said", 0.0, episode=conversation)) == []


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., list[str]]:
    """Samples one answer to each of four tasks, of 3, 40, 5 and 41 characters, and returns the printed lines."""
    monkeypatch.chdir(tmp_path)
    prompts = ["1+2", "1+" * 20, "12+34", "1+" * 20 + "1"]
    rows = [{"prompt": prompt, "answer": "3"} for prompt in prompts]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    codec = TokenCodec(character_tokenizer())

    @asynccontextmanager
    async def served(*_: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(runner=SimpleNamespace(codec=codec), rewards=None)

    async def answered(_runner: Any, _rewards: Any, _context: RolloutContext, *_: Any) -> Trajectory:
        return answer("3", 1.0)

    monkeypatch.setattr(sample, "serving", served)
    monkeypatch.setattr(sample, "sample_and_score", answered)

    def run(context_tokens: int, *overrides: str) -> list[str]:
        words = ["experiment=arithmetic", "env=dataset", "env.args.path=rows.jsonl", "reward=exact_match", "name=out"]
        counts = ["sample.num_tasks=4", "sample.answers_per_task=1", "rollout.sampling.max_new_tokens=8"]
        context = f"model.max_context_tokens={context_tokens}"
        assert run_sample(compose_config([*words, *counts, context, *overrides], command="sample")) == 0
        return capsys.readouterr().out.splitlines()

    return run


def test_tasks_whose_prompt_leaves_no_space_for_an_answer_are_left_out_and_counted(sampled) -> None:
    *shown, figures = sampled(32)
    prompts = [json.loads(line)["prompt"] for line in Path("runs/out/answers.jsonl").read_text().splitlines()]
    assert sorted(prompts) == ["1+2", "12+34"]
    assert (json.loads(figures)["answers"], json.loads(figures)["skipped"]) == (2, 2)
    assert "  2 of 4 tasks left out: no space for an answer of 8 tokens in model.max_context_tokens=32" in shown


def test_no_task_that_fits_is_an_error(sampled) -> None:
    with pytest.raises(PenstockError, match="all 4 tasks leave no space for an answer of 8 tokens in model"):
        sampled(10)


def test_the_form_of_the_console_is_that_of_the_configuration(sampled) -> None:
    assert len(sampled(64, "console=quiet")) == 1
    header, *_ = sampled(64, "console=json", "name=other")
    assert json.loads(header)["event"] == "start"
