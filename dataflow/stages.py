"""Stages with gates: one stream after the other, each left for good when its newest groups succeed often enough.

    stage i --mean reward of its newest n_i groups >= gate g_i--> stage i + 1

Only the stage that is open is admitted. What was admitted before is still trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from penstock.dataflow.task_queue import REWARDS_KEPT


@dataclass(frozen=True, slots=True)
class Stage:
    """One stream.

    Attributes:
        gate: Mean reward that opens the next stage; None of the last.
        gate_groups: Newest groups that the mean is of.
    """

    stream: str
    gate: float | None
    gate_groups: int


class GatedStages:
    """A `Curriculum` that opens one stage after the other.

    Args:
        stages: In order; see `stage_violations`.
        note: Told of every gate that opens.
    """

    def __init__(self, stages: Sequence[Stage], note: Callable[[str], None] = lambda _: None) -> None:
        self._left = list(stages)
        self._note = note

    @property
    def current(self) -> str:
        """The stream whose tasks are admitted."""
        return self._left[0].stream

    def weights(
        self,
        version: int,
        rewards: Mapping[str, Sequence[float]],
    ) -> Mapping[str, float]:
        """All weight to the stage that is open; at most one gate is passed at a time."""
        stage = self._left[0]
        newest = rewards.get(stage.stream, ())[-stage.gate_groups :]
        if stage.gate is not None and len(newest) == stage.gate_groups and fmean(newest) >= stage.gate:
            self._left.pop(0)
            self._note(
                f"stage {self.current} begins at v{version}: the newest {len(newest)} groups of {stage.stream} have a "
                f"mean reward of {fmean(newest):.3f}, its gate is {stage.gate:g}"
            )
        return {self.current: 1.0}


def stage_violations(stages: Sequence[Stage]) -> Iterator[str]:
    """What is wrong with stages, a sentence each; streams without any gate are no stages."""
    names = " → ".join(stage.stream for stage in stages)
    without = [stage.stream for stage in stages[:-1] if stage.gate is None]
    if without:
        yield (
            f"env.streams.{without[0]}.gate=null among the stages {names}: every stage but the last needs a gate, or "
            "the ones behind it would never begin. Give it one."
        )
    if stages[-1].gate is not None:
        yield (
            f"env.streams.{stages[-1].stream}.gate={stages[-1].gate:g}: it is the last of {names}, so its gate opens "
            "nothing. Set it to null, or add a stream behind it."
        )
    for stage in stages:
        if not 1 <= stage.gate_groups <= REWARDS_KEPT:
            yield f"env.streams.{stage.stream}.gate_groups={stage.gate_groups} is outside 1..{REWARDS_KEPT}."
