"""An environment that runs the tools that a policy calls. A turn without a call is the final answer and is scored."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Sequence

from penstock.dataflow.task import Task
from penstock.envs.contract import RewardResult
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.tools.functions import MAX_RESULT_CHARACTERS, Tool, Toolbox, parse_calls


class ToolEnvironment(Environment):
    """Subclass it with `tools` and `score`."""

    tools: Sequence[Tool] = ()
    """Functions the policy may call; methods of the environment keep state between calls."""
    tool_timeout_s: float = 10.0
    """Longest time for one call, seconds. Keep the sum over a turn below `env.episode.timeout_s`."""
    max_result_characters: int = MAX_RESULT_CHARACTERS
    """Further characters of a result are left out, and their number is said."""
    max_calls_per_turn: int = 8
    """Further calls of a turn are answered with an error."""

    def __init__(self) -> None:
        self.toolbox = Toolbox(self.tools, self.tool_timeout_s, self.max_result_characters)

    @abstractmethod
    def score(self, task: Task, answer: str) -> RewardResult | Awaitable[RewardResult]:
        """Reward of the final answer, the text of the turn without a call."""

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """The prompt, and the tools."""
        self.task = task
        return Observation(task.prompt, tools=self.toolbox.schemas())

    async def step(self, action: Action) -> Observation | Done:
        """Run the calls of a turn one after the other, or score the answer."""
        calls = parse_calls(action.text)
        if not calls:
            scored = self.score(self.task, action.text)
            return Done(await scored if isinstance(scored, Awaitable) else scored)
        results = [await self.toolbox.run(call) for call in calls[: self.max_calls_per_turn]]
        counts: Counter[str] = Counter({"tool_calls": len(calls)})
        counts["tool_errors"] = sum(result.outcome != "ok" for result in results)
        if num_cut := sum(result.is_cut for result in results):
            counts["tool_results_cut"] = num_cut
        counts.update(f"tool_{result.outcome}" for result in results if result.outcome != "ok")
        messages = [{"role": "tool", "content": result.text} for result in results]
        if left := len(calls) - len(results):
            messages.append({"role": "tool", "content": f"error: {left} more calls were ignored; {len(results)} fit"})
        return Observation(messages, role="tool", counts={name: float(count) for name, count in counts.items()})
