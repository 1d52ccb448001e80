"""Warnings about settings that the paper of the chosen algorithm argues against, and what to use instead.

The name of a preset is not among the values, so an algorithm is recognised by its parts. What such a paper only leaves
out (a divergence in CISPO, say) is not named here, but in the comments of the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from penstock.platform.config.findings import Finding, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.config import AlgorithmConfig

_MAX_SEQUENCE_CLIP = 0.1


class Deviation(NamedTuple):
    """A combination that a paper argues against.

    Attributes:
        holds: Whether it is this combination.
        key: The setting, below `algorithm`.
        others: Settings by which the algorithm is recognised, below `algorithm`.
        why: What the paper says, and where.
        remedy: What to do instead.
    """

    holds: Callable[[AlgorithmConfig], bool]
    key: str
    others: tuple[str, ...]
    why: str
    remedy: str


def _is_dapo(config: AlgorithmConfig) -> bool:
    loss = config.loss
    clips_higher = loss.type in ("ppo_clip", "dual_clip") and loss.clip_high > loss.clip_low
    return clips_higher and config.overlong.mode == "penalty"


_DAPO = ("loss.clip_high", "overlong.mode")
DEVIATIONS = (
    Deviation(
        lambda config: _is_dapo(config) and config.kl.coefficient > 0,
        "kl.coefficient",
        _DAPO,
        "DAPO has no divergence, since a policy that learns to reason moves far from where it began (arXiv 2503.14476, "
        "section 2.3)",
        "Use kl.coefficient=0",
    ),
    Deviation(
        lambda config: _is_dapo(config) and config.aggregation != "token_mean",
        "aggregation",
        _DAPO,
        "DAPO weighs all tokens of the batch equally, so that long answers are learned from (arXiv "
        "2503.14476, section 3.3)",
        "Use aggregation=token_mean",
    ),
    Deviation(
        lambda config: getattr(config.advantage, "whiten", "batch") == "none" and not config.needs_critic,
        "advantage.whiten",
        ("advantage",),
        "the whitening over the batch is what REINFORCE++ adds (arXiv 2501.03262, section 3.2)",
        "Use advantage.whiten=batch, or algorithm=dr_grpo for advantages that are only centred",
    ),
    Deviation(
        lambda config: config.loss.type in ("gspo", "gspo_token") and config.loss.clip_high > _MAX_SEQUENCE_CLIP,
        "loss.clip_high",
        ("loss",),
        "the ratio of a whole sequence moves far less than that of a token, so this bound is never reached; the paper "
        "has 0.0004 (arXiv 2507.18071, section 5.1)",
        "Use loss.clip_high=0.0004",
    ),
    Deviation(
        lambda config: config.loss.type in ("gspo", "gspo_token") and config.loss.clip_low > _MAX_SEQUENCE_CLIP,
        "loss.clip_low",
        ("loss",),
        "the ratio of a whole sequence moves far less than that of a token, so this bound is never reached; the paper "
        "has 0.0003 (arXiv 2507.18071, section 5.1)",
        "Use loss.clip_low=0.0003",
    ),
    Deviation(
        lambda config: config.loss.type == "sapo" and config.loss.tau_negative < config.loss.tau_positive,
        "loss.tau_negative",
        ("loss.tau_positive",),
        "the gate has to be steeper for negative advantages, whose gradients raise many unsampled tokens (arXiv "
        "2511.20347, section 3)",
        "Use a tau_negative above tau_positive",
    ),
    Deviation(
        lambda config: config.loss.type == "sapo" and config.aggregation == "token_mean",
        "aggregation",
        ("loss",),
        "SAPO averages its gate within each answer first (arXiv 2511.20347, section 3)",
        "Use aggregation=seq_mean_token_mean",
    ),
)


def check_published(config: RunConfig) -> Iterator[Finding]:
    """Warn of each setting that the paper of the chosen algorithm argues against."""
    algorithm = config.algorithm

    def shown(key: str) -> str:
        value = attrgetter(key)(algorithm)
        return f"algorithm.{key}={getattr(value, 'name', value)}"

    for one in DEVIATIONS:
        if one.holds(algorithm):
            yield warning(f"{shown(one.key)} with {', '.join(map(shown, one.others))}: {one.why}. {one.remedy}.")
