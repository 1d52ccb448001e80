"""What is known of a trajectory that may still be interrupted: its exact tokens, and how to ask for the rest.

Symbols: p = prompt, y_1 … y_n = sampled so far, m = `max_new_tokens`. The request for the rest is (p, y_1 … y_n) with
m − n new tokens. A causal model draws y_{n+1} from the same distribution whether it sampled y_1 … y_n itself or was
given them, so nothing but time is lost (docs/concepts/partial-rollouts.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest, SamplingParams, TokenDelta
from penstock.dataflow.trajectory import FinishReason
from penstock.dataflow.versions import Spans, first_tokens, join_spans
from penstock.rollout.pool import InterruptionKind


@dataclass(slots=True)
class ResumeStats:
    """Absolute counters since the run began.

    Attributes:
        trajectories: Trajectories that were resumed at least once with tokens kept.
        tokens: Sampled tokens kept over resumes, that would have been sampled again.
        interruptions: By kind; also those before the first token.
    """

    trajectories: int = 0
    tokens: int = 0
    interruptions: Counter[InterruptionKind] = field(default_factory=Counter)

    def __add__(self, other: ResumeStats) -> ResumeStats:
        return ResumeStats(
            self.trajectories + other.trajectories,
            self.tokens + other.tokens,
            self.interruptions + other.interruptions,
        )


@dataclass(slots=True)
class PartialTurn:
    """Tokens of a turn received so far, delta by delta. They are never sampled again.

    Attributes:
        floor: Oldest version that may begin it: the newest that sampled an earlier turn of its thread, the oldest of
            the episode so far; -1 is any.
        on_delta: Called with each delta when it is kept; may `cut`.
        num_tokens: Sampled so far.
        resumed_with: Tokens it had when it was last resumed; 0 if it never was.
        num_interruptions: So far, those of earlier turns included.
        is_cut: It was ended before its engine ended it.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    floor: int = -1
    on_delta: Callable[[TokenDelta], None] | None = None
    num_tokens: int = 0
    resumed_with: int = 0
    num_interruptions: int = 0
    finish_reason: FinishReason | None = None
    is_cut: bool = False
    _deltas: list[TokenDelta] = field(default_factory=list)

    def joined(self) -> TokenDelta:
        """All that was sampled, as if it had come at once."""
        deltas = self._deltas
        return TokenDelta(
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            join_spans([span for delta in deltas for span in delta.spans]),
            self.finish_reason,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All sampled ids, in order."""
        return self.joined().token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Behavior logprob of each."""
        return self.joined().logprobs

    @property
    def spans(self) -> Spans:
        """Version spans of all of them."""
        return self.joined().spans

    def remaining(self) -> int:
        """Tokens it may still sample."""
        return self.sampling.max_new_tokens - self.num_tokens

    def min_version(self) -> int:
        """Oldest version that may go on with it (I4): that of its newest token, before the first its floor."""
        return next((delta.spans[-1].version for delta in reversed(self._deltas) if delta.spans), self.floor)

    def extend(self, delta: TokenDelta) -> None:
        """Keep what an engine reported; `is_cut` says whether that is enough, and the engine is to stop."""
        self._deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        if self.on_delta is not None:
            self.on_delta(delta)

    def request(self, request_id: RequestId) -> GenerateRequest:
        """Ask for all of it, or for what is missing."""
        if not self.num_tokens:
            return GenerateRequest(request_id, self.prompt_ids, self.sampling)
        prompt = (*self.prompt_ids, *self.token_ids)
        return GenerateRequest(request_id, prompt, replace(self.sampling, max_new_tokens=self.remaining()))

    def settle(self) -> bool:
        """After an interruption: say whether nothing is missing, because only the engine's last word was lost."""
        self.finish_reason = None
        if self.num_tokens and self.token_ids[-1] in self.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif self.remaining() <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def cut(self, num_tokens: int) -> None:
        """End it behind its first `num_tokens` tokens: they are on-policy if the rule looked at these alone."""
        logprobs = self.logprobs[:num_tokens]
        self._deltas = [TokenDelta(self.token_ids[:num_tokens], logprobs, first_tokens(self.spans, num_tokens))]
        self.num_tokens, self.finish_reason, self.is_cut = num_tokens, "stop", True
