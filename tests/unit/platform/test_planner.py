"""The planner: as good as trying everything, never over memory, and better than halves."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.cluster import check_device_counts, check_kv_cache, check_memory
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config
from penstock.platform.cli import plan
from penstock.platform.cli.plan import NUM_PLANS, best_plans, calibrated, run_plan
from penstock.platform.cluster.costs import Scales, Workload, predict
from penstock.platform.cluster.memory import trainer_memory
from penstock.platform.cluster.planner import Candidate, Plan, Split, search
from penstock.platform.config.findings import error
from penstock.platform.config.schema import RunConfig
from penstock.trainer.validation import trainer_violations
from penstock.weights.model_config import ModelShape
from tests.tiers import by_tier

GPUS = {"H100": 80, "H200": 141, "A100": 40, "L40S": 48}
SHAPES = {  # hidden, intermediate, layers, heads, key/value heads: about 0.5, 1.5, 3, 7 and 14 billion parameters
    "0.5": (896, 4864, 24, 14, 2),
    "1.5": (1536, 8960, 28, 12, 2),
    "3": (2048, 11008, 36, 16, 2),
    "7": (3584, 18944, 28, 28, 4),
    "14": (5120, 13824, 48, 40, 8),
}
BASE = compose_config(["experiment=math_qwen_8gpu"])


def shape_of(name: str) -> ModelShape:
    hidden, intermediate, layers, heads, kv_heads = SHAPES[name]
    return ModelShape(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=128 if hidden > 1000 else 64,
    )  # fmt: skip


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """With other values in some sections."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    )


def instance(seed: int, num_devices: int, shape: str | None = None) -> RunConfig:
    """A random run on so many equal devices."""
    rng = random.Random(seed)
    gpu = rng.choice(list(GPUS))
    pool = BASE.cluster.pools["train"].model_copy(update={"memory_gib": GPUS[gpu], "accelerator_type": gpu})
    of_trainer = rng.randint(1, num_devices - 1)
    counts = {"train": of_trainer, "generate": num_devices - of_trainer}
    answer = rng.choice([512, 1024, 4096, 8192])
    return changed(
        BASE,
        model={"shape": shape_of(shape or rng.choice(list(SHAPES))), "max_context_tokens": answer + 512},
        rollout={
            "sampling": BASE.rollout.sampling.model_copy(update={"max_new_tokens": answer}),
            "engine": BASE.rollout.engine.model_copy(update={"max_num_seqs": rng.choice([32, 128, 256])}),
        },
        dataflow={
            "batch_groups": rng.choice([12, 24, 48, 96]),
            "group_size": rng.choice([4, 8, 16]),
            "max_staleness": rng.choice([0, 1, 2, 4]),
        },
        trainer={"gradient_checkpointing": rng.random() < 0.7},
        weights={"transport": rng.choice(["auto", "shared_memory", "process_group"]), "overlap": rng.random() < 0.3},
        cluster={
            "pools": {name: pool.model_copy(update={"count": count}) for name, count in counts.items()},
            "address": rng.choice(["local", "auto"]),
        },
    )


def first(found: Any) -> Candidate | None:
    return next(found.fitting(), None)


WORKLOADS: dict[str, dict[str, Any]] = {
    "short": {"answer": 1024, "groups": 96, "staleness": 4, "transport": "auto", "address": "local"},
    "long": {"answer": 8192, "groups": 24, "staleness": 1, "transport": "process_group", "address": "auto"},
    "synchronous": {"answer": 4096, "groups": 48, "staleness": 0, "transport": "shared_memory", "address": "local"},
}
LAYOUTS = {"equal": WORKLOADS, "one": WORKLOADS, "colocated": WORKLOADS, "unequal": ["short"]}
"""How devices are divided -> names of the workloads that it is tried with.

Two pools of equal GPUs, between which they are moved; one pool for both; one pool used in turns; and pools of two types
of GPU.
"""


