"""Environments of the verifiers library: their own rollouts against the endpoint, scored by their own rubrics."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.envs.adapters.verifiers_env import VerifiersTasks
from penstock.envs.config import EnvConfig, StreamConfig
from penstock.envs.endpoint.scripted import NewText, play_program
from penstock.envs.streams import named_tasks
from penstock.envs.workers.episode_host import EpisodeHost

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLANTED = """
import asyncio
import verifiers as vf
from datasets import Dataset

def rows(first, last):
    return Dataset.from_list([{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(first, last)])

def right(completion, answer, **kwargs): return float(completion[-1]["content"] == answer)
async def length(completion): return len(completion[-1]["content"])
def raises(completion): raise KeyError("nothing")
def best(completions, **kwargs): return [1.0 for _ in completions]
def add(a: int, b: int) -> int:
    "Add two numbers."
    if a == 13: raise vf.SandboxError("the sandbox is gone")
    return a + b

class Again(vf.MultiTurnEnv):
    lock = asyncio.Lock()

    @vf.stop
    async def is_right(self, state):
        return any(step["completion"][-1]["content"] == state["answer"] for step in state["trajectory"])

    async def env_response(self, messages, state, **kwargs):
        async with self.lock:
            await asyncio.sleep(0.05)
            return [{"role": "user", "content": "Again."}]

def load_environment(kind="single", **kwargs):
    rubric = vf.Rubric(funcs=[right, length], weights=[2.0, -0.5])
    if kind == "raises": rubric.add_reward_func(raises)
    if kind == "group": return vf.SingleTurnEnv(dataset=rows(0, 9), rubric=vf.Rubric(funcs=[best]))
    if kind == "eval": return vf.SingleTurnEnv(dataset=rows(0, 9), eval_dataset=rows(6, 12), rubric=rubric)
    if kind == "turns": return Again(dataset=rows(0, 99), rubric=rubric, max_turns=4)
    if kind == "tools":
        return vf.ToolEnv(dataset=rows(0, 99), rubric=rubric, tools=[add], stop_errors=[vf.SandboxError])
    if kind == "forgets":
        class Forgets(Again):
            async def get_prompt_messages(self, state):
                return [{"role": "user", "content": str(len(state["trajectory"]))}]
        return Forgets(dataset=rows(0, 99), rubric=rubric)
    if kind == "members":
        return vf.EnvGroup([load_environment("single"), load_environment("turns")], env_names=["one", "many"])
    return vf.SingleTurnEnv(dataset=rows(0, 99), rubric=rubric, system_prompt="Add.", **kwargs)
"""


@pytest.fixture(scope="module", autouse=True)
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted_verifiers.py").write_text(PLANTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


KINDS = ("single", "turns", "tools", "raises", "forgets", "members")


def source(kind: str, **settings: Any) -> VerifiersTasks:
    return VerifiersTasks(0, "planted-verifiers", {"kind": kind, **settings})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def play() -> AsyncIterator[Callable[..., Any]]:
    """`await play(kind, *answers)`: what came of the rollout, and what the policy was shown."""
    args = {"id": "planted-verifiers"}
    streams = {kind: StreamConfig(args={"kwargs": {"kind": kind}}) for kind in KINDS}
    config = EnvConfig(factory="verifiers", args=args, streams=streams)
    host = EpisodeHost(config, 0)

    async def played(kind: str, *answers: str, member: str | None = None) -> SimpleNamespace:
        tasks = named_tasks(source(kind), kind, source(kind).train())
        task = next(task for task in tasks if member in (None, task.fields["task"]))
        left, shown = [answer.replace("ANSWER", task.fields["answer"]) for answer in answers], []

        async def say(part: NewText) -> str | None:
            shown.append(part)
            return left.pop(0) if left else None

        async with host.open(task) as opened:
            assert (await opened.reset()) == {"runs_itself": True}
            reply = await play_program(config, opened, task.task_id, say)
        return SimpleNamespace(shown=shown, question=task.fields["question"], **reply)

    try:
        yield played
    finally:
        await host.close()


@pytest.mark.full
async def test_a_single_turn_is_played_and_its_rubric_is_the_reward(play: Callable[..., Any]) -> None:
    right = await play("single", "ANSWER")
    assert right.shown == [[{"role": "system", "content": "Add."}, {"role": "user", "content": right.question}]]
    length = float(len(str(int(right.question.removesuffix("+1=")) + 1)))
    assert right.parts == {"right": 1.0, "length": length, "num_turns": 1.0}
    assert right.reward == 2.0 - 0.5 * length
    assert right.counts == {"reward_errors": 0.0}
    assert (await play("single", "no idea")).reward == -3.5


@pytest.mark.full
async def test_the_environment_ends_several_turns_and_they_share_its_lock(play: Callable[..., Any]) -> None:
    several = await asyncio.gather(*[play("turns", "?", "!", "ANSWER") for _ in range(8)])
    for played in several:
        assert [part[-1]["content"] for part in played.shown] == [played.question, "Again.", "Again."]
        assert (played.parts["right"], played.parts["num_turns"]) == (1.0, 3.0)


async def test_tools_are_called_by_the_environment(play: Callable[..., Any]) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": 1}}</tool_call>'
    played = await play("tools", call % 2, "ANSWER")
    assert [part[-1]["content"] for part in played.shown] == [played.question, "3"]
    assert (played.parts["right"], played.parts["add_calls"]) == (1.0, 1.0)
    assert (await play("tools", call % 13)).parts["add_calls"] == 1.0  # ended by its tool, and scored


async def test_members_of_a_group_are_scored_by_their_own_rubrics(play: Callable[..., Any]) -> None:
    assert (await play("members", "ANSWER", member="one")).parts["right"] == 1.0
    assert (await play("members", "?", "ANSWER", member="many")).parts["num_turns"] == 2.0


async def test_what_the_policy_does_is_scored_and_what_else_goes_wrong_fails_the_attempt(
    play: Callable[..., Any],
) -> None:
    assert (await play("turns", "?")).parts["num_turns"] == 1.0  # it ran into its budget
    assert (await play("single", "")).counts == {"reward_errors": 2.0}  # no message to look at
    raised = await play("raises", "ANSWER")
    assert (raised.counts, raised.parts["raises"], raised.parts["right"]) == ({"reward_errors": 1.0}, 0.0, 1.0)
    forgotten = await play("forgets", "?", "ANSWER")  # the second turn has a history of its own
    assert (forgotten.parts["right"], forgotten.parts["num_turns"]) == (1.0, 2.0)


def prompts(tasks: Sequence[Task]) -> set[str]:
    return {str(task.prompt) for task in tasks}


async def test_what_is_held_out_is_never_trained_on() -> None:
    split = source("single")
    held_out = split.held_out(5)
    assert not prompts(held_out) & prompts(list(islice(split.train(), 300)))
    assert split.held_out(99)[:5] == held_out
    given = source("eval")
    assert {task.fields["answer"] for task in given.held_out(6)} == {str(n + 1) for n in range(6, 12)}
    assert {task.fields["answer"] for task in islice(given.train(), 20)} == {str(n + 1) for n in range(6)}


async def test_what_cannot_be_played_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="reward function best scores all rollouts of a task together"):
        source("group")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    with pytest.raises(ValueError, match="Could not import 'planted-verifier' environment"):
        VerifiersTasks(0, "planted-verifier")
    monkeypatch.setattr("verifiers.Client", object, raising=False)
    with pytest.raises(ConfigError, match=r"verifiers 0\.1\.10 is installed; this adapter is for 0\.1\.10"):
        source("single")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[envs\]'"):
        source("single")
