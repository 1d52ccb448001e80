"""`trainer.deepspeed` against DeepSpeed's own configuration: what is accepted, what arrives, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import compose_config, load_config
from penstock.trainer.backends.deepspeed_settings import RESERVED, deepspeed_settings, problems
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.weights.model_config import ModelConfig

pytestmark = pytest.mark.integration

ACCEPTED: list[dict[str, Any]] = [
    {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False, "reduce_bucket_size": 1000}},
    {"zero_optimization": {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 10}},
    {"zero_optimization": {"sub_group_size": 1000, "stage3_max_live_parameters": 1000}},
    {"communication_data_type": "fp32"},
    {"comms_logger": {"enabled": True}},
    {"wall_clock_breakdown": True, "memory_breakdown": True},
    {"flops_profiler": {"enabled": True, "profile_step": 3}},
    {"steps_per_print": 1},
    {"tensorboard": {"enabled": True, "output_path": "elsewhere"}, "timers": {"throughput": {"enabled": False}}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimisation": {"stage": 1}}, "trainer.deepspeed.zero_optimisation: DeepSpeed has no such setting"),
    ({"flops_profiler": {"enabeld": True}}, "trainer.deepspeed.flops_profiler.enabeld: DeepSpeed has no such setting"),
    ({"zero_optimization": {"overlap_com": True}}, "overlap_com: Extra inputs are not permitted"),
    ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size: Input should be a valid integer"),
    ({"amp": {"enabled": True}}, "NVIDIA Apex AMP integration has been removed"),
    ({"zero_optimization": {"stage": 3}}, "trainer.deepspeed.zero_optimization.stage: this setting of DeepSpeed is"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "Penstock reads weights and moments where"),
    ({"fp16": {"enabled": True}}, "model.dtype"),
    ({"gradient_clipping": 3.0}, "trainer.optimizer.gradient_clip_norm"),
    ({"train_batch_size": 8}, "counts batches in tokens"),
]


@pytest.mark.parametrize("passed", ACCEPTED, ids=lambda one: str(one)[:40])
def test_a_setting_that_deepspeed_knows_is_merged_into_ours(
    passed: dict[str, Any], tiny_model_config: ModelConfig
) -> None:
    assert not problems(passed)
    trainer = TrainerConfig(max_tokens_per_micro_batch=64, optimizer=OptimizerConfig(lr=1e-3), deepspeed=passed)
    ours = deepspeed_settings(tiny_model_config, trainer.model_copy(update={"deepspeed": {}}))
    settings = deepspeed_settings(tiny_model_config, trainer)
    for name, value in passed.items():
        inner = ours.get(name)
        assert settings[name] == (inner | value if isinstance(inner, dict) else value)
    assert {name: settings[name] for name in ours.keys() - passed.keys()} == {
        name: ours[name] for name in ours.keys() - passed.keys()
    }


@pytest.mark.parametrize(("passed", "why"), REFUSED, ids=lambda one: str(one)[:40])
def test_a_setting_is_refused_with_its_reason(passed: dict[str, Any], why: str) -> None:
    (told,) = problems(passed)
    assert told.startswith("trainer.deepspeed")
    assert why in told


def test_every_reserved_setting_is_one_that_deepspeed_reads() -> None:
    """One that it ignores, or that was renamed, would be reserved for nothing."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {name for key, field in DeepSpeedZeroConfig.model_fields.items() for name in (key, field.alias)}
    assert not [path for path in RESERVED if "." in path and path.partition(".")[2] not in known]


def test_settings_for_another_backend_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.deepspeed=.* with trainer\.backend=torch"):
        compose_config(["experiment=arithmetic", "trainer.backend=torch", "trainer.deepspeed.steps_per_print=3"])


@pytest.mark.full
def test_the_dry_run_refuses_what_deepspeed_refuses() -> None:
    typed = ["trainer.deepspeed.zero_optimization.overlap_com=true"]
    with pytest.raises(ConfigError, match="overlap_com: Extra inputs are not permitted"):
        load_config("train", ["experiment=arithmetic", "name=deepspeed-settings", *typed], dry_run=True)