class Instance(NamedTuple):
    layout: str
    of_trainer: int
    of_engines: int
    gpus: tuple[str, str]
    shape: str
    per_node: int
    workload: str

    @property
    def config(self) -> RunConfig:
        has_two, has_turns = self.layout in ("equal", "unequal"), self.layout == "colocated"
        counts = [self.of_trainer, self.of_engines] if has_two else [self.of_trainer + self.of_engines]
        names = ["train", "generate"] if has_two else ["gpu"]
        pools = {
            name: BASE.cluster.pools["train"].model_copy(
                update={
                    "count": count,
                    "accelerator_type": gpu,
                    "memory_gib": GPUS[gpu],
                    "devices_per_node": self.per_node,
                }
            )
            for name, count, gpu in zip(names, counts, self.gpus, strict=False)
        }
        work = WORKLOADS[self.workload]
        return changed(
            BASE,
            model={"shape": shape_of(self.shape), "max_context_tokens": work["answer"] + 512},
            rollout={"sampling": BASE.rollout.sampling.model_copy(update={"max_new_tokens": work["answer"]})},
            dataflow={
                "batch_groups": work["groups"],
                "group_size": 8,
                "max_staleness": 0 if has_turns else work["staleness"],
                "stream_micro_batches": not has_turns,
            },
            trainer={"gradient_checkpointing": work["answer"] != 4096},
            weights={"transport": work["transport"]},
            cluster={
                "pools": pools,
                "trainer_pool": names[0],
                "rollout_pool": names[-1],
                "colocated": has_turns,
                "address": work["address"],
            },
        )


