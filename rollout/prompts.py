"""Rendered prompts: what the members of a group share of the tokens, and what becomes of those they sampled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.partial import PartialTrajectory
from penstock.rollout.tokenizers import TokenCodec


class Prompt:
    """A prompt, rendered once for all who answer it.

    Attributes:
        token_ids: It begins every request.
    """

    __slots__ = ("_array", "_codec", "_text", "token_ids")

    def __init__(self, codec: TokenCodec, token_ids: tuple[int, ...]) -> None:
        self.token_ids = token_ids
        self._codec = codec
        self._text = ""
        self._array: NDArray[np.int32] | None = None  # like the text, not before the first answer is complete

    def trajectory(self, trajectory_id: TrajectoryId, task_id: TaskId, partial: PartialTrajectory) -> Trajectory:
        """The trajectory that a complete answer makes."""
        if self._array is None:
            self._array, self._text = np.array(self.token_ids, np.int32), self._codec.decode(self.token_ids)
        num_prompt, sampled = len(self.token_ids), partial.token_ids
        num_tokens = num_prompt + len(sampled)
        token_ids = np.empty(num_tokens, np.int32)
        token_ids[:num_prompt] = self._array
        token_ids[num_prompt:] = sampled
        loss_mask = np.zeros(num_tokens, np.bool_)
        loss_mask[num_prompt:] = True
        logprobs = np.zeros(num_tokens, np.float32)
        logprobs[num_prompt:] = partial.logprobs
        assert partial.finish_reason is not None, "it ended"
        spoken = self._codec.split(sampled, self._text)
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task_id,
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=logprobs,
            spans=partial.spans,
            prompt=self._text,
            response=spoken.answer,
            finish_reason=partial.finish_reason,
            reasoning=spoken.reasoning,
        )
