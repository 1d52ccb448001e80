"""Cross-field checks: valid values that cannot run together are refused, with both numbers and a way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.flow import DROP_BIAS
from penstock.platform.checks.load import compose_config
from penstock.platform.config.compose import compose_all

STALENESS = Path(__file__).parents[3] / "docs" / "concepts" / "staleness.md"
ULYSSES = ["trainer.sequence_parallel_size=2", "model.attention=varlen"]


def refused(experiment: str, *overrides: str, command: str = "train", several: bool = False) -> str:
    with pytest.raises(ConfigError) as raised:
        compose_config([f"experiment={experiment}", *overrides], command=command)
    if several:
        return "\n".join(raised.value.violations)
    (problem,) = raised.value.violations
    return problem


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """The policy that `make demo` leaves in runs/ would be read."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.some(20)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dataflow.batch_groups=3", "trainer.num_ranks=4"], ["dataflow.batch_groups=3", "unequal work", "Use 4."]),
        (
            ["dataflow.batch_groups=32", "trainer.num_ranks=5"],
            ["dataflow.batch_groups=32", "trainer.num_ranks=5", "unequal work", "Use 30 or 35"],
        ),
        (
            ["dataflow.min_group_size=9", "dataflow.group_size=8"],
            ["min_group_size=9", "group_size=8", "forever", "Use at most 8"],
        ),
        (["trainer=torch", "trainer.num_ranks=2"], ["trainer.backend=torch", "num_ranks=2", "deepspeed"]),
        (["trainer=torch", "trainer.zero_stage=1"], ["zero_stage=1"]),
        (["trainer.offload_optimizer=true"], ["offload_optimizer", "zero_stage=0", "Use zero_stage=1"]),
        (
            ["trainer.max_tokens_per_micro_batch=100", "model.max_context_tokens=128"],
            ["100", "max_context_tokens=128", "never be trained"],
        ),
        (["trainer.optimizer.betas=[0.9,1.0]"], ["[0.9, 1.0]", "[0, 1)"]),
        (["algorithm=ppo", "critic.optimizer.betas=[0.9,1.0]"], ["critic.optimizer", "[0.9, 1.0]", "[0, 1)"]),
        (
            ["trainer.optimizer.muon={}", "trainer.zero_stage=2"],
            ["trainer.optimizer.muon with trainer.zero_stage=2", "whole matrices", "zero_stage=0", "muon=null"],
        ),
        (
            ["algorithm=ppo", "critic.optimizer.muon={}", "trainer.zero_stage=1"],
            ["critic.optimizer.muon with trainer.zero_stage=1", "critic.optimizer.muon=null"],
        ),
        (
            ["trainer=lora", "trainer.optimizer.muon={momentum: 0.9}"],
            ["trainer.optimizer.muon with trainer.lora", "null"],
        ),
        (
            ["trainer.optimizer.muon={}", "trainer.num_ranks=2", "trainer.tensor_parallel_size=2"],
            ["trainer.optimizer.muon with trainer.tensor_parallel_size=2", "parts of them"],
        ),
        (["trainer.optimizer.muon={momentum: 1}"], ["trainer.optimizer.muon.momentum", "1"]),
        (["trainer.optimizer.stable_steps=5"], ["stable_steps=5", "no effect", "decay_steps"]),
        (["rollout.sampling.top_p=0.9"], ["top_p=0.9 without", "top_k", "renormalises over the same", "from 2 to 64"]),
        (["rollout.sampling.min_p=0.1"], ["min_p=0.1 without", "Use a top_k from 2 to 64"]),
        (["rollout.sampling.top_k=65"], ["top_k=65", "[0, 64]"]),
        (["rollout.sampling.top_k=1"], ["top_k=1", "nothing is learned"]),
        (
            ["rollout.sampling.top_k=4", "algorithm.entropy.target=1.5"],
            ["algorithm.entropy.target=1.5", "top_k=4", "ln 4 = 1.39 nat"],
        ),
        (["algorithm.entropy.target=4"], ["algorithm.entropy.target=4", "ln 32 = 3.47 nat"]),
        (["rollout.sampling.top_k=32"], ["top_k=32", "vocab_size=32", "cuts nothing off"]),
        (
            ["rollout.sampling.top_k=20", "model.head_dtype=model", "model.dtype=bfloat16"],
            ["top_k=20", "tie", "Use model.head_dtype=float32"],
        ),
        (
            ["rollout.sampling.max_new_tokens=128", "model.max_context_tokens=128"],
            ["max_new_tokens=128", "max_context_tokens=128", "no space"],
        ),
        (["model.path=null"], ["model.path is not set"]),
        (["dataflow.max_staleness=-1"], ["dataflow.max_staleness=-1", "must be >= 0"]),
        (["model.from_scratch=true"], ["penstock sft"]),
        (["model.shape.num_kv_heads=3"], ["num_heads=4", "num_kv_heads=3"]),
        (["cluster.trainer_pool=cpus"], ["cluster.trainer_pool=cpus", "Did you mean cpu?", "Pools: cpu"]),
        (["cluster.colocated=true", "dataflow.max_staleness=1"], ["max_staleness=0, not 1", "dataflow=synchronous"]),
        (["rollout.engine.kv_cache_gib=1e-5"], ["KV cache", "max_context_tokens=128", "never finish"]),
        (["cluster.pools.cpu.memory_gib=2"], ["memory_gib=2", "4 processes", "GiB"]),
        (["dataflow.max_live_gib=0.0001"], ["holds 52 trajectories", "a batch has 256", "Use at least 0.000493"]),
        (["dataflow.surplus=4", "dataflow.on_expiry=drop"], ["surplus=4", "on_expiry=drop", "on_expiry=wait"]),
        (["dataflow.stream_micro_batches=true", "dataflow.surplus=4"], ["surplus=4", "when a batch closes"]),
        (["dataflow.stream_micro_batches=true", "dataflow.surplus=auto"], ["surplus=auto", "when a batch closes"]),
        (["dataflow.surplus=auto", "dataflow.on_expiry=trim"], ["surplus=auto", "on_expiry=trim", "on_expiry=wait"]),
        (["trainer.offload_parameters=true"], ["offload_parameters", "zero_stage=0", "Use zero_stage=3"]),
        (
            ["dataflow.stream_micro_batches=true", "model.dtype=bfloat16"],
            ["zero_stage=0", "Use trainer.zero_stage=2 or 3"],
        ),
        (
            ["trainer=lora", "trainer.num_ranks=2", "trainer.tensor_parallel_size=2"],
            ["trainer.lora", "tensor_parallel_size=2", "AutoTP", "trainer.zero_stage=3"],
        ),
        (["algorithm.kl.coefficient=0.1", "reference.pool=cpus"], ["reference.pool=cpus", "Did you mean cpu?"]),
        (["reward.pool=cpus"], ["reward.pool=cpus", "Did you mean cpu?", "Pools: cpu"]),
        (["dataflow.group_sizing=penstock.dataflow.ids:TaskId"], ["has no method group_size"]),
        (["dataflow.length_limiting=penstock.dataflow.ids:TaskId"], ["has no method max_new_tokens"]),
        (["env.curriculum=penstock.dataflow.nothing:x"], ["env.curriculum", "attribute 'nothing'"]),
        (["dataflow.filters.user=penstock.dataflow.core:BATCH"], ["dataflow.filters.user", "no attribute 'BATCH'"]),
        (["+env.streams.a={quota: 0.4}", "+env.streams.b={quota: 0.5}"], ["quotas sum to 0.9, below 1"]),
        (
            ["trainer.tensor_parallel_size=2", "trainer.zero_stage=1"],
            ["tensor_parallel_size=2", "num_ranks=1", "Use num_ranks=2 or 4"],
        ),
        ([*ULYSSES, "trainer.num_ranks=3"], ["num_ranks=3", "1 would be left over"]),
        (["trainer.tensor_parallel_size=4", "trainer.num_ranks=4"], ["num_kv_heads=2", "never split", "a divisor"]),
        (
            [*ULYSSES, "trainer.sequence_parallel_size=4", "trainer.num_ranks=4", "trainer.sequence_parallel=ulysses"],
            ["num_kv_heads=2", "whole heads", "trainer.sequence_parallel=context"],
        ),
        (
            ["trainer.sequence_parallel_size=2", "trainer.num_ranks=2"],
            ["model.attention=sdpa", "sequence_parallel_size=2", "would see each other", "Use model.attention=varlen"],
        ),
        (
            ["trainer.compile=true", "trainer.zero_stage=3"],
            [
                "trainer.compile=true with trainer.zero_stage=3",
                "gathered before every module",
                "nothing is fused",
                "Use zero_stage=0, 1 or 2",
            ],
        ),
        (
            ["trainer.compile=true", "trainer.tensor_parallel_size=2", "trainer.num_ranks=2"],
            ["trainer.compile=true with trainer.tensor_parallel_size=2", "Use tensor_parallel_size=1 or compile=false"],
        ),
        (
            [*ULYSSES, "trainer.num_ranks=2", "trainer.compile=true"],
            ["trainer.compile=true with trainer.sequence_parallel_size=2", "Use sequence_parallel_size=1"],
        ),
        (
            [*ULYSSES, "trainer.tensor_parallel_size=2", "trainer.num_ranks=4"],
            ["tensor_parallel_size=2", "sequence_parallel_size=2", "not both", "Set one of them to 1"],
        ),
        (
            ["trainer.tensor_parallel_size=2", "trainer.num_ranks=2", "model.dtype=bfloat16"],
            ["tensor_parallel_size=2", "zero_stage=0", "clip too little", "Use trainer.zero_stage=1"],
        ),
        (
            [
                *("trainer.sequence_parallel_size=2", "trainer.num_ranks=2", "trainer.zero_stage=1"),
                *("model.dtype=bfloat16", "trainer.sequence_parallel=ulysses"),
            ],
            ["sequence_parallel_size=2", "zero_stage=1", "first step", "Use trainer.zero_stage=2"],
        ),
        (
            ["trainer.tensor_parallel_size=2", "trainer.num_ranks=4", "dataflow.batch_groups=33"],
            ["batch_groups=33", "the data-parallel size 2 of trainer.num_ranks=4", "Use 32 or 34"],
        ),
        (
            [*ULYSSES, "trainer.num_ranks=2", "trainer.max_tokens_per_micro_batch=60", "model.max_context_tokens=128"],
            ["60", "max_context_tokens=128 over sequence_parallel_size=2 ranks", "Use at least 64"],
        ),
    ],
)
def test_the_demo_with_a_contradiction_is_refused(overrides, words):
    problem = refused("arithmetic", *overrides)
    assert all(word in problem for word in words), problem


