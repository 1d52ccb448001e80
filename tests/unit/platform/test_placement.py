"""Placement and memory estimates."""

from __future__ import annotations

import pytest

from penstock.platform.checks.cluster import check_offload
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.actor_factory import engine_spec
from penstock.platform.cluster.memory import (
    GIB,
    engine_memory,
    frozen_memory,
    kv_cache_gib,
    published_gib,
    resident_gib,
    shared_gib,
    staged_gib,
    trained_state_gib,
    trainer_memory,
)
from penstock.platform.cluster.placement import device_load_gib, host_load_gib, plan_placement, shared_bundles
from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, weight_route

TRAINING_IS_LARGER = ["rollout.engine.kv_cache_gib=0.3"]
"""Than what stays of it and an engine."""
ENGINES_ON_CPU = [
    "cluster.pools.generate.device=cpu",
    "cluster.pools.generate.memory_gib=900",
    "rollout.engine.kv_cache_gib=4",
]


NEVER = {"every_steps": 0, "every_minutes": 0.0}


def slots(config, role, command="train"):
    return [(p.pool, p.slot, p.num_gpus) for p in plan_placement(config, command) if p.role == role]


def test_disaggregated_roles_have_a_gpu_each():
    config = compose_config(["experiment=math_qwen_8gpu"])
    assert slots(config, "trainer") == [("train", rank, 1.0) for rank in range(4)]
    assert slots(config, "engine") == [("generate", index, 1.0) for index in range(4)]


def test_colocated_roles_share_a_gpu():
    config = compose_config(["experiment=gsm8k_qwen_1gpu"])
    assert slots(config, "trainer") == slots(config, "engine") == [("gpu", 0, 0.0)], "reserved for both"
    assert shared_bundles(config) == [1]
    assert slots(config, "engine", "eval") == [("gpu", 0, 1.0)]


@pytest.mark.parametrize(
    ("ranks", "engines", "width", "bundles"),
    [(4, 2, 2, [2, 2]), (4, 4, 1, [1, 1, 1, 1]), (4, 1, 2, [2, 2]), (1, 1, 2, [2]), (3, 1, 2, [2, 1])],
)
def test_gpus_that_roles_take_turns_on_are_reserved_as_wide_as_an_engine(ranks, engines, width, bundles):
    config = compose_config(
        [
            "experiment=gsm8k_qwen_1gpu",
            "cluster.pools.gpu.count=8",
            "dataflow.batch_groups=12",
            f"trainer.num_ranks={ranks}",
            f"rollout.num_engines={engines}",
            f"rollout.engine.tensor_parallel_size={width}",
        ]
    )
    assert shared_bundles(config) == bundles
    assert sum(bundles) == max(p.slot + p.num_slots for p in plan_placement(config) if p.pool is not None)
    assert shared_bundles(config, "eval") == []
    assert shared_bundles(compose_config(["experiment=math_qwen_8gpu"])) == []


def test_engines_come_after_the_ranks_in_a_shared_pool():
    config = compose_config(["experiment=math_qwen_8gpu", "cluster.rollout_pool=train", "cluster.pools.train.count=8"])
    assert slots(config, "engine") == [("train", 4 + index, 1.0) for index in range(4)]


def test_references_run_on_their_configured_pool_and_only_if_the_loss_needs_them():
    held = ["experiment=math_qwen_8gpu", "algorithm.kl.coefficient=0.01", "reference.num_workers=2"]
    config = compose_config([*held, "cluster.pools.train.count=6"])
    assert slots(config, "reference") == [("train", 4, 1.0), ("train", 5, 1.0)]
    config = compose_config([*held, "reference.pool=generate", "rollout.num_engines=2"])
    assert slots(config, "reference") == [("generate", 2, 1.0), ("generate", 3, 1.0)]
    assert slots(compose_config(["experiment=math_qwen_8gpu"]), "reference") == []


def test_teachers_come_after_references_and_need_memory_for_the_parameters_that_they_are_said_to_have():
    # By hand: 2 bytes for each parameter, in each of two processes.
    held = ["experiment=math_qwen_8gpu", "algorithm=distill", "teacher.path=somewhere", "cluster.pools.train.count=7"]
    held += ["algorithm.kl.coefficient=0.01", "teacher.num_workers=2"]
    small, large = (compose_config([*held, f"teacher.num_parameters={number}"]) for number in (10**9, 4 * 10**9))
    assert slots(small, "reference") == [("train", 4, 1.0)]
    assert slots(small, "teacher") == [("train", 5, 1.0), ("train", 6, 1.0)]
    weights = [
        [one.memory.device["weights"] for one in plan_placement(config) if one.role == "teacher"]
        for config in (small, large)
    ]
    assert weights == [[pytest.approx(2 * 1e9 / GIB)] * 2, [pytest.approx(2 * 4e9 / GIB)] * 2]


