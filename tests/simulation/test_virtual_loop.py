"""The virtual-time loop: waiting takes no time, order is that of the timers, a deadlock is found and named."""

from __future__ import annotations

import asyncio

import pytest

from penstock.platform.simulator.virtual_loop import DeadlockError, VirtualTimeLoop
from tests.virtual_time import run_virtual


def test_a_year_passes_at_once() -> None:
    async def wait_a_year() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait_a_year()) == 365 * 86_400


def test_timers_run_in_the_order_of_their_time_then_of_their_setting() -> None:
    async def order() -> list[str]:
        ran: list[str] = []
        loop = asyncio.get_running_loop()
        for delay_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
            loop.call_later(delay_s, ran.append, name)
        await asyncio.sleep(3)
        return ran

    assert run_virtual(order()) == ["a", "b", "c", "d"]


def test_time_outs_and_cancelled_timers_work_as_in_asyncio() -> None:
    async def wait() -> float:
        for _ in range(3000):
            async with asyncio.timeout(1000):
                await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == pytest.approx(8.0)


def test_a_timer_that_another_one_of_its_time_cancels_does_not_run() -> None:
    async def race() -> list[str]:
        ran: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, lambda: second.cancel())  # noqa: PLW0108 - it comes next
        second = loop.call_later(1.0, ran.append, "second")
        loop.call_later(1.0, ran.append, "third")
        await asyncio.sleep(2)
        return ran

    assert run_virtual(race()) == ["third"]


def test_what_is_to_run_in_the_next_turn_can_be_cancelled() -> None:
    async def cancel() -> list[str]:
        ran: list[str] = []
        asyncio.get_running_loop().call_soon(ran.append, "cancelled").cancel()
        asyncio.get_running_loop().call_soon(ran.append, "kept")
        await asyncio.sleep(1)
        return ran

    assert run_virtual(cancel()) == ["kept"]


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def wait_for_nothing() -> None:
        waits = asyncio.create_task(asyncio.Event().wait(), name="for nothing")
        await waits

    with pytest.raises(DeadlockError, match="for nothing"):
        run_virtual(wait_for_nothing())


def test_an_error_in_a_callback_ends_the_run() -> None:
    async def plant() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run_virtual(plant())


def test_sets_of_tasks_have_the_same_order_in_every_run() -> None:
    async def cancelled_in_order() -> list[str]:
        order: list[str] = []

        async def member(name: str) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                order.append(name)

        tasks = {asyncio.create_task(member(str(index))) for index in range(50)}
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert run_virtual(cancelled_in_order()) == run_virtual(cancelled_in_order())


def test_the_clock_of_a_loop_starts_at_zero() -> None:
    loop = VirtualTimeLoop()
    assert loop.time() == 0.0
    loop.close()
