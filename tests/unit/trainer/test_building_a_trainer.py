"""Building a trainer: settings that are refused, the tiny policy, names of what is published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.weights_plan import expected_splits
from penstock.dataflow.errors import ConfigError
from penstock.trainer.backends.tensor_parallel import check_splittable, splits_of
from penstock.trainer.config import LoraConfig, MuonConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.flops import attention_share
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.validation import trainer_violations
from penstock.weights.layout.algebra import TensorSpec
from tests.tiny_policy import SPECIAL_TOKENS

from .torch_trainer import MODEL, trainer_of


def test_a_missing_model_is_named(policy) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=/nonexistent/policy does not exist"):
        trainer_of("/nonexistent/policy")


def test_settings_that_cannot_run_together_are_all_named() -> None:
    optimizer = OptimizerConfig(lr=1.0)
    model = MODEL.model_copy(update={"dtype": "bfloat16"})
    trainer = TrainerConfig(
        backend="torch", num_ranks=2, zero_stage=1, max_tokens_per_micro_batch=10, optimizer=optimizer
    )
    keys = [
        "trainer.max_tokens_per_micro_batch=10",
        "trainer.num_ranks=2",
        "trainer.zero_stage=1",
        "model.dtype=bfloat16",
    ]
    assert [violation.split()[0] for violation in trainer_violations(model, trainer)] == keys
    offloaded = TrainerConfig(offload_optimizer=True, max_tokens_per_micro_batch=64, optimizer=optimizer)
    assert [violation.split()[0] for violation in trainer_violations(MODEL, offloaded)] == [
        "trainer.offload_optimizer=true"
    ]


FSDP2 = {"backend": "fsdp2", "num_ranks": 4, "max_tokens_per_micro_batch": 64, "optimizer": OptimizerConfig(lr=1.0)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_stage": 3}, r"trainer\.zero_stage=3 with trainer\.backend=fsdp2.*deepspeed, or zero_stage=0"),
        ({"tensor_parallel_size": 2}, r"trainer\.tensor_parallel_size=2 with .*deepspeed \(AutoTP\), or .*=1\."),
        (
            {"sequence_parallel_size": 2, "sequence_parallel": "ulysses"},
            r"trainer\.sequence_parallel_size=2 with .*Ulysses is DeepSpeed's\. Use .*=context",
        ),
        ({"optimizer": OptimizerConfig(lr=1.0, muon=MuonConfig())}, r"trainer\.optimizer\.muon with .*backend=fsdp2"),
        (
            {"deepspeed": {"steps_per_print": 3}},
            r"trainer\.deepspeed=\{'steps_per_print': 3\} with .*or leave them out",
        ),
        ({"fsdp_copies": 3}, r"trainer\.fsdp_copies=3 does not divide trainer\.num_ranks=4.*Use one of 1, 2, 4\."),
        ({"offload_optimizer": True}, r"trainer\.offload_parameters=false with offload_optimizer=true and .*Set both"),
        (
            {"backend": "deepspeed", "fsdp_copies": 2},
            r"trainer\.fsdp_copies=2 with trainer\.backend=deepspeed.*=fsdp2\.",
        ),
        ({"fsdp_copies": 2, "compile": True, "offload_optimizer": True, "offload_parameters": True}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_fsdp2_cannot_do_is_one_line_with_the_choices(settings: dict, said: str | None) -> None:
    model = MODEL.model_copy(update={"attention": "varlen"})
    violations = trainer_violations(model, TrainerConfig(**FSDP2 | settings))
    assert len(violations) == (said is not None), violations
    assert said is None or re.match(said, violations[0]), violations


@pytest.mark.parametrize(
    ("num_experts", "settings", "said"),
    [
        (6, {}, "num_experts=6 cannot .* to 4 ranks .*num_ranks=4 / fsdp_copies=1.* one of 1, 2, 3, 6 ranks"),
        (6, {"fsdp_copies": 2}, None),
        (0, {}, "this model has no experts"),
        (8, {"backend": "deepspeed"}, "with trainer.backend=deepspeed.*backend=fsdp2"),
        (8, {"compile": True}, "trainer.compile=true with trainer.expert_parallel=true.*Use expert_parallel=false or"),
        (8, {"lora": LoraConfig(targets=("experts.down_proj",))}, "with adapters of experts"),
        (8, {"lora": LoraConfig(targets=("q_proj",))}, None),
    ],
    ids=str,
)
def test_experts_stay_on_their_ranks_only_where_each_has_as_many(
    num_experts: int, settings: dict, said: str | None
) -> None:
    shape = MODEL.shape.model_copy(update={"num_experts": num_experts, "expert_size": 32 * bool(num_experts)})
    trainer = TrainerConfig(**FSDP2 | {"expert_parallel": True} | settings)
    violations = trainer_violations(MODEL.model_copy(update={"shape": shape}), trainer)
    assert len(violations) == (said is not None), violations
    assert said is None or ("trainer.expert_parallel=true" in violations[0] and re.search(said, violations[0]))


def test_sharing_layers_and_sequences_at_once_is_refused() -> None:
    settings = {"num_ranks": 4, "tensor_parallel_size": 2, "sequence_parallel_size": 2}
    trainer = TrainerConfig(max_tokens_per_micro_batch=64, optimizer=OptimizerConfig(lr=1.0), **settings)
    (violation,) = trainer_violations(MODEL.model_copy(update={"attention": "varlen"}), trainer)
    assert violation.startswith("trainer.tensor_parallel_size=2 with sequence_parallel_size=2:")


def test_a_model_of_unknown_layers_is_not_split_over_ranks() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (8, 4), "model.layers.0.mlp.experts.down_proj": (2, 4, 8)}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: model\.layers\.0\.mlp\.experts.*zero_stage=3"):
        check_splittable(shapes, 2)


def test_a_tensor_that_deepspeed_splits_otherwise_than_we_publish_stops_the_start() -> None:
    name, shapes = "model.layers.0.mlp.up_proj.weight", {"model.layers.0.mlp.up_proj.weight": (7, 4)}
    splits = splits_of(shapes, [{name: (4, 4)}, {name: (3, 4)}])
    assert splits == {name: (((0, 4), (0, 4)), ((4, 7), (0, 4)))} == expected_splits([TensorSpec(name, (7, 4))], 2, 2)
    assert splits_of(shapes, [{name: (7, 4)}] * 2) == {}, "whole on both"
    for wrong in ((4, 4), (3, 2)):
        with pytest.raises(ConfigError, match=rf"parts \[\(4, 4\), \({wrong[0]}, {wrong[1]}\)\] of model.* \(7, 4\)"):
            splits_of(shapes, [{name: (4, 4)}, {name: wrong}])


def test_the_same_seed_gives_the_same_tiny_policy(policy, tmp_path) -> None:
    create_policy(MODEL, SPECIAL_TOKENS, str(tmp_path / "again"), seed=1)
    create_policy(MODEL, SPECIAL_TOKENS, str(tmp_path / "other"), seed=2)
    weights = Path(policy, "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_published_names_are_those_of_the_checkpoint(policy) -> None:
    from safetensors import safe_open

    with safe_open(Path(policy) / "model.safetensors", framework="pt") as file:
        assert sorted(name for name, _ in trainer_of(policy).export_weights()) == sorted(file.keys())


def test_attention_share_counts_products() -> None:
    # 2 layers × (attention 32·8·2·(4+2) + MLP 3·32·64); 2·2·4·8 attention products
    assert attention_share(MODEL.shape) == pytest.approx(2 * 2 * 4 * 8 / (2 * (3072 + 6144)))