def test_bit_for_bit_repeatable_decoding_is_refused_on_a_gpu():
    overrides = ["rollout/engine=torch", "rollout.engine.deterministic=true"]
    problem = refused("math_qwen_8gpu", *overrides, several=True)
    assert "rollout.engine.deterministic=true needs a CPU, but generate is a GPU pool" in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm.kl.coefficient=0.1"],
            ["cluster.pools.train.count=4", "4 for trainers and 1 for references", "5 GPUs in all"],
        ),
        (["rollout.num_engines=5"], ["cluster.pools.generate.count=4", "5 for engines", "GPU"]),
        (
            ["reward.pool=generate", "reward.num_workers=2"],
            ["cluster.pools.generate.count=4", "4 for engines and 2 for reward workers", "6 GPUs in all"],
        ),
        (
            [
                "reward.pool=generate",
                "reward.num_workers=1",
                "rollout.num_engines=3",
                "reward.num_parameters=70_000_000_000",
            ],
            ["a GPU of the pool generate has 80 GiB", "133.7 GiB"],
        ),
        (["cluster.rollout_pool=train"], ["cluster.pools.train.count=4", "8 GPUs in all"]),
        (["rollout.engine.tensor_parallel_size=2"], ["cluster.pools.generate.count=4", "8 for engines"]),
        (
            ["rollout.engine.tensor_parallel_size=3", "rollout.num_engines=1"],
            ["tensor_parallel_size=3", "num_heads 28", "num_kv_heads 4", "intermediate_size 18944"],
        ),
        (
            ["weights.codec=int8_delta", "rollout.engine.tensor_parallel_size=2", "rollout.num_engines=2"],
            ["weights.codec=int8_delta", "tensor_parallel_size=2", "Use delta"],
        ),
        (["weights.overlap=true", "weights.update_mode=drain"], ["weights.overlap=true", "update_mode=drain"]),
        (["weights.staging=bucket", "weights.codec=delta"], ["weights.codec=delta", "has overwritten"]),
        (["weights.staging=bucket", "weights.overlap=true"], ["weights.overlap=true", "are paused during"]),
        (
            ["weights.staging=bucket", "weights.transport=process_group", "weights.update_mode=multi_version"],
            ["weights.update_mode=multi_version", "none could serve"],
        ),
        (["weights.staging=bucket", "weights.transport=cuda_ipc"], ["weights.staging=bucket", "a full shard"]),
        (
            [
                "weights.transport=cuda_ipc",
                "cluster.pools.generate.device=cpu",
                "cluster.pools.generate.memory_gib=900",
                "rollout.engine.kv_cache_gib=4",
            ],
            ["weights.transport=cuda_ipc", "different devices"],
        ),
        (
            ["weights=gather", "rollout.engine.tensor_parallel_size=2", "rollout.num_engines=2"],
            ["weights.transport=gather", "tensor_parallel_size=2"],
        ),
        (
            ["trainer.zero_stage=0", "dataflow.stream_micro_batches=false"],
            ["a GPU of the pool train has 80 GiB", "zero_stage"],
        ),
    ],
)
def test_the_8_gpu_run_with_a_contradiction_is_refused(overrides, words):
    problem = refused("math_qwen_8gpu", *overrides)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("overrides", "attention"),
    [
        (["experiment=math_qwen_8gpu"], "varlen"),
        (["experiment=math_qwen_8gpu", "model.attention=sdpa"], "sdpa"),
        (["experiment=math_qwen_8gpu", "model.dtype=float32", "dataflow.stream_micro_batches=false"], "sdpa"),
        (["experiment=gsm8k_qwen_1gpu"], "varlen"),
        (["experiment=arithmetic"], "sdpa"),
        (["experiment=arithmetic", *ULYSSES, "trainer.num_ranks=2"], "varlen"),
    ],
)
def test_attention_is_chosen_by_the_dtype_unless_it_is_set(overrides, attention):
    assert compose_all(overrides).config.model.attention == attention