def test_reward_workers_have_no_device_unless_they_are_given_a_pool():
    own = ["experiment=math_qwen_8gpu", "reward.num_workers=2"]
    assert slots(compose_config(own), "reward") == [(None, 0, 0.0)] * 2
    for command in ("train", "eval"):
        config = compose_config([*own, "reward.pool=generate", "rollout.num_engines=2"])
        assert slots(config, "reward", command) == [("generate", 2, 1.0), ("generate", 3, 1.0)]
    config = compose_config(["experiment=arithmetic", "reward.pool=cpu"])
    assert slots(config, "reward") == [("cpu", 0, 0.0)], "behind a rank and an engine, of two slots that all share"


def test_a_reward_worker_with_a_pool_needs_memory_for_a_model_there():
    # By hand: 2 bytes for each of 3e9 parameters, on the GPU; what is computed on top does not depend on them.
    own = ["experiment=gsm8k_qwen_1gpu", "+cluster.pools.judge={device: gpu, count: 1, memory_gib: 24}"]
    small, large = (
        compose_config([*own, "reward.pool=judge", "reward.num_workers=1", f"reward.num_parameters={number}"])
        for number in (1_000_000_000, 4_000_000_000)
    )
    loads = [device_load_gib(config, plan_placement(config)) for config in (small, large)]
    assert loads[1]["judge"] - loads[0]["judge"] == pytest.approx(2 * 3e9 / GIB)
    assert loads[0]["gpu"] == device_load_gib(small, plan_placement(compose_config(own[:1])))["gpu"]


def test_a_frozen_policy_is_held_in_the_dtype_of_the_policy():
    # By hand: 7.616e9 parameters of 2 bytes.
    config = compose_config(
        ["experiment=math_qwen_8gpu", "algorithm.kl.coefficient=0.01", "cluster.pools.train.count=5"]
    )
    parts = frozen_memory(config, config.cluster.pools["train"]).device
    assert parts["weights"] == pytest.approx(2 * 7.616e9 / GIB, rel=1e-3)


def test_commands_start_only_what_they_need():
    config = compose_config(["experiment=arithmetic"])
    roles = {
        command: [f"{p.role}-{p.index}" for p in plan_placement(config, command)]
        for command in ("train", "sft", "eval")
    }
    assert roles == {
        "train": ["driver-0", "trainer-0", "engine-0", "reward-0"],
        "sft": ["driver-0", "trainer-0"],
        "eval": ["driver-0", "engine-0", "reward-0"],
    }


def test_the_states_of_a_7b_trainer_are_18_bytes_a_parameter_over_its_ranks():
    # By hand, at ZeRO-3: weights 2 + float32 gradients 4 + float32 masters 4 + two moments 8 = 18 bytes, over 4 ranks;
    # and one bucket of 5e7 gradients of 2 bytes.
    config = compose_config(["experiment=math_qwen_8gpu"])
    parts = trainer_memory(config, config.cluster.pools["train"]).device
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert config.model.shape.num_parameters == pytest.approx(7.616e9, rel=1e-3)
    assert states == pytest.approx((18 * 7.616e9 / 4 + 2 * 5e7) / GIB, rel=1e-3)


def test_fsdp2_keeps_12_bytes_a_parameter_over_the_ranks_of_a_copy_and_gives_gradients_back():
    # By hand: float32 weights 4 and two moments 8 over 2 ranks; float32 gradients 4 over 2 in a step.
    overrides = ["trainer.backend=fsdp2", "trainer.zero_stage=0", "trainer.fsdp_copies=2"]
    config = compose_config(["experiment=math_qwen_8gpu", *overrides, "cluster.pools.train.memory_gib=400"])
    rank = trainer_memory(config, config.cluster.pools["train"])
    assert config.trainer.num_ranks == 4
    parameters = config.model.shape.num_parameters / GIB
    assert rank.device["optimizer"] == pytest.approx(12 / 2 * parameters)
    assert rank.device["gradients"] == pytest.approx(4 / 2 * parameters)
    assert rank.device["weights"] == 0
    assert resident_gib(config, rank) == pytest.approx(12 / 2 * parameters + rank.device["base"])


