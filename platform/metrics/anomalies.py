"""What a run says on its console when something is wrong: failed attempts, equal rewards, answers that are cut off.

A reason is said once, when it is first met; the counts are in the summary. So a reward that fails 10,000 times for one
reason costs one line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import Trajectory, are_equal

MAX_REASONS = 20
"""Reasons that are told apart; further ones are counted together."""
NUM_EQUAL_GROUPS = 32
"""Scored groups in a row without a difference in reward after which a sample is shown."""
TRUNCATED_SHARE = 0.5
"""Share of turns cut off at the token limit, in each of `NUM_TRUNCATED_STEPS` steps in a row, that is noted."""
NUM_TRUNCATED_STEPS = 3
OTHER_REASONS = "other reasons"
_PROMPT_CHARACTERS, _ANSWER_CHARACTERS = 80, 300


class Anomalies:
    """Counts anomalies and notes each kind once.

    Invariant: `failed_attempts` has at most `MAX_REASONS` reasons and `OTHER_REASONS`, each noted once.

    Attributes:
        failed_attempts: Kind and reason, as first met -> number of attempts, retried ones included.

    Args:
        note: Prints a line on the console.
    """

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self.failed_attempts: Counter[str] = Counter()
        self._note = note
        self._reasons: dict[str, str] = {}
        self._equal_reward: float | None = None
        self._num_equal = 0
        self._shown: set[float] = set()
        self._num_truncated = 0
        self._is_truncation_noted = False
        self._is_abstention_noted = False

    def attempt_failed(self, task_id: TaskId, failure: TrajectoryError) -> None:
        """Count a failed attempt at a task, and note a reason that is new."""
        # It may have the colors of a tool's output, or half an emoji, with which nothing would be printed.
        reason = "".join(one if one.isprintable() else " " for one in f"{failure.kind}: {failure.cause}")
        # Reasons that differ only in numbers, addresses or quoted data are one.
        alike = re.sub(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+", "…", reason)
        is_new = alike not in self._reasons
        if is_new and len(self._reasons) >= MAX_REASONS:
            self.failed_attempts[OTHER_REASONS] += 1
            return
        self.failed_attempts[self._reasons.setdefault(alike, reason)] += 1
        if is_new:
            self._note(f"an attempt at {task_id} failed ({reason}). See docs/debugging.md, “Attempts fail”.")

    def abstained(self, task_id: TaskId) -> None:
        """Note, once, that the reward had no opinion on an answer."""
        if not self._is_abstention_noted:
            self._is_abstention_noted = True
            self._note(
                f"the reward had no opinion (None) on an answer to {task_id}. Such answers are not trained; they are "
                "counted in flow/abstained, and groups with too few others as filtered(abstained)."
            )

    def group_scored(self, members: Sequence[Trajectory]) -> None:
        """Note a sample when the rewards of `NUM_EQUAL_GROUPS` groups in a row are the same; once for each reward."""
        rewards = [member.reward for member in members if member.reward is not None]
        if not rewards or not are_equal(rewards):
            self._equal_reward, self._num_equal = None, 0
            return
        reward = rewards[0]
        if self._equal_reward is not None and are_equal([self._equal_reward, reward]):
            reward, self._num_equal = self._equal_reward, self._num_equal + 1
        else:
            self._num_equal = 1
        self._equal_reward = reward
        if self._num_equal < NUM_EQUAL_GROUPS or reward in self._shown:
            return
        self._shown.add(reward)
        one = members[0]
        self._note(
            f"all rewards of the last {NUM_EQUAL_GROUPS} groups are {reward:g}, so there is nothing to learn from. "
            f"One of them, {one.task_id}: prompt {_end(one.prompt)!r}, answer {_start(one.text)!r}, "
            f"finish_reason {one.finish_reason}. See docs/debugging.md, “The reward is flat”."
        )

    def step_trained(self, metrics: Mapping[str, float]) -> None:
        """Note, once, that most turns of `NUM_TRUNCATED_STEPS` steps in a row were cut off."""
        share = metrics.get("length/truncated_share", 0.0)
        self._num_truncated = self._num_truncated + 1 if share >= TRUNCATED_SHARE else 0
        if self._num_truncated == NUM_TRUNCATED_STEPS and not self._is_truncation_noted:
            self._is_truncation_noted = True
            self._note(
                f"{share:.0%} of the turns of this step were cut off at rollout.sampling.max_new_tokens, and most of "
                f"the {NUM_TRUNCATED_STEPS - 1} steps before too, so they are scored without their end. See "
                "docs/debugging.md, “Answers are cut off”."
            )


def _end(text: str) -> str:
    return text if len(text) <= _PROMPT_CHARACTERS else f"…{text[-_PROMPT_CHARACTERS:]}"


def _start(text: str) -> str:
    return text if len(text) <= _ANSWER_CHARACTERS else f"{text[:_ANSWER_CHARACTERS]}…"