def test_colocated_roles_need_one_pool():
    overrides = ["cluster.colocated=true", "dataflow.max_staleness=0", "dataflow.stream_micro_batches=false"]
    assert "one pool" in refused("math_qwen_8gpu", *overrides)


def test_reward_workers_cannot_share_the_gpus_of_colocated_roles():
    one = ["reward.pool=gpu", "reward.num_workers=1"]
    problem = refused("gsm8k_qwen_1gpu", *one, several=True)
    assert "cluster.colocated=true with reward.pool=gpu" in problem
    assert "a CPU pool, or reward.pool=null" in problem
    with pytest.raises(ConfigError, match=r"1 for engines and 1 for reward workers, 2 GPUs in all"):
        compose_config(["experiment=gsm8k_qwen_1gpu", *one], command="eval")
    own = "+cluster.pools.judge={device: gpu, count: 1, memory_gib: 24}"
    in_own_pool = [own, *one, "reward.pool=judge"]
    compose_config(["experiment=gsm8k_qwen_1gpu", *in_own_pool])
    held = ["algorithm.kl.coefficient=0.1", "reference.pool=judge"]
    problem = refused("gsm8k_qwen_1gpu", *in_own_pool, *held)
    assert (
        "cluster.pools.judge.count=1 is too small: the roles need 1 for references and 1 for reward workers" in problem
    )


