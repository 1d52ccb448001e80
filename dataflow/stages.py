"""A curriculum of stages: the task streams are used one after the other, each until its mean reward reaches a gate.

    stage i --mean reward of its newest n_i groups >= gate g_i--> stage i + 1

Only tasks of the current stage are admitted. Groups admitted in earlier stages are still trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from penstock.dataflow.task_queue import REWARDS_KEPT


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, which admits the tasks of one stream."""

    stream: str
    gate: float | None
    """Mean reward that starts the next stage; None for the last stage."""
    gate_groups: int
    """Number of newest groups that the mean is taken over."""


class GatedStages:
    """A `Curriculum` that runs one stage after the other.

    Args:
        stages: The stages in order; see `stage_violations` for what is valid.
        note: Logs a message when a stage begins.
    """

    def __init__(self, stages: Sequence[Stage], note: Callable[[str], None] = lambda _: None) -> None:
        self._remaining = list(stages)
        self._note = note

    @property
    def current(self) -> str:
        """The stream whose tasks are admitted."""
        return self._remaining[0].stream

    def state_dict(self) -> int:
        """Number of stages that have not ended."""
        return len(self._remaining)

    def load_state_dict(self, state: int) -> None:
        del self._remaining[: len(self._remaining) - state]

    def weights(
        self,
        version: int,
        rewards: Mapping[str, Sequence[float]],
    ) -> Mapping[str, float]:
        """Give all weight to the current stage. At most one gate is passed per call."""
        stage = self._remaining[0]
        newest = rewards.get(stage.stream, ())[-stage.gate_groups :]
        if stage.gate is not None and len(newest) == stage.gate_groups and fmean(newest) >= stage.gate:
            self._remaining.pop(0)
            self._note(
                f"stage {self.current} begins at v{version}: the newest {len(newest)} groups of {stage.stream} have a "
                f"mean reward of {fmean(newest):.3f}, its gate is {stage.gate:g}"
            )
        return {self.current: 1.0}


def stage_violations(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the problems of a list of stages, one sentence each. Streams without any gate are not stages."""
    names = " → ".join(stage.stream for stage in stages)
    without = [stage.stream for stage in stages[:-1] if stage.gate is None]
    if without:
        yield (
            f"env.streams.{without[0]}.gate=null among the stages {names}: every stage but the last needs a gate, or "
            "the stages after it would never begin. Set one."
        )
    if stages[-1].gate is not None:
        yield (
            f"env.streams.{stages[-1].stream}.gate={stages[-1].gate:g}: it is the last of {names}, so its gate opens "
            "nothing. Set it to null, or add a stream behind it."
        )
    for stage in stages:
        if not 1 <= stage.gate_groups <= REWARDS_KEPT:
            yield f"env.streams.{stage.stream}.gate_groups={stage.gate_groups} is outside 1..{REWARDS_KEPT}."