def instances(layout: str, num_devices: int) -> Iterator[Instance]:
    """All of so many devices: every division that is not moved, node, GPU, shape, and workload of the layout."""
    is_unequal = layout == "unequal"
    divisions = range(1, num_devices) if is_unequal else [num_devices // 2]
    gpus = itertools.permutations(GPUS, 2) if is_unequal else ((gpu, gpu) for gpu in GPUS)
    for of_trainer, pair, shape, workload in itertools.product(divisions, gpus, SHAPES, LAYOUTS[layout]):
        largest = max(of_trainer, num_devices - of_trainer) if is_unequal else num_devices
        for per_node in (1, 2, 4, 8):
            if per_node < 2 * largest:  # a larger node holds no more
                yield Instance(layout, of_trainer, num_devices - of_trainer, pair, shape, per_node, workload)


SIZES = [octave * part for octave in (1, 2, 4, 8, 16, 32) for part in (1, 1.5)]
"""Micro-batches that are tried, in longest sequences; another grid than the planner's."""


def tried(config: RunConfig, workload: Workload) -> float:
    """The fastest step of all settings that `penstock train` would start, without the planner; inf if there is none.

    Each setting is predicted and checked as a whole. Only ranks that alone exceed their memory are left out before.
    """
    cluster, context = config.cluster, config.model.max_context_tokens
    pool, of_engines = cluster.pools[cluster.trainer_pool], cluster.pools[cluster.rollout_pool]
    is_one = cluster.trainer_pool == cluster.rollout_pool
    is_moved = not is_one and pool.accelerator_type == of_engines.accelerator_type
    timed: list[tuple[float, int, RunConfig]] = []
    for ranks in range(1, pool.count + of_engines.count if is_moved else pool.count + 1):
        devices, pools = of_engines.count - ranks * (is_one and not cluster.colocated), cluster.pools
        if is_moved:
            devices = pool.count + of_engines.count - ranks
            counts = {cluster.trainer_pool: ranks, cluster.rollout_pool: devices}
            pools = {name: pool.model_copy(update={"count": count}) for name, count in counts.items()}
        moved = changed(config, cluster={"pools": pools})
        rollouts = [
            changed(moved, rollout={"num_engines": engines, "engine": engine}).rollout
            for tp in range(1, devices + 1)
            for engine in [config.rollout.engine.model_copy(update={"tensor_parallel_size": tp})]
            for engines in range(1, devices // tp + 1)
            if not config.model.shape.uneven_sizes(tp)
        ]
        for sp, stage, size in itertools.product(range(1, ranks + 1), range(4), SIZES):
            trainer = {
                "num_ranks": ranks,
                "sequence_parallel_size": sp,
                "zero_stage": stage,
                "max_tokens_per_micro_batch": int(size * -(-context // sp)),
            }
            trained = changed(moved, trainer=trainer)
            if (
                trainer_violations(trained.model, trained.trainer)
                or trainer_memory(trained, pool).device_gib > pool.memory_gib
            ):
                continue
            runs = [trained.model_copy(update={"rollout": rollout}) for rollout in rollouts]
            timed += [(predict(run, workload).step_s, len(timed) + index, run) for index, run in enumerate(runs)]
    starting = (step_s for step_s, _, run in sorted(timed) if not refusals(run))
    return next(starting, math.inf)


def refusals(run: RunConfig) -> list[str]:
    return [finding.message for finding in check_config(run, "train") if finding.severity == "error"]


def is_possible(run: RunConfig) -> bool:
    return not [
        *check_device_counts(run, "train"), *check_memory(run, "train"), *check_kv_cache(run)
    ]  # fmt: skip


def ratio_to_all(config: RunConfig) -> float:
    """Step of the first plan of `penstock plan` ÷ the fastest of all; 1 if no setting fits, inf if only it has none."""
    workload = Workload.assumed(config)
    found, best = next(best_plans(search(config, workload, Scales()), Counter()), None), tried(config, workload)
    if found is None:
        return 1.0 if best == math.inf else math.inf
    assert found.predicted == predict(found.plan.applied(config), workload), "a plan is predicted like any run"
    return found.predicted.step_s / best


@pytest.mark.some(2)
@pytest.mark.parametrize("num_devices", range(2, 9))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_plan_is_within_5_percent_of_trying_everything(layout: str, num_devices: int) -> None:
    """Of all instances of at most 8 devices; in the everyday tier every 251st (docs/guides/plan.md)."""
    every = list(instances(layout, num_devices))
    ratios = {instance: ratio_to_all(instance.config) for instance in every[:: by_tier(251, 1)]}
    worst = max(ratios, key=lambda instance: ratios[instance])
    assert ratios[worst] <= 1.05, f"{worst}, of {len(ratios)}: {Counter(ratio > 1.05 for ratio in ratios.values())}"


def test_devices_of_equal_pools_are_moved_so_their_given_division_changes_no_plan() -> None:
    runs = [Instance("equal", count, 8 - count, ("A100", "A100"), "7", 8, "short").config for count in range(1, 8)]
    assert len({first(search(run, Workload.assumed(run), Scales())) for run in runs}) == 1


@pytest.mark.parametrize("seed", range(by_tier(4, 60)))
def test_the_best_plan_of_a_random_run_is_within_5_percent_of_trying_everything(seed: int) -> None:
    assert ratio_to_all(instance(seed, random.Random(-seed).randint(2, by_tier(5, 8)))) <= 1.05


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(by_tier(8, 40)))
def test_no_plan_is_over_the_memory_of_its_devices_or_refused_by_the_checks(seed: int) -> None:
    config = instance(100 + seed, random.Random(seed).randint(2, 16))
    found = search(config, Workload.assumed(config), Scales())
    candidates = list(itertools.islice(found.fitting(), 20))
    for candidate in candidates:
        assert is_possible(candidate.plan.applied(config)), candidate
    steps = [candidate.predicted.step_s for candidate in candidates]
    assert steps == sorted(steps)
    assert candidates or found.too_large


@pytest.mark.full
def test_plans_of_20_workloads_are_at_least_15_percent_faster_than_the_best_with_equal_halves() -> None:
    """In the seconds of the cost model; both have the best settings of their split."""
    gains: list[float] = []
    for seed in itertools.count():
        rng = random.Random(seed)
        devices = rng.choice([8, 16, 32])
        config = instance(1000 + seed, devices, rng.choice(["0.5", "1.5", "3", "7"]))
        workload = Workload.assumed(config)
        halves = first(search(config, workload, Scales(), [Split(devices // 2, devices // 2)]))
        if halves is None:  # half of the devices cannot divide the batch, or cannot hold the model
            continue
        best = first(search(config, workload, Scales()))
        assert best is not None
        gains.append(halves.predicted.step_s / best.predicted.step_s)
        if len(gains) == 20:
            break
    assert min(gains) >= 1
    assert math.prod(gains) ** (1 / len(gains)) >= 1.15, gains


H100 = [
    "experiment=math_qwen_8gpu",
    "cluster.pools.train.accelerator_type=H100",
    "cluster.pools.generate.accelerator_type=H100",
]


def planned(*overrides: str, **options: Any) -> int:
    settings = {"config_dir": None, "calibrate": None, "answer_tokens": None, "as_json": False}
    return run_plan([*H100, *overrides], **(settings | options))


def test_the_overrides_of_a_plan_are_a_configuration_with_this_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(as_json=True, answer_tokens=700) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workload"]["answer_tokens"] == 700
    assert 1 < len(told["plans"]) <= NUM_PLANS
    for one in told["plans"]:
        config = compose_config([*H100, *one["overrides"]])
        assert Plan.of(config) == Plan(**one["plan"])
        assert sum(pool.count for pool in config.cluster.pools.values()) == 8, "devices are moved, not made"
        assert predict(config, Workload(**told["workload"])).step_s == pytest.approx(one["predicted"]["step_s"])
    assert len({(one["plan"]["num_ranks"], one["plan"]["tensor_parallel_size"]) for one in told["plans"]}) == len(
        told["plans"]
    )


def test_a_default_that_does_not_fit_gives_way_as_in_train_unless_it_is_searched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert planned("rollout.sampling.max_new_tokens=9000") == 0
    told = capsys.readouterr().out
    assert told.startswith("warning model.max_context_tokens=18000, not the default 5120: it holds a prompt and ")
    assert "prompts of 4500 and answers of 4500 tokens" in told
    assert planned("rollout.sampling.max_new_tokens=9000", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["derived"][0].startswith("model.max_context_tokens=18000")
    # A micro-batch of 2,048 tokens would shorten the context of a run, but the planner takes another one.
    assert planned("trainer.max_tokens_per_micro_batch=2048", as_json=True) == 0
    assert not json.loads(capsys.readouterr().out)["derived"]


@pytest.mark.parametrize("tokens", [-5, 0, 4096.5, math.nan, math.inf])
def test_mean_lengths_that_no_answers_have_are_refused_with_both_numbers(tokens: float) -> None:
    said = f"--answer-tokens {tokens:g} is not in (0, 4096]: answers have at most rollout.sampling.max_new_tokens=4096"
    with pytest.raises(ConfigError, match=re.escape(said)):
        planned(answer_tokens=tokens)


def test_no_mean_length_is_half_of_the_longest_and_0_is_none() -> None:
    assert Workload.assumed(BASE).answer_tokens == 2048
    assert Workload.assumed(BASE, 0).answer_tokens == 0


def test_json_has_all_that_the_table_and_the_lines_below_it_say(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["weights.update_mode=multi_version", "trainer.max_tokens_per_micro_batch=200000"]
    assert planned(*typed) == 0
    said = capsys.readouterr().out
    assert planned(*typed, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    given = told["given"]
    assert f"over memory by {given['over_memory_gib']:.1f} GiB" in said
    assert re.search(rf"given │ {given['predicted']['step_s']:.3g} +│", said)
    assert given["plan"] == {
        "num_ranks": 4, "sequence_parallel_size": 1, "zero_stage": 3, "max_tokens_per_micro_batch": 200_000,
        "num_engines": 4, "tensor_parallel_size": 1, "sharding": None,
    }  # fmt: skip
    assert told["slower"]
    for one in told["slower"]:
        waits = {"trainer": "engines wait for the trainer", "engines": "the trainer waits for engines"}[one["bound"]]
        seconds = f"{one['fastest']['predicted']['step_s']:.3g}"
        assert f"{one['count']} slower plans in which {waits}: from {seconds} s (" in said
    lacks = told["over_memory"]
    nearest = f"{lacks['nearest']['what']}, by {lacks['nearest']['excess_gib']:.1f} GiB"
    assert f"{lacks['count']} settings over memory: the nearest, {nearest}" in said
    assert told["refused"]
    for message, count in told["refused"].items():
        assert f"{count} plans refused: {message}" in said


def test_the_table_says_why_the_others_lose_and_that_costs_are_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned() == 0
    told = capsys.readouterr().out
    assert "Costs are assumed from data sheets" in told
    assert "given" in told
    assert re.search(r"slower plans in which engines wait for the trainer: from [\d.]+ s \(.*% idle\)", told)
    assert re.search(r"settings over memory: the nearest, .*, by \d+\.\d GiB", told)


def test_without_memory_there_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("cluster.pools.train.memory_gib=8", "cluster.pools.generate.memory_gib=8") == 1
    told = capsys.readouterr().out
    assert "No plan fits." in told
    assert re.search(r"given .* over memory by \d+\.\d GiB", told)


def test_a_plan_that_the_checks_refuse_is_not_shown() -> None:
    config = compose_config([*H100, "weights.update_mode=multi_version"])
    refused: Counter[str] = Counter()
    best = list(best_plans(search(config, Workload.assumed(config), Scales()), refused))
    assert best
    assert all(one.plan.num_engines >= 2 for one in best)
    assert any("multi_version" in message for message in refused)


def test_what_the_checks_say_is_printed_with_its_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "check_config", lambda *_: [error("rollout.sampling.stop=[end] is refused.")])
    assert planned() == 1
    assert "plans refused: rollout.sampling.stop=[end] is refused.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed", ["cluster.pools.train.accelerator_type=null", "cluster.pools.train.accelerator_type=X1"]
)
def test_accelerators_that_are_not_known_are_named_with_those_that_are(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.pools\.train\.accelerator_type=(None|X1).* knows B200, H200"):
        planned(typed)


def test_pools_of_unequal_devices_keep_theirs() -> None:
    config = compose_config([*H100, "cluster.pools.generate.accelerator_type=A100"])
    for candidate in itertools.islice(search(config, Workload.assumed(config), Scales()).fitting(), 10):
        assert candidate.plan.num_ranks <= 4
        assert candidate.plan.applied(config).cluster.pools == config.cluster.pools


def test_engines_never_cross_nodes_and_extra_pools_speed_generation_up() -> None:
    nodes = [f"cluster.pools.{name}.devices_per_node=2" for name in ("train", "generate")]
    config = compose_config([*H100, *nodes])
    found = search(config, Workload.assumed(config), Scales())
    assert {one.plan.tensor_parallel_size for one in found.candidates} == {1, 2}
    extra = [
        "+cluster.pools.a100={device: gpu, count: 4, memory_gib: 80, accelerator_type: A100}",
        "cluster.extra_rollout_pools={a100: {num_engines: 4}}",
    ]
    more, workload = compose_config([*H100, *extra]), Workload.assumed(config)
    plain = compose_config(H100)
    assert predict(more, workload).generate_s < predict(plain, workload).generate_s


def test_a_calibrated_model_predicts_the_run_that_it_was_scaled_to(tmp_path: Path) -> None:
    config = compose_config(H100)
    measured = {
        "throughput/step_s": 80.0,
        "trainer/step_s": 75.0,
        "idle/engine_share": 0.4,
        "weights/publish_s": 5.0,
        "length/mean_tokens": 900.0,
    }
    lines = [json.dumps({"step": step, "time_s": 0.0, "metrics": measured}) for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    found = calibrated(tmp_path, config)
    assert found.workload.answer_tokens == 900
    assert found.predicted_step_s == pytest.approx(found.measured_step_s)
    predicted = predict(config, found.workload, found.scales)
    assert (predicted.train_s, predicted.generate_s, predicted.publish_s) == pytest.approx((75.0, 48.0, 5.0))


def test_roles_that_take_turns_share_the_memory_of_their_devices() -> None:
    config = compose_config(
        ["experiment=gsm8k_qwen_1gpu", "cluster.pools.gpu.count=2", "cluster.pools.gpu.accelerator_type=H100"]
    )
    gpu = config.cluster.pools["gpu"].model_copy(update={"memory_gib": 13})
    config = changed(config, cluster={"pools": {"gpu": gpu}})
    found = search(config, Workload.assumed(config), Scales())
    best = list(found.fitting())
    assert best == found.candidates, "ranks and engines were checked together"
    assert all(not list(check_memory(one.plan.applied(config), "train")) for one in best)
    assert found.too_large
    assert {one.predicted.bound for one in best} == {"both"}
