"""Scores of a reward model: a Hugging Face sequence classifier of one label, e.g. what `penstock rm` writes.

The only file of envs/ that may import torch; it does so in the reward process, before its first call. The reward model
reads the policy's token ids, so it must share the policy's tokenizer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import Device, RewardContext


@dataclass(eq=False)
class RewardModelReward:
    """The score at the last token. Waiting answers are batched into one forward pass.

    The body is float32 on a CPU and bfloat16 on a GPU, where that is half of the memory; the head is always float32.

    Args:
        path: Directory of the classifier.
        max_batch: Largest number of answers in one forward pass.
        num_threads: CPU threads of torch.
        device: Device of `reward.pool`.
    """

    path: str
    max_batch: int = 32
    num_threads: int = 1
    device: Device = "cpu"
    is_called_before_start: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._model: Any = None
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []

    @classmethod
    def build(cls, context: RewardContext, **args: Any) -> Self:
        """Build it, and load the model if calls follow: loading takes longer than the time limit of a call.

        Raises:
            ConfigError: If there is no such directory.
        """
        reward = cls(**{"device": context.device, **args})
        if not (Path(reward.path) / "config.json").is_file():
            raise ConfigError(
                f"reward model path={reward.path} holds no config.json. Train one with `penstock rm "
                "experiment=arithmetic_preference`, or give the directory of a sequence classifier."
            )
        if context.is_serving:
            import torch
            from transformers import AutoModelForSequenceClassification

            torch.set_num_threads(reward.num_threads)
            dtype = torch.float32 if reward.device == "cpu" else torch.bfloat16
            model = AutoModelForSequenceClassification.from_pretrained(reward.path, dtype=dtype)
            model.score.float()
            reward._model = model.to(reward.device).eval()
        return reward

    async def __call__(self, trajectory: Trajectory, **fields: Any) -> float:
        """Score it together with the other calls of the same iteration of the event loop.

        Raises:
            ValueError: If it has several threads: concatenated, they are not a text that the model was trained on.
        """
        del fields
        if len(trajectory.threads) > 1:
            raise ValueError(
                f"{trajectory.task_id} has {len(trajectory.threads)} threads; a reward model scores one sequence. "
                "Use reward=episode, or a function that reads trajectory.episode.turns."
            )
        found: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory.token_ids.tolist(), found))
        await asyncio.sleep(0)
        if not found.done():
            self._score_waiting()
        return await found

    def _score_waiting(self) -> None:
        """Score in order of length, to pad little; an exception fails all calls of its batch."""
        waiting, self._waiting = sorted(self._waiting, key=lambda one: len(one[0])), []
        for start in range(0, len(waiting), self.max_batch):
            batch = waiting[start : start + self.max_batch]
            try:
                scores = self._scores([token_ids for token_ids, _ in batch])
            except Exception as error:  # noqa: BLE001 - every call of the batch gets it
                for _, found in batch:
                    if not found.done():
                        found.set_exception(error)
                continue
            for (_, found), score in zip(batch, scores, strict=True):
                if not found.done():
                    found.set_result(score)

    def _scores(self, sequences: list[list[int]]) -> list[float]:
        """One forward pass over rows padded on the right, which causal attention ignores."""
        import torch

        lengths = torch.tensor([len(one) for one in sequences])
        rows = [torch.tensor(one) for one in sequences]
        with torch.no_grad():
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
            hidden = self._model.base_model(input_ids=padded, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(rows)), lengths - 1].float()
            scores: list[float] = self._model.score(last)[:, 0].tolist()
        return scores
