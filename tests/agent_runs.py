"""A run directory with episodes of an agent program, recorded by the endpoint, whose histories branch in every way.

a title (no tools: not trained)
main: turn 1, turn 2, turn 3 ── the same request again, then turn 4 (a fork after turn 2)
two sub-agents at once, with the tools of the agent; one with other tools (not trained)
a summary (not trained), and what begins from it
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.trajectory import Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.platform.metrics.trajectory_table import TrajectoryTable
from penstock.rollout.tokenization.tokenizers import TokenCodec
from tests.agents import ReplyingEngine, chat, run_agents, user
from tests.chat_tokenizers import chat_tokenizer

HOSTILE = "</td></script><script>document.title='hostile'</script><img src=x onerror=document.title='hostile'>"
VERSION = 6
SIZE = 4
TASK = "`parse('1,5')` gives 1 and should give 1.5, as in „1,5 kg“. Find out why, correct it, and run the tests."
LISTING = "\n".join(f"-rw-r--r-- 1 agent agent {37 * index % 9000:>5} src/part_{index:02}.py" for index in range(60))
TESTS = (
    "\n".join(f"tests/test_part_{index}.py::test_it_parses {'·' * 3} PASSED" for index in range(50)) + f"\n{HOSTILE}"
)
EDIT = {
    "path": "src/numbers.py",
    "old": "float(text)",
    "new": "float(text.replace(',', '.'))  # „1,5“ → 1.5, ½ stays ½",
}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"Run {name}.", "parameters": parameters}}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


ANSWERS = {
    "A title for": ["Komma statt Punkt <b>bold</b>"],
    TASK: ["I look at what there is first.\n" + call("bash", command="ls -l src")],
    "part_00.py": ["The numbers are read in one place. " + call("bash", command="cat src/numbers.py")],
    "def parse": [
        "I could rewrite the module with a grammar.",
        "One replacement is enough; the rest of the file stays.\n"
        + call("edit", **EDIT, why="a comma is a decimal mark, " * 8),
    ],
    "1 line changed": ["Two places may depend on it. I ask for both."],
    "Look at src/a.py": ["It calls `parse` once, with a checked text: nothing changes."],
    "Look at src/b.py": ["It splits at commas *before* it calls `parse`. ✓"],
    "Which tests": ["tests/test_part_*.py, 50 of them. 😀"],
    "In short": ["The comma was not read. numbers.py is changed, its callers are unaffected; the tests are to be run."],
    "So far": [call("bash", command="pytest -q tests")],
    "test_it_parses": [f"All pass, and the last line is {HOSTILE}: no matter. Done."],
}


@dataclass
class WritingEngine(ReplyingEngine):
    """Gives the next of `ANSWERS` to the newest message of each episode."""

    said: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        newest = self.codec.tokenizer.decode(request.prompt_token_ids).split("<|im_start|>")[-2]
        answers = next(answers for said, answers in ANSWERS.items() if said in newest)
        place = (request.request_id.partition("#")[0], request.prompt_token_ids)
        text = answers[self.said[place]]
        self.said[place] += 1
        ids = (*self.codec.tokenizer.encode(text, add_special_tokens=False), self.codec.stop_token_ids[0])
        await asyncio.sleep(0)
        yield TokenDelta(ids, tuple(-1.0 / (1 + token % 7) for token in ids), (Span(self.version, len(ids)),), "stop")


async def program(client: AsyncOpenAI) -> EpisodeReply:
    """The agent."""
    tools, system = [tool("bash"), tool("edit")], {"role": "system", "content": "You correct programs. " * 20}

    async def ask(history: list[Any], result: str = "", **more: Any) -> list[Any]:
        answer = (await chat(client, history, **more)).choices[0].message
        results = [{"role": "tool", "tool_call_id": one.id, "content": result} for one in answer.tool_calls or ()]
        return [*history, answer, *results]

    await ask([user(f"A title for: {TASK}")])
    history = await ask([system, user(TASK)], LISTING, tools=tools)
    history = await ask(history, "def parse(text):\n    return float(text)\n", tools=tools)
    await ask(history, tools=tools)
    history = await ask(history, "1 line changed", tools=tools)
    history = await ask(history, tools=tools)
    await asyncio.gather(
        ask([system, user("Look at src/a.py")], tools=tools),
        ask([system, user("Look at src/b.py")], tools=tools),
        ask([system, user("Which tests are there?")], tools=[tool("glob")]),
    )
    short = (await ask([*history, user("In short, what is done?")]))[-1].content
    history = await ask([system, user(f"So far: {short}")], TESTS, tools=tools)
    await ask(history, tools=tools)
    return {"done": True, "reward": 1.0}


async def agent_episodes(codec: TokenCodec) -> list[Trajectory]:
    """A group of episodes with rewards from 0 to 1, and with seconds as if it had really happened."""
    rng = np.random.default_rng(0)

    def timed(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        return tuple(
            replace(
                turn, sampling_s=turn.num_tokens / 20, environment_s=float(rng.lognormal()) if turn.observation else 0.0
            )
            for turn in turns
        )

    limits = {"max_turns": 20, "max_tokens": 60_000, "max_new_tokens": 2000}
    played = await run_agents([program] * SIZE, WritingEngine(lambda _: "", codec), codec=codec, **limits)  # type: ignore[arg-type]
    for index, one in enumerate(played):
        assert one.episode is not None
        one.score(index / (SIZE - 1), {"tests": index / (SIZE - 1), "short": 0.5})
        one.spans = (Span(4, one.num_sampled_tokens - 60), Span(5, 60))
        one.trajectory_id, one.task_id = TrajectoryId(f"7/{index}"), TaskId("repositories/numbers")
        one.episode = replace(one.episode, turns=timed(one.episode.turns), side_turns=timed(one.episode.side_turns))
    return played


def write_agent_run(run_dir: Path, codec: TokenCodec | None = None) -> Path:
    """Write a run of one step with one group."""
    codec = codec or TokenCodec(chat_tokenizer("hermes"))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("name: agents\ntotal_steps: 1\ndataflow: {max_staleness: 2}\n")
    played = asyncio.run(agent_episodes(codec))
    trained = {
        one.trajectory_id: (
            np.where(one.loss_mask, one.behavior_logprobs + 0.02, np.nan).astype(np.float32),
            np.where(one.loss_mask, 2 * (one.reward or 0.0) - 1, np.nan).astype(np.float32),
        )
        for one in played
    }
    TrajectoryTable(run_dir, codec.token_texts).write_step(1, played, version=VERSION, trained=trained)
    return run_dir
