"""The policy's answers to plain questions (envs/endpoint/session.py, `Questions`), beside its rollouts.

Consumes: a question. Waits for: an engine slot, as any trajectory does, and its tokens. Unblocked by: the runner. What
is sampled is greedy and belongs to no group: it never enters the ledger.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from penstock.dataflow.ports import SamplingParams
from penstock.envs.endpoint.conversation import Part
from penstock.envs.endpoint.session import Answer, Exchange
from penstock.rollout.dialogue import EpisodeBudget
from penstock.rollout.recording import Recording
from penstock.rollout.runner import TrajectoryRunner


class PolicyAnswers:
    """Answers each question on its own.

    Args:
        runner: On whose engines.
        max_tokens: Of question and answer together.
        sampling: Of the run; only the length and the stop tokens count.
    """

    def __init__(self, runner: TrajectoryRunner, max_tokens: int, sampling: SamplingParams) -> None:
        self._runner = runner
        self._budget = EpisodeBudget(max_turns=1, max_tokens=max_tokens)
        self._sampling = replace(sampling, temperature=0.0, seed=None)
        self._numbers = itertools.count()

    async def answer(self, part: Part, exchange: Exchange) -> Answer:
        """Answer one.

        Raises:
            ApiError: If it leaves no room for an answer, or no token stands for its text.
            TrajectoryError, PenstockError: From the engines.
        """
        name = f"question/{next(self._numbers)}"
        runner = self._runner
        recording = Recording(runner.codec, self._budget, self._sampling, lambda turn: runner.sample_turn(name, turn))
        return await recording.answer(part, exchange)
