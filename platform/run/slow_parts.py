"""Says, once, which trainer rank or engine is slow: beside its peers, or beside what it was.

    a rank      rate of a product of fixed size (trainer/flops.py), median of the newest steps
    an engine   tokens per busy second, and per second of its requests, in its newest minute or more

An engine with more requests samples more tokens per second, and fewer for each request. One that has less to do is low
in the first rate only, and one that has more in the second; only a slow one is low in both. An engine that is given
fewer requests because it is slow (rollout/engine_pool/routing.py) keeps the second rate up: while it has free slots it
is named below about 0.4, with full slots below 0.65.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

from penstock.dataflow.ids import EngineId

SLOW_SHARE = 0.65
"""Of the peers' median, or of the own speed before, below which something is slow."""
WINDOW_STEPS, HISTORY_STEPS = 10, 100
"""Steps of which a rank's rate is the median, and those before it to which it is compared."""
PRODUCT = "rank/product_tflops/"
_SEE = "See docs/debugging.md, “A rank or an engine is slow”."


Part = TypeVar("Part", bound=str)


class Speed(NamedTuple):
    """Rates of a rank or an engine, in units of work per second."""

    now: tuple[float, ...]
    """In the newest window."""
    before: tuple[float, ...] | None
    """Before it; None if that was too short."""


class Slow(NamedTuple):
    """Why something is slow."""

    share: float
    """Its speed relative to the other one, 0..1."""
    expected: tuple[float, ...]
    """The other one."""
    of_peers: bool
    """Whether that is the median of its peers; otherwise its own speed before."""


def slow_ones(speeds: Mapping[Part, Speed], *, depends_on_work: bool, are_equal: bool = True) -> dict[Part, Slow]:
    """The slow ones of several parts that do the same.

    Args:
        speeds: Name of a part -> its speed.
        depends_on_work: Whether all may become slower at once since their work has changed, as engines with longer
            prompts do. What a part has lost is then compared to what its peers have lost; one alone is not slow.
        are_equal: Whether they should be equally fast.
    """
    found: dict[Part, Slow] = {}
    for name, speed in speeds.items():
        peers = [other for key, other in speeds.items() if key != name]
        if peers and are_equal:
            expected = tuple(map(median, zip(*(peer.now for peer in peers), strict=True)))
            if (share := _share(speed.now, expected)) < SLOW_SHARE:
                found[name] = Slow(share, expected, of_peers=True)
                continue
        if speed.before is None:
            continue
        kept = [_share(peer.now, peer.before) for peer in peers if peer.before is not None]
        if depends_on_work and not kept:
            continue
        usual = min(median(kept), 1.0) if depends_on_work else 1.0
        if (share := _share(speed.now, speed.before)) < SLOW_SHARE * usual:
            found[name] = Slow(share, speed.before, of_peers=False)
    return found


class SlowParts:
    """Watches the ranks and engines of a run, and notes each that is slow once.

    Attributes:
        named: Name -> what was said.

    Args:
        note: Prints a line on the console.
    """

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self.named: dict[str, str] = {}
        self._note = note
        self._products: dict[str, deque[float]] = {}

    def observe(
        self, version: int, metrics: Mapping[str, float], engines: Mapping[EngineId, Speed], *, equal_engines: bool
    ) -> None:
        """Look at a step.

        Args:
            version: Of the policy, for the message.
            metrics: Of the step.
            engines: Their speeds.
            equal_engines: Whether all engines should be equally fast.
        """
        for name, rate in metrics.items():
            if name.startswith(PRODUCT):
                kept = deque[float](maxlen=WINDOW_STEPS + HISTORY_STEPS)
                self._products.setdefault(f"trainer rank {name.removeprefix(PRODUCT)}", kept).append(rate)
        ranks = {
            name: Speed((median(rates[-WINDOW_STEPS:]),), _median_of(rates[:-WINDOW_STEPS]))
            for name, rates in ((name, list(kept)) for name, kept in self._products.items())
            if len(rates) >= WINDOW_STEPS
        }
        for name, slow in slow_ones(ranks, depends_on_work=False).items():
            self._name(
                name,
                f"v{version}: {name} multiplies matrices at {ranks[name].now[0]:.3g} TFLOP/s (median of {WINDOW_STEPS} "
                f"steps), {_of(slow, 'ranks')}. Every step waits for the slowest rank. {_SEE}",
            )
        for name, slow in slow_ones(engines, depends_on_work=True, are_equal=equal_engines).items():
            tokens_per_s, per_request = engines[name].now
            self._name(
                name,
                f"v{version}: {name} samples {tokens_per_s:.3g} tokens per busy second in its newest minute, "
                f"{_of(slow, 'engines')}, and {per_request:.3g} instead of {slow.expected[1]:.3g} for each request. "
                f"{_SEE}",
            )

    def _name(self, name: str, sentence: str) -> None:
        if name not in self.named:
            self.named[name] = sentence
            self._note(sentence)


def _share(rates: tuple[float, ...], expected: tuple[float, ...]) -> float:
    """Of the expected rates, that of the rate which has kept most."""
    return max(rate / max(other, 1e-12) for rate, other in zip(rates, expected, strict=True))


def _median_of(rates: list[float]) -> tuple[float] | None:
    return (median(rates),) if len(rates) >= WINDOW_STEPS else None


def _of(slow: Slow, kind: str) -> str:
    reference = f"the median of the other {kind}" if slow.of_peers else "its rate before"
    return f"{slow.share:.2f} of {reference} ({slow.expected[0]:.3g})"
