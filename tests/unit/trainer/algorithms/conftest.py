"""Fixtures of the tests that train with whole algorithms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.dataflow.trajectory import GroupPayload
from penstock.dataflow.versions import Span


@pytest.fixture
def aged(batch: list[GroupPayload]) -> list[GroupPayload]:
    """The batch at versions 3 and 5, close enough to the policy that clips leave something, with named parts."""

    def age(one):
        old = one.num_sampled_tokens // 2
        spans = tuple(span for span in (Span(3, old), Span(5, one.num_sampled_tokens - old)) if span.num_tokens)
        parts = {"right": one.reward, "short": float(len(one.token_ids) % 3)}
        return replace(one, spans=spans, reward_parts=parts)

    return [GroupPayload(group.group_id, tuple(map(age, group.trajectories))) for group in batch]


@pytest.fixture
def references(aged: list[GroupPayload]) -> list[np.ndarray]:
    rng = np.random.default_rng(9)
    return [
        rng.normal(-3, 0.3, sum(one.num_sampled_tokens for one in group.trajectories)).astype(np.float32)
        for group in aged
    ]
