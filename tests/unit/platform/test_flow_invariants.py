"""A broken invariant stops the loop: the real loop over a flow, with one part that breaks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from penstock.dataflow.core import Dataflow
from penstock.dataflow.errors import AccountingError, StalenessError
from penstock.dataflow.gates import ConsumptionGate
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span, Spans
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, train_all

LONG_TAIL = [2, 3, 2, 40, 2, 3, 2, 2]


class Mislabelled(FakeEngine):
    """An engine with a say of its own about which version sampled what."""

    label: Callable[[int, Spans], Spans] = staticmethod(lambda _index, spans: spans)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        place = 0
        async for delta in super().generate(request):
            yield delta._replace(spans=self.label(place, delta.spans))
            place += 1


def from_the_future(_index: int, spans: Spans) -> Spans:
    return tuple(Span(span.version + 2, span.num_tokens) for span in spans)


def backwards(place: int, spans: Spans) -> Spans:
    return tuple(Span(max(1 - place, 0), span.num_tokens) for span in spans)


def one_too_many(_index: int, spans: Spans) -> Spans:
    return tuple(Span(span.version, span.num_tokens + 1) for span in spans)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (from_the_future, r"carries versions 2..2, but it was dispatched at v2 and v0 is published \(I8\)"),
        (backwards, r"tokens of v0 follow tokens of v1 .*\(I4\)"),
        (one_too_many, r"spans label 6 tokens as sampled, its loss mask 3 \(I4, I7\)"),
    ],
    ids=["I8", "I4 order", "I4 sum"],
)
async def test_an_engine_that_labels_wrongly_stops_the_run(label: Callable[[int, Spans], Spans], words: str) -> None:
    engine = Mislabelled()
    engine.label = label
    with pytest.raises(StalenessError, match=words):
        await train_all(make_flow([engine], FakeRewards()), [engine])


async def test_a_gate_that_lets_batches_close_over_the_late_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_counts(gate: ConsumptionGate, _version: int) -> int | None:
        return 0 if gate.num_ready >= 2 else None

    monkeypatch.setattr(ConsumptionGate, "shortfall", only_counts)
    engines = [FakeEngine(length=lambda serial: LONG_TAIL[serial % len(LONG_TAIL)])]
    with pytest.raises(StalenessError, match=r"would train at staleness [2-9], max_staleness is 1 \(I1\)"):
        await train_all(make_flow(engines, FakeRewards(), eta=1, steps=20), engines)


async def test_a_group_that_would_train_twice_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(core: Dataflow, version: int) -> None:
        first: GroupRef = core.in_training[0]
        closed(core, version)
        core._in_training = [first]
        closed(core, version + 1)

    closed = Dataflow.advance
    monkeypatch.setattr(Dataflow, "advance", again)
    with pytest.raises(AccountingError, match=r"group 0 has already ended; . were admitted \(I2\)"):
        await train_all(make_flow(engines := [FakeEngine()], FakeRewards()), engines)


async def test_books_that_do_not_balance_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncounted(ledger: Ledger, task_id: TaskId, group_size: int, stream: str = "", requeues: int = 0) -> object:
        record = admit(ledger, task_id, group_size, stream, requeues)
        if record.group_id == 2:
            del ledger._live[record.group_id]
        return record

    admit = Ledger.admit
    monkeypatch.setattr(Ledger, "admit", uncounted)
    with pytest.raises(AccountingError, match=r"does not balance: .*\(I3\)"):
        await train_all(make_flow(engines := [FakeEngine()], FakeRewards()), engines)


async def test_a_group_beyond_the_window_stops_the_run() -> None:
    flow = make_flow(engines := [FakeEngine()], FakeRewards())
    for _ in range(flow.core.limits.window):
        flow.core.admit(TaskId("planted"))
    flow.core._gate.add(flow.core.ledger.admit(TaskId("one too many"), 2))
    with pytest.raises(AccountingError, match=r"-1 free credits with .*\(I6\)"):
        await train_all(flow, engines)