def test_tensor_parallel_ranks_share_all_but_the_embedding():
    # By hand: ZeRO-1 over 2 replicas: bf16 weights 2, float32 gradients 4, masters and moments 12 / 2. The embedding is
    # whole on every rank, the head is split.
    overrides = ["trainer.tensor_parallel_size=2", "trainer.zero_stage=1", "dataflow.stream_micro_batches=false"]
    config = compose_config(["experiment=math_qwen_8gpu", *overrides, "cluster.pools.train.memory_gib=200"])
    parts = trainer_memory(config, config.cluster.pools["train"]).device
    embedding = 152064 * 3584
    held = embedding + (config.model.shape.num_parameters - embedding) / 2
    assert parts["weights"] == pytest.approx(2 * held / GIB)
    assert parts["gradients"] == pytest.approx(4 * held / GIB)
    assert parts["optimizer"] == pytest.approx(12 * held / 2 / GIB)


def test_a_float32_trainer_without_sharding_keeps_no_master_copy():
    config = compose_config(["experiment=arithmetic"])
    parts = trainer_memory(config, config.cluster.pools["cpu"]).host
    parameters = config.model.shape.num_parameters
    assert parts["optimizer"] == pytest.approx(8 * parameters / GIB)
    assert parts["gradients"] == pytest.approx(4 * parameters / GIB)


def test_moments_in_bfloat16_take_half_the_memory_and_half_the_space_in_a_checkpoint():
    # By hand, at ZeRO-3 over 4 ranks: float32 masters 4 + two moments of 2; the checkpoint has the same.
    config = compose_config(["experiment=math_qwen_8gpu", "trainer.optimizer.moments_dtype=bfloat16"])
    parts = trainer_memory(config, config.cluster.pools["train"]).device
    assert parts["optimizer"] == pytest.approx(8 * 7.616e9 / 4 / GIB, rel=1e-3)
    assert trained_state_gib(config) == pytest.approx(8 * 7.616e9 / GIB, rel=1e-3)


def test_muon_keeps_one_state_of_hidden_matrices_and_adamw_two_of_the_embedding():
    # By hand, of the policy and its critic, which has AdamW, without master copies.
    config = compose_config(["experiment=arithmetic", "algorithm=ppo", "trainer.optimizer.muon={}"])
    parts = trainer_memory(config, config.cluster.pools["cpu"]).host
    shape = config.model.shape
    embedding = shape.vocab_size * shape.hidden_size
    assert shape.tie_word_embeddings
    states = 4 * (shape.num_parameters - embedding) + 8 * embedding + 8 * shape.num_parameters
    assert parts["optimizer"] == pytest.approx(states / GIB)
    assert trained_state_gib(config) == pytest.approx((states + 8 * shape.num_parameters) / GIB)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ([], [0]),
        (["algorithm.mini_batches=2", "algorithm.proximal=recompute"], [1]),
        (["algorithm=ppo"], [2]),  # of the policy and its critic
        (["experiment=arithmetic_two_policies"], [1, 1]),
    ],
)
def test_weights_are_copied_before_what_may_not_be_completed(overrides, copies):
    config = compose_config([*([] if "experiment" in str(overrides) else ["experiment=arithmetic"]), *overrides])
    without = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=NEVER)})
    ranks = [one for one in plan_placement(without) if one.role == "trainer"]
    views = [config] if config.partner is None else [config, config.partner_view]
    policies = [4 * view.model.shape.num_parameters / GIB for view in views]
    found = [rank.memory.host["checkpoint"] / policy for rank, policy in zip(ranks, policies, strict=True)]
    assert found == pytest.approx(copies, rel=0.01)


def test_offloading_moves_the_optimizer_to_main_memory():
    config = compose_config(["experiment=math_qwen_8gpu", "trainer.offload_optimizer=true"])
    memory = trainer_memory(config, config.cluster.pools["train"])
    assert "optimizer" not in memory.device
    # By hand: masters and moments 12, gradients 4 in two places; AdamW on a CPU takes 8 for each of 1e9 at once.
    assert memory.host["optimizer"] == pytest.approx((20 * 7.616e9 / 4 + 8e9) / GIB, rel=1e-3)


