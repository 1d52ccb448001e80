"""When a setting of an algorithm is read, and what a paper argues against: declared beside the setting or its loss.

    clip_low: Annotated[float, RATIO_MOVES] = Field(default=0.2, gt=0, lt=1)

A setting that differs from its default is reported where one of its conditions fails (`check_without_effect`), unless
the combination is refused. A custom loss or advantage may read whatever such a function is given, so conditions
of what it reads hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.trainer.config import AlgorithmConfig


class Condition(NamedTuple):
    """A condition under which a setting has an effect: `keys` of `algorithm` decide it, `why` says why it does not."""

    holds: Callable[[AlgorithmConfig], bool]
    keys: tuple[str, ...]
    why: str
    remedy: str


class Deviation(NamedTuple):
    """What a paper argues against: the setting `key` of `algorithm`; `others` tell that the loss is the paper's."""

    holds: Callable[[AlgorithmConfig], bool]
    key: str
    others: tuple[str, ...]
    why: str
    remedy: str


def ratio_moves(config: AlgorithmConfig) -> bool:
    """Whether the ratio to the proximal policy can differ from 1."""
    return config.updates_per_batch > 1 or config.proximal == "behavior"


def uses_rewards(config: AlgorithmConfig) -> bool:
    """Whether the loss learns from advantages or pairs."""
    return config.loss_entry.needs_advantages


RATIO_MOVES = Condition(
    ratio_moves,
    ("proximal", "mini_batches", "epochs"),
    "with one optimizer update per batch the ratio to the proximal policy is 1, so no clip bound is reached",
    "Use algorithm.proximal=behavior with algorithm/correction=none, or several updates with proximal=recompute",
)
SEVERAL_UPDATES = Condition(
    lambda config: config.updates_per_batch > 1,
    ("mini_batches", "epochs"),
    "with one update per batch the value equals the old value",
    "Use several updates",
)
ADVANTAGES = Condition(
    lambda config: uses_rewards(config) and not config.compares_pairs,
    ("loss",),
    "this loss uses no advantage",
    "Use a loss of advantages, such as ppo_clip",
)
