"""What the trainer reports of single tokens: logprobs and advantages of the trajectories that the run records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import TrainedTokens
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.batches.packing import TrainingSequence


class TokenRecord:
    """Collects the logprobs of recorded sequences from the micro-batches of one rank.

    Invariant: all ranks make it of the same sequences, so their parts can be summed.
    """

    def __init__(self, sequences: Sequence[TrainingSequence]) -> None:
        self._recorded = [one for one in sequences if one.recorded_as is not None]
        is_recorded = np.array([one.recorded_as is not None for one in sequences], bool)
        counts = np.array([len(one.targets) for one in sequences], np.int64) * is_recorded
        self._starts = np.where(is_recorded, np.cumsum(counts) - counts, -1)
        self._logprobs = np.zeros(int(counts.sum()))  # tokens of other ranks count 0

    def watch(self, target: Tensor, micro_batch: MicroBatch) -> None:
        """Keep the logprobs `[K]` of a micro-batch."""
        count = micro_batch.num_tokens
        starts = self._starts[micro_batch.sequence_index[:count]] if len(self._recorded) else np.empty(0)
        is_recorded = starts >= 0
        if is_recorded.any():  # only then copied from the device
            places = (starts + micro_batch.token_index[:count])[is_recorded]
            self._logprobs[places] = target.detach()[:count].double().cpu().numpy()[is_recorded]

    def gather(self, all_reduce: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> TrainedTokens:
        """Logprobs and advantages by trajectory, over all ranks. Collective, unless nothing is recorded."""
        if not self._recorded:
            return {}
        logprobs, start = all_reduce(self._logprobs), 0
        found: dict[TrajectoryId, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        for one in self._recorded:
            assert one.recorded_as is not None
            name, offset, length = one.recorded_as
            if name not in found:
                found[name] = (np.full(length, np.nan, np.float32), np.full(length, np.nan, np.float32))
            stop = start + len(one.targets)
            found[name][0][offset + one.targets] = logprobs[start:stop]
            found[name][1][offset + one.targets] = 0.0 if one.advantages is None else one.advantages
            start = stop
        return found
