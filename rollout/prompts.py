"""Rendered prompts: what the members of a group share of the tokens, and what becomes of those they sampled."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.partial import PartialTrajectory
from penstock.rollout.tokenizers import TokenCodec

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


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
            as_int32, _ = _packers(len(self.token_ids))
            self._bytes, self._text = as_int32(*self.token_ids), self._codec.decode(self.token_ids)
        num_prompt, (sampled, logprobs, spans, _) = len(self.token_ids), partial.joined()
        num_sampled = len(sampled)
        as_int32, as_float32 = _packers(num_sampled)
        assert partial.finish_reason is not None, "it ended"
        codec = self._codec
        thought, answer = ("", codec.decode(sampled)) if codec.reasoning is None else codec.split(sampled, self._text)
        trajectory = Trajectory(  # by position: names cost a dictionary each time
            trajectory_id,
            task_id,
            np.frombuffer(self._bytes + as_int32(*sampled), _INT32),
            _MASKS.mask(num_prompt, num_sampled),
            np.frombuffer(bytes(4 * num_prompt) + as_float32(*logprobs), _FLOAT32),
            spans,
            self._text,
            answer,
            partial.finish_reason,
        )
        trajectory.reasoning = thought
        return trajectory


@lru_cache(maxsize=1 << 12)
def _packers(count: int) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """From `count` numbers to their bytes as int32, and as float32."""
    return Struct(f"{count}i").pack, Struct(f"{count}f").pack


class _Masks:
    """Loss masks of single turns: False over the prompt, True over the answer, each a view of the same array."""

    def __init__(self) -> None:
        self._num_prompt = self._num_sampled = 0
        self._longest = np.zeros(0, np.bool_)

    def mask(self, num_prompt: int, num_sampled: int) -> NDArray[np.bool_]:
        """`[num_prompt + num_sampled] bool`, read-only."""
        if num_prompt > self._num_prompt or num_sampled > self._num_sampled:
            self._num_prompt = max(self._num_prompt, 2 * num_prompt)
            self._num_sampled = max(self._num_sampled, 2 * num_sampled)
            self._longest = np.frombuffer(bytes(self._num_prompt) + b"\1" * self._num_sampled, np.bool_)
        return self._longest[self._num_prompt - num_prompt : self._num_prompt + num_sampled]


_MASKS = _Masks()
