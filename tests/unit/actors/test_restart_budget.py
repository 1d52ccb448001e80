"""The budget of restarts that engines, reward workers, frozen workers and the trainer share."""

from __future__ import annotations

import pytest

from penstock.actors.restart_budget import HOUR_S, RestartBudget


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_first_restart_comes_at_once_and_the_pauses_after_it_double_up_to_a_minute(clock: Clock) -> None:
    budget = RestartBudget(10, clock)
    pauses = [budget.take() for _ in range(10)]
    assert pauses[0] == 0.0
    for pause_s, longest_s in zip(pauses[1:], (1, 2, 4, 8, 16, 32, 60, 60, 60), strict=True):
        assert pause_s is not None
        assert longest_s / 2 <= pause_s <= longest_s


def test_pauses_of_workers_that_were_lost_together_differ(clock: Clock) -> None:
    budgets = [RestartBudget(2, clock) for _ in range(20)]
    assert {budget.take() for budget in budgets} == {0.0}
    assert len({budget.take() for budget in budgets}) == 20


def test_a_budget_that_is_used_up_gives_none_until_an_hour_has_passed(clock: Clock) -> None:
    budget = RestartBudget(2, clock)
    assert budget.take() == 0.0
    clock.now_s = 1000.0
    assert budget.take() is not None
    clock.now_s = HOUR_S - 1
    assert budget.take() is None
    assert str(budget) == "restart 2 of 2 within an hour"
    clock.now_s = HOUR_S
    assert budget.take() is not None, "the first one is forgotten"
    assert budget.take() is None, "the second one is not"


def test_a_worker_that_never_served_is_forgiven_no_restart(clock: Clock) -> None:
    budget = RestartBudget(2, clock)
    budget.take()
    for _ in range(2):
        clock.now_s += 2 * HOUR_S
        result = budget.take(has_served=False)
    assert result is None
    assert budget.take() == 0.0, "it has served, and more than an hour has passed"


def test_a_budget_of_none_restarts_nothing(clock: Clock) -> None:
    assert RestartBudget(0, clock).take() is None
