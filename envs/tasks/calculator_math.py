"""Word problems with a calculator: the policy calls it as often as it likes, then answers in `\\boxed{}`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.tasks.math_tasks import MathTasks, judge
from penstock.envs.tools.calculator import calculate
from penstock.envs.tools.functions import parse_calls
from penstock.envs.tools.tool_environment import ToolEnvironment


@dataclass(eq=False)
class CalculatorMath(MathTasks):
    """`MathTasks` whose environment offers the tool `calculate`."""

    def environment(self) -> Environment:
        """A calculator."""
        return WithCalculator()

    def gold_actions(self, task: Task) -> list[str]:
        """The answer, without a call."""
        return [self.gold_response(task)]


class WithCalculator(ToolEnvironment):
    """Reward 1 if math-verify finds the answer of the last turn equal, else 0."""

    tools = (calculate,)

    async def step(self, action: Action) -> Observation | Done:
        """A turn that was cut off is no answer."""
        if action.is_truncated and not parse_calls(action.text):
            return Done(0.0)
        return await super().step(action)

    def score(self, task: Task, answer: str) -> float:
        """1 or 0."""
        return judge(answer, task.fields["answer"])