def test_offloading_moves_the_weights_to_main_memory_but_those_that_are_gathered():
    config = compose_config(["experiment=math_qwen_8gpu"])
    before = trainer_memory(config, config.cluster.pools["train"])
    config = compose_config(["experiment=math_qwen_8gpu", "trainer.offload_parameters=true"])
    after = trainer_memory(config, config.cluster.pools["train"])
    # By hand: 2 bytes for each of 7.616e9 parameters, over four ranks.
    assert before.device["weights"] == after.host["weights"] == pytest.approx(2 * 7.616e9 / 4 / GIB, rel=1e-3)
    assert after.device == {part: gib for part, gib in before.device.items() if part != "weights"}


TURNS = ["experiment=gsm8k_qwen_1gpu", "algorithm.kl.coefficient=0.01"]


def test_a_reference_with_offload_takes_turns_with_the_trainer_on_its_gpu():
    config = compose_config([*TURNS, "reference.offload=true"])
    placements = plan_placement(config)
    by_role = {one.role: one for one in placements if one.device == "gpu"}
    rank, engine, reference = (by_role[role] for role in ("trainer", "engine", "reference"))
    assert (reference.slot, reference.num_gpus) == (rank.slot, rank.num_gpus) == (0, 0.0)
    weights = 2 * config.model.shape.num_parameters / GIB
    assert reference.memory.host["weights"] == reference.memory.device["weights"] == pytest.approx(weights)
    training = rank.memory.device_gib + engine.memory.device["base"] + reference.memory.device["base"]
    training += engine.memory.device["published"] * (weight_route(config) in DEVICE_BUFFER_ROUTES)
    generating = resident_gib(config, rank.memory) + engine.memory.device_gib + reference.memory.device_gib
    assert device_load_gib(config, placements)["gpu"] == pytest.approx(max(training, generating))


def test_the_cache_of_a_colocated_engine_leaves_room_for_a_reference_on_its_gpu():
    vllm = "rollout/engine=vllm"
    alone, shared = compose_config([*TURNS[:1], vllm]), compose_config([*TURNS, vllm, "reference.offload=true"])
    pool = shared.cluster.pools["gpu"]
    reference = frozen_memory(shared, pool).device_gib
    assert kv_cache_gib(alone, pool) - kv_cache_gib(shared, pool) == pytest.approx(reference)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=arithmetic", "algorithm.kl.coefficient=0.01"], "the pool cpu has no GPUs"),
        (["experiment=arithmetic"], "this run starts no process for a reference"),
        (
            ["experiment=math_qwen_8gpu", "algorithm.kl.coefficient=0.01", "cluster.pools.train.count=5"],
            "has a GPU of the pool train to itself",
        ),
    ],
)
def test_offload_of_a_policy_that_shares_no_gpu_with_the_trainer_says_that_it_has_no_effect(overrides, words):
    (found,) = check_offload(compose_config([*overrides, "reference.offload=true"]))
    assert words in found.message
    assert found.message.startswith("reference.offload=true has no effect")


def test_ranks_that_do_not_load_in_partitions_need_main_memory_for_the_whole_model():
    # By hand: 2 bytes for each of 7.616e9 parameters.
    whole = compose_config(["experiment=math_qwen_8gpu", "trainer.zero_stage=2", "cluster.pools.train.memory_gib=200"])
    assert trainer_memory(whole, whole.cluster.pools["train"]).host["weights"] == pytest.approx(14.19, rel=1e-3)
    parts = compose_config(["experiment=math_qwen_8gpu"])
    assert trainer_memory(parts, parts.cluster.pools["train"]).host["weights"] == 0.0


def test_the_step_of_zero_0_in_bfloat16_takes_8_bytes_a_parameter_for_a_moment():
    # By hand: float32 copies of the gradients 4, roots of second moments 4; more than the activations of few tokens.
    config = compose_config(
        ["experiment=gsm8k_qwen_1gpu", "trainer.zero_stage=0", "trainer.max_tokens_per_micro_batch=1600"]
    )
    parts = trainer_memory(config, config.cluster.pools["gpu"]).device
    assert parts["activations"] == pytest.approx(8 * config.model.shape.num_parameters / GIB)
    assert parts["gradients"] == pytest.approx(2 * config.model.shape.num_parameters / GIB)


