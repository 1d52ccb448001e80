"""When the warm start stops, and which of its steps is kept."""

from __future__ import annotations

from penstock.platform.run.offline_training import StopRule
from penstock.trainer.config import SftConfig


def rule_after(
    *scores: tuple[float, float], target: float | None = 0.15, ceiling: float = 0.55
) -> tuple[StopRule, bool]:
    """The rule after measurements (sampled, greedy), and whether it ended training at the last one."""
    config = SftConfig(
        batch_size=1, max_steps=100, eval_every_steps=1, eval_tasks=1,
        stop_at_accuracy=target, max_greedy_accuracy=ceiling,
    )  # fmt: skip
    rule, over = StopRule(config), False
    for step, (sampled, greedy) in enumerate(scores, start=1):
        assert not over, "measured after the end"
        rule.is_best(step, sampled, greedy)
        over = rule.is_over(sampled)
    return rule, over


def test_it_ends_at_the_first_step_that_meets_target_and_ceiling() -> None:
    rule, over = rule_after((0.05, 0.2), (0.16, 0.6), (0.155, 0.5))
    assert over
    assert rule.best_step == 3


def test_past_twice_the_target_the_best_step_under_the_ceiling_is_kept() -> None:
    rule, over = rule_after((0.05, 0.2), (0.12, 0.5), (0.2, 0.7), (0.11, 0.4), (0.31, 0.9))
    assert over
    assert (rule.best_step, rule.best_sampled, rule.best_greedy) == (2, 0.12, 0.5)


def test_without_a_target_it_never_ends_early_and_keeps_the_best_step() -> None:
    rule, over = rule_after((0.3, 0.5), (0.9, 0.95), (0.8, 0.9), target=None, ceiling=1.0)
    assert not over
    assert rule.best_step == 2


def test_a_step_above_the_ceiling_is_never_kept() -> None:
    rule, over = rule_after((0.2, 0.56), (0.29, 0.8))
    assert not over
    assert rule.best_step is None
