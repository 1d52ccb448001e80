"""Engines that receive versions themselves, as members of a transfer group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.actors.weights.process_group import EngineReceivers


def test_an_engine_that_was_restarted_is_not_a_member_of_the_group_of_its_predecessor() -> None:
    class Engine(SimpleNamespace):
        __hash__ = object.__hash__

    engines = [Engine(engine_id=f"engine-{index}", node_id="node", version=0) for index in range(2)]
    pool: Any = SimpleNamespace(engines=lambda: engines)
    receivers = EngineReceivers(pool, "node")
    before = receivers.addresses()
    assert receivers.addresses() == before
    engines[1] = Engine(engine_id="engine-1", node_id="node", version=0)
    after = receivers.addresses()
    assert (after[0], after[1].name) == (before[0], before[1].name)
    assert after[1] != before[1], "it has to join"