def test_checkpointing_saves_activations():
    plain = compose_config(
        ["experiment=gsm8k_qwen_1gpu", "trainer.gradient_checkpointing=false", "cluster.pools.gpu.memory_gib=80"]
    )
    saved = compose_config(["experiment=gsm8k_qwen_1gpu"])
    pool = saved.cluster.pools["gpu"]
    assert trainer_memory(saved, pool).device["activations"] < trainer_memory(plain, pool).device["activations"] / 3


def test_an_engine_takes_the_stated_share_of_its_device():
    config = compose_config(["experiment=math_qwen_8gpu"])
    pool = config.cluster.pools["generate"]
    assert engine_memory(config, pool).device_gib == pytest.approx(0.85 * 80)


def test_a_step_of_an_engine_has_the_tokens_that_its_own_arguments_say():
    def activations(*overrides):
        config = compose_config(["experiment=math_qwen_8gpu", *overrides])
        return engine_memory(config, config.cluster.pools["generate"]).device["activations"]

    own = "rollout.engine.args.max_num_batched_tokens"
    assert activations(f"+{own}=8192") == activations()
    assert activations(f"+{own}=32768") > activations() > activations(f"+{own}=2048")


def test_the_torch_engines_cache_is_bounded_by_its_slots():
    config = compose_config(["experiment=arithmetic", "rollout/engine=torch"])
    # By hand: 256 slots x 128 tokens x 4 layers x 2 (key and value) x 2 heads x 32 x 4 bytes.
    assert kv_cache_gib(config, config.cluster.pools["cpu"]) == pytest.approx(256 * 128 * 4 * 2 * 2 * 32 * 4 / GIB)


def turns(*overrides):
    """The fullest GPU, and by itself the trainer and the engine on it."""
    config = compose_config(["experiment=gsm8k_qwen_1gpu", "cluster.pools.gpu.memory_gib=80", *overrides])
    placements = plan_placement(config)
    (load,) = device_load_gib(config, placements).values()
    trainer, engine = (next(p.memory for p in placements if p.role == role) for role in ("trainer", "engine"))
    return load, trainer, engine


@pytest.mark.parametrize(
    ("stage", "dtype", "keeps"),
    [
        (0, "bfloat16", False),
        (1, "bfloat16", True),
        (1, "float32", False),
        (2, "bfloat16", False),
        (3, "bfloat16", True),
        (3, "float32", True),
    ],
)
def test_while_the_engine_generates_the_trainer_keeps_its_optimizer_and_a_gradient_buffer_that_is_never_freed(
    stage, dtype, keeps
):
    load, trainer, engine = turns(f"trainer.zero_stage={stage}", f"model.dtype={dtype}")
    kept = ("base", "weights", "optimizer", "published", *(["gradients"] if keeps else []))
    assert trainer.device["gradients"] > 0.9
    assert load == pytest.approx(sum(trainer.device[part] for part in kept) + engine.device_gib)


def test_while_the_trainer_computes_an_engine_that_sleeps_keeps_its_context():
    load, trainer, engine = turns(*TRAINING_IS_LARGER, "weights.transport=shared_memory")
    assert load == pytest.approx(trainer.device_gib + engine.device["base"])


@pytest.mark.parametrize("size", [24, 80])
def test_a_colocated_engine_takes_for_its_cache_what_the_trainer_leaves(size):
    overrides = ["experiment=gsm8k_qwen_1gpu", f"cluster.pools.gpu.memory_gib={size}"]
    config = compose_config(overrides)
    assert device_load_gib(config, plan_placement(config))["gpu"] == pytest.approx(0.85 * size)
    stated = engine_spec(config, 0).engine
    assert stated.kv_cache_gib == kv_cache_gib(config, config.cluster.pools["gpu"]) > 5
    apart = engine_spec(compose_config(["experiment=math_qwen_8gpu"]), 0).engine
    assert apart.kv_cache_gib is None, "vLLM measures what is left of a device of its own"


def test_the_weights_of_an_engine_that_sleeps_take_pinned_memory_in_powers_of_two():
    *_, engine = turns()
    config = compose_config(["experiment=gsm8k_qwen_1gpu"])
    assert engine.host["weights"] == pytest.approx(2 * published_gib(config))


