"""Rendered prompts: what the members of a group share of the tokens, and what becomes of those they sampled."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.group_task import GroupTask
from penstock.rollout.partial import PartialTrajectory
from penstock.rollout.tokenizers import TokenCodec

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class Prompt:
    """A prompt, rendered once for all who answer it.

    Attributes:
        token_ids: It begins every request.
    """

    __slots__ = ("_codec", "_packed", "token_ids")

    def __init__(self, codec: TokenCodec, token_ids: tuple[int, ...]) -> None:
        self.token_ids = token_ids
        self._codec = codec
        self._packed: tuple[int, bytes, bytes, str] | None = None  # not before the first answer is complete

    def trajectory(self, asked: GroupTask, member: int, partial: PartialTrajectory) -> Trajectory:
        """The trajectory that a complete answer makes. Its arrays are read-only, as if they came from another process.

        They are packed: thrice as fast as filling them from tuples.
        """
        num_prompt, prompt_ids, no_logprobs, text = self._packed or self._pack()
        (sampled, logprobs, spans, _), codec = partial.joined(), self._codec
        num_sampled = len(sampled)
        as_int32, as_float32 = _packers(num_sampled)
        assert partial.finish_reason is not None, "it ended"
        thought, answer = ("", codec.decode(sampled)) if codec.reasoning is None else codec.split(sampled, text)
        trajectory = Trajectory(  # by position: names cost a dictionary each time
            asked.trajectory_id(member),
            asked.task.task_id,
            np.frombuffer(prompt_ids + as_int32(*sampled), _INT32),
            _MASKS.mask(num_prompt, num_sampled),
            np.frombuffer(no_logprobs + as_float32(*logprobs), _FLOAT32),
            spans,
            text,
            answer,
            partial.finish_reason,
        )
        if thought:
            trajectory.reasoning = thought
        return trajectory

    def _pack(self) -> tuple[int, bytes, bytes, str]:
        """Its length; its ids as int32, and as many float32 zeros; its text."""
        num_tokens = len(self.token_ids)
        as_int32, _ = _packers(num_tokens)
        self._packed = packed = (
            num_tokens,
            as_int32(*self.token_ids),
            bytes(4 * num_tokens),
            self._codec.decode(self.token_ids),
        )
        return packed


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
