"""Rendered prompts: what the members of a group share of the tokens, and what becomes of those they sampled."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

import numpy as np

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.partial import PartialTrajectory
from penstock.rollout.tokenizers import TokenCodec

_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


class Prompt:
    """A prompt, rendered once for all who answer it.

    Attributes:
        token_ids: It begins every request.
    """

    __slots__ = ("_bytes", "_codec", "_text", "token_ids")

    def __init__(self, codec: TokenCodec, token_ids: tuple[int, ...]) -> None:
        self.token_ids = token_ids
        self._codec = codec
        self._text = ""
        self._bytes: bytes | None = None  # like the text, not before the first answer is complete

    def trajectory(self, trajectory_id: TrajectoryId, task_id: TaskId, partial: PartialTrajectory) -> Trajectory:
        """The trajectory that a complete answer makes. Its arrays are read-only, as if they came from another process.

        They are packed: thrice as fast as filling them from tuples.
        """
        if self._bytes is None:
            self._bytes, self._text = _packed("i", self.token_ids), self._codec.decode(self.token_ids)
        num_prompt, sampled, logprobs = len(self.token_ids), partial.token_ids, partial.logprobs
        assert partial.finish_reason is not None, "it ended"
        spoken = self._codec.split(sampled, self._text)
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task_id,
            token_ids=np.frombuffer(self._bytes + _packed("i", sampled), _INT32),
            loss_mask=np.frombuffer(bytes(num_prompt) + b"\1" * len(sampled), _BOOL),
            behavior_logprobs=np.frombuffer(bytes(4 * num_prompt) + _packed("f", logprobs), _FLOAT32),
            spans=partial.spans,
            prompt=self._text,
            response=spoken.answer,
            finish_reason=partial.finish_reason,
            reasoning=spoken.reasoning,
        )


def _packed(kind: str, numbers: Sequence[float]) -> bytes:
    """Four bytes each: `i` is int32, `f` is float32."""
    return pack(f"{len(numbers)}{kind}", *numbers)
