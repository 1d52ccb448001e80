"""What every simulated part of one run shares: lengths, the truth about tokens, the trace, the violations.

The truth travels in the token ids, so it survives retries, resumes and every copy the platform makes:

    sampled token:  ((version + 1) << 12) | (position mod 4096)   > 0
    prompt token:   −1 − task                                     < 0
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.versions import Spans
from penstock.platform.simulator.lengths import LengthTable
from penstock.platform.simulator.stream import TokenStream

POSITION_BITS = 12
_POSITIONS = 1 << POSITION_BITS
TAIL_EVENTS = 40
EVALUATION = "eval"
"""Where the ids of evaluation trajectories begin (platform/evaluation.py)."""


class InvariantError(PenstockError):
    """An invariant does not hold. It stops the run, as every `PenstockError` does.

    Attributes:
        invariant: `I1` to `I9`, or what else was broken.
    """

    def __init__(self, invariant: str, what: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {what}")


class Trace:
    """The events of a run as one running hash, and its tail for people."""

    def __init__(self) -> None:
        self.num_events = 0
        self.tail: deque[str] = deque(maxlen=TAIL_EVENTS)
        self._hash = hashlib.blake2b(digest_size=16)
        self._is_open = True

    def add(self, now_s: float, event: str) -> None:
        """Record one event."""
        if self._is_open:
            line = f"{now_s:.6f} {event}"
            self.num_events += 1
            self.tail.append(line)
            self._hash.update(line.encode())

    def close(self) -> None:
        """What follows is clearing up."""
        self._is_open = False

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


Deliver = Callable[[TokenStream, TokenDelta], None]


@dataclass(frozen=True, slots=True)
class Promises:
    """What a run is told to keep, beside I1 to I9.

    Attributes:
        quotas: Stream -> most groups of it that may live; empty if there is one stream.
        filter_share: Share of tasks that must not train.
        has_gangs: The members of a group start on one engine.
    """

    quotas: Mapping[str, int] = field(default_factory=dict)
    filter_share: float = 0.0
    has_gangs: bool = False


@dataclass(slots=True)
class World:
    """One simulated run.

    Attributes:
        lengths: Response lengths by task and member.
        prompt_tokens: Length of every prompt, simulated tokens.
        seed: Decides everything.
        published: Version whose publish finished last; -1 before the first.
        incarnation: Drivers that died before this one.
        faults: What was planted so far, by name.
        deliver: How deltas reach the platform; faults replace it.
        promises: What it was told to keep.
        is_fenced: Whether an engine is out of service.
        newest_group: The one that was admitted last.
        environment_s: Seconds that environments were open for training, summed.
    """

    lengths: LengthTable
    prompt_tokens: int
    seed: int
    trace: Trace | None = None
    published: int = -1
    incarnation: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    deliver: Deliver = TokenStream.deliver
    promises: Promises = field(default_factory=Promises)
    is_fenced: Callable[[EngineId], bool] = lambda _engine_id: False
    environment_s: float = 0.0
    newest_group: int = -1
    _last_scattered: int = -1
    _homes: dict[str, EngineId] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)

    def rng(self, purpose: str) -> random.Random:
        """A stream of randomness of its own, so that one part's draws never shift another's."""
        return random.Random(f"{self.seed}/{self.incarnation}/{purpose}")

    def begin_again(self) -> None:
        """The driver died, and everything that it had started with it."""
        self.note(f"driver {self.incarnation} died")
        self.incarnation += 1
        self.published = -1
        self.deliver = TokenStream.deliver
        self._homes.clear()
        self.newest_group = self._last_scattered = -1
        self._started.clear()

    def num_sampled(self, prompt: tuple[int, ...]) -> int:
        """Tokens of a request's prompt that the policy sampled before."""
        if self.lengths.mean_turns == 1:
            return len(prompt) - self.prompt_tokens
        return sum(token > 0 for token in prompt)

    def note(self, event: str) -> None:
        """Add an event to the trace."""
        if self.trace is not None:
            self.trace.add(asyncio.get_running_loop().time(), event)

    def on_request(self, engine_id: EngineId, version: int, request_id: RequestId) -> None:
        """I8: nothing is routed to an engine that has not acknowledged what was published. Gangs start together."""
        if version < self.published:
            raise InvariantError(
                "I8", f"{engine_id} serves v{version} and gets new work; v{self.published} is published"
            )
        if self.promises.has_gangs:
            self._check_gang(engine_id, request_id)

    def _check_gang(self, engine_id: EngineId, request_id: RequestId) -> None:
        """The first request of every member goes to the engine of the first member, unless that one is gone."""
        member = request_id.partition("#")[0]
        group = member.rpartition("/")[0]
        if member in self._started or group == EVALUATION:
            return
        if group not in self._homes and int(group) <= self._last_scattered:
            return  # its engine may have been the one that left
        self._started.add(member)
        home = self._homes.setdefault(group, engine_id)
        if home != engine_id and not self.is_fenced(home):
            raise InvariantError("gang", f"{request_id} starts on {engine_id}, its group on {home}")

    def left(self, engine_id: EngineId) -> None:
        """An engine died: the gangs on it are free."""
        self._homes = {group: home for group, home in self._homes.items() if home != engine_id}
        self._last_scattered = self.newest_group

    def on_tokens(self, engine_id: EngineId, version: int, spans: Spans) -> None:
        """I8: an engine labels no token with a version it has not acknowledged. I4: labels never decrease."""
        if spans and spans[-1].version > version:
            raise InvariantError("I8", f"{engine_id} has acknowledged v{version} and serves {spans}")
        if len(spans) > 1 and any(left.version > right.version for left, right in itertools.pairwise(spans)):
            raise InvariantError("I4", f"{engine_id} stamps decreasing versions {spans}")


def sampled_ids(spans: Spans, position: int) -> tuple[int, ...]:
    """Ids of tokens sampled by `spans`, the first at `position` of its trajectory's sampled tokens."""
    if len(spans) == 1 and (position % _POSITIONS) + spans[0].num_tokens <= _POSITIONS:
        first = ((spans[0].version + 1) << POSITION_BITS) | (position % _POSITIONS)
        return tuple(range(first, first + spans[0].num_tokens))
    ids: list[int] = []
    for span in spans:
        base = (span.version + 1) << POSITION_BITS
        ids.extend(base | (place % _POSITIONS) for place in range(position, position + span.num_tokens))
        position += span.num_tokens
    return tuple(ids)


def prompt_ids(task: int, num_tokens: int) -> tuple[int, ...]:
    return (-1 - task,) * num_tokens


def task_of(first_id: int) -> int:
    """The task a prompt was made from."""
    return -1 - first_id


def member_of(request_id: RequestId | str) -> int:
    """The member a request or trajectory belongs to: `17/3` or `17/3#42`."""
    return int(request_id.partition("#")[0].rpartition("/")[2])


def true_reward(task: int, member: int) -> float:
    """What the simulated reward says: never 0, different within a group."""
    return 0.25 + 0.125 * ((task * 7 + member * 3) % 5)
