"""Which algorithms have a kernel; that it gives what is composed: tests/unit/kernels/interpreted_policy_loss.py."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.kernels.policy_loss import ClippedLoss
from penstock.trainer.algorithms.objective import can_fuse
from tests.algorithms import resolved

FUSED = (
    {},
    {"correction": "none", "proximal": "behavior"},
    {"correction": "tis_token", "proximal": "recompute", "mini_batches": 4},
    {"kl_coefficient": 0.1, "kl_estimator": "k3"},
    {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
    {"aggregation": "constant_length"},
)
COMPOSED = (
    {"loss": "dual_clip"},
    {"loss": "distill"},
    {"entropy_coefficient": 0.1},
    {"loss": "tests.unit.trainer.algorithms.own:squared"},
    {"correction": ("decoupled", "opsm")},
    {"correction": "mis_token"},
    {"correction": "none", "proximal": "behavior", "kl_coefficient": 0.1},
    {"kl_coefficient": 0.1, "kl_estimator": "k1"},
    {"staleness_decay": 0.9},
    {"entropy_top_share": 0.2},
    {"teacher_coefficient": 0.5},
    {"nll_coefficient": 0.1},
    {"correction": "tis_token", "tis_low": 0.5},
    {"renormalize": "weights"},
)


@pytest.mark.parametrize("keys", FUSED, ids=str)
def test_these_have_a_kernel(keys) -> None:
    assert resolved(**keys).fused is not None


@pytest.mark.parametrize("keys", COMPOSED, ids=str)
def test_these_are_composed(keys) -> None:
    assert resolved(**keys).fused is None


def test_the_kernel_gets_the_settings_of_the_algorithm() -> None:
    clips = {"clip_low": 0.1, "clip_high": 0.3, "correction_cap": 4.0, "tis_cap": 3.0}
    config = resolved(**clips, kl_coefficient=0.05)
    assert config.fused == ClippedLoss(0.1, 0.3, 20.0, 10.0, "decoupled", 4.0, "k2", 0.05)
    truncated = resolved(**clips, correction="tis_token")
    assert truncated.fused == ClippedLoss(0.1, 0.3, 20.0, 10.0, "tis_token", 3.0, "none", 0.0)


def test_a_cpu_composes_all_of_them() -> None:
    assert can_fuse(torch.zeros(3)) == is_interpreted()
    assert not can_fuse(torch.zeros(3, dtype=torch.float64))