@pytest.mark.parametrize("mode", ["drain", "multi_version"])
def test_engines_that_take_turns_with_the_trainer_cannot_serve_during_a_publish(mode):
    problem = refused("gsm8k_qwen_1gpu", f"weights.update_mode={mode}", "rollout.num_engines=1", several=True)
    assert f"weights.update_mode={mode} with cluster.colocated=true" in problem


def test_rolling_needs_two_engines_and_is_fine_with_them():
    problem = refused("arithmetic", "weights.update_mode=multi_version")
    assert "rollout.num_engines=1" in problem
    assert "weights.update_mode=drain" in problem
    for fine in (["multi_version", "rollout.num_engines=2"], ["drain"], ["drain", "dataflow=synchronous"]):
        config = compose_config(["experiment=arithmetic", f"weights.update_mode={fine[0]}", *fine[1:]])
        assert [finding.message for finding in check_config(config, "train") if finding.severity == "error"] == []


def test_a_warm_start_needs_its_section_and_equal_work():
    assert "sft is not set" in refused("arithmetic", command="sft")
    assert "sft.batch_size=128" in refused("arithmetic_sft", "sft.batch_size=128", "trainer.num_ranks=3", command="sft")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm/correction=none", "biases the gradient"),
        ("dataflow.batch_timeout_s=10", "lost engine"),
        ("weights.codec=delta", "has no effect"),
        ("trainer.sequence_parallel=context", "no ranks share a sequence"),
        ("trainer.optimizer.decay=sqrt", "the rate never decays"),
        (["algorithm=ppo", "critic.optimizer.final_lr_ratio=0.5"], "critic.optimizer.final_lr_ratio=0.5 has no effect"),
        (["total_steps=5", "trainer.optimizer.warmup_steps=6"], "with 5 optimizer steps (total_steps=5)"),
        (["trainer=lora", "algorithm.kl.coefficient=0.1", "reference.pool=cpu"], "the trainer itself is the reference"),
        (
            ["trainer=lora", "model.dtype=bfloat16", "total_steps=100", "trainer.optimizer.lr=4e-6"],
            "100 optimizer steps at trainer.optimizer.lr=4e-06 (total_steps=100): elements of alpha / rank · B reach "
            "0.0008 at most",
        ),
    ],
)
def test_what_works_badly_is_a_warning(override, words):
    overrides = [override] if isinstance(override, str) else override
    config = compose_config(["experiment=arithmetic", *overrides])
    (finding,) = check_config(config, "train")
    assert finding.severity == "warning"
    assert words in finding.message


@pytest.mark.parametrize(("eta", "measured"), [(0, 1), (1, 1), (3, 2), (4, 4), (9, 8)])
def test_dropping_warns_with_the_measured_bias(eta, measured):
    overrides = ["dataflow.on_expiry=drop", f"dataflow.max_staleness={eta}"]
    config = compose_config(["experiment=arithmetic", *overrides])
    (finding,) = [found for found in check_config(config, "train") if "on_expiry=drop" in found.message]
    length, longest = DROP_BIAS[measured]
    assert finding.severity == "warning"
    assert f"at max_staleness={measured}, trained answers had {length:.2f} of the mean length" in finding.message
    assert f"{longest:.2f} of the longest 1 % of answers were trained" in finding.message


def test_the_measured_bias_is_that_of_the_table():
    table = re.findall(r"\| drop streamed \| (\d+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|", STALENESS.read_text())
    assert {int(eta): (float(length), float(longest)) for eta, length, longest in table} == DROP_BIAS
    assert 1 in DROP_BIAS