@pytest.mark.parametrize(
    ("experiment", "overrides", "way"),
    [
        ("math_qwen_8gpu", [], "cuda_ipc"),
        ("math_qwen_8gpu", ["cluster.address=auto"], "engine_devices"),
        ("math_qwen_8gpu", ["cluster.address=auto", "weights.staging=bucket"], "live_parameters"),
        ("math_qwen_8gpu", ["weights.staging=bucket"], "shared_memory"),
        ("math_qwen_8gpu", ["weights.staging=bucket", "weights.transport=process_group"], "live_parameters"),
        ("math_qwen_8gpu", ["weights.transport=shared_memory"], "shared_memory"),
        ("math_qwen_8gpu", ["weights.transport=process_group"], "engine_devices"),
        ("math_qwen_8gpu", ["weights=gather"], "gather"),
        ("math_qwen_8gpu", ["cluster.address=auto", "weights=gather"], "gather"),
        ("math_qwen_8gpu", ENGINES_ON_CPU, "shared_memory"),
        ("math_qwen_8gpu", [*ENGINES_ON_CPU, "cluster.address=auto"], "node_receivers"),
        ("gsm8k_qwen_1gpu", [], "cuda_ipc"),
        ("gsm8k_qwen_1gpu", ["weights.transport=process_group"], "node_receivers"),
        ("gsm8k_qwen_1gpu", ["weights.transport=process_group", "weights.staging=bucket"], "node_receivers"),
        ("arithmetic", [], "shared_memory"),
        ("arithmetic", ["weights.transport=cuda_ipc"], "cuda_ipc"),
        ("arithmetic", ["cluster.address=auto"], "node_receivers"),
        ("arithmetic", ["weights.transport=process_group"], "node_receivers"),
        ("arithmetic", ["weights.transport=process_group", "weights.staging=bucket"], "live_parameters"),
        ("arithmetic", ["trainer=lora"], "adapters"),
        ("arithmetic", ["trainer=lora", "cluster.address=auto"], "adapters"),
        ("arithmetic", ["trainer=lora", "weights.staging=bucket"], "adapters"),
        ("arithmetic", ["trainer=lora", "weights=gather"], "gather"),
        ("arithmetic", ["trainer=lora", "weights.transport=shared_memory"], "shared_memory"),
    ],
)
def test_there_is_one_way_per_situation(experiment, overrides, way):
    """Two processes of one GPU are in no NCCL group, so colocated ones take weight receivers; the rest is the table of
    ADR.
    """
    assert weight_route(compose_config([f"experiment={experiment}", *overrides])) == way


def test_nodes_that_ray_has_chosen_decide_before_the_address_does():
    config = compose_config(["experiment=math_qwen_8gpu", "cluster.address=auto"])
    assert weight_route(config, is_one_node=True) == "cuda_ipc"
    assert weight_route(compose_config(["experiment=math_qwen_8gpu"]), is_one_node=False) == "engine_devices"


def test_a_slot_stays_on_the_gpu_while_the_engine_sleeps():
    loads = {
        transport: device_load_gib(config, plan_placement(config))["gpu"]
        for transport in ("shared_memory", "cuda_ipc")
        for config in [
            compose_config(["experiment=gsm8k_qwen_1gpu", *TRAINING_IS_LARGER, f"weights.transport={transport}"])
        ]
    }
    config = compose_config(["experiment=gsm8k_qwen_1gpu"])
    assert loads["cuda_ipc"] - loads["shared_memory"] == pytest.approx(published_gib(config))
    host = compose_config(["experiment=gsm8k_qwen_1gpu", "weights.transport=shared_memory"])
    assert (shared_gib(config), shared_gib(host)) == (0, pytest.approx(2 * published_gib(config)))


def test_staging_one_bucket_takes_half_of_the_shared_memory_and_hardly_any_of_the_gpus():
    both = {
        staging: compose_config(
            ["experiment=math_qwen_8gpu", "weights.transport=shared_memory", f"weights.staging={staging}"]
        )
        for staging in ("shard", "bucket")
    }
    assert shared_gib(both["bucket"]) == pytest.approx(shared_gib(both["shard"]) / 2)
    staged = {staging: staged_gib(config) for staging, config in both.items()}
    assert staged == {"shard": pytest.approx(published_gib(both["shard"])), "bucket": 1 / 16}


def test_main_memory_counts_every_process():
    config = compose_config(["experiment=arithmetic"])
    placements = plan_placement(config)
    assert host_load_gib(placements) == pytest.approx(sum(p.memory.host_gib for p in placements))
    assert 3 < host_load_gib(placements) < 12
