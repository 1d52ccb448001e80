"""A default that does not fit gives way to a value that does, with one line; only what somebody has set is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.platform.checks import model_files, tasks
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config, load_config
from penstock.platform.checks.model_probe import Answer
from penstock.platform.checks.tasks import TaskSample, check_room
from penstock.platform.cluster import hardware
from penstock.platform.config.compose import Composition, compose_all, to_yaml
from penstock.platform.config.findings import Fit, error
from penstock.platform.run import saved_config
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization import tokenizers
from penstock.rollout.tokenization.tokenizers import TokenCodec, byte_tokenizer
from tests.model_folder import write_model

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Transformers and vLLM support every model; the tokenizer of every model is that of bytes; the disk is large."""
    monkeypatch.chdir(tmp_path)
    codec = TokenCodec(byte_tokenizer(), ())
    monkeypatch.setattr(model_files, "ask", lambda _question: Answer([]))
    monkeypatch.setattr(tokenizers, "load_codec", lambda *_args, **_kwargs: codec)
    monkeypatch.setattr(tasks, "check_first_calls", lambda *_args: ())
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda _path: 1024 * GIB)
    return monkeypatch


def text(folder: Path, num_rows: int = 40, prompt: int = 8, **fields: object) -> list[str]:
    """`experiment=text` with a model of these fields, on so many rows with prompts of so many bytes."""
    fields = {"max_position_embeddings": 2048, "vocab_size": 259, **fields}
    model = write_model(folder / "model", **fields)
    rows = [{"prompt": f"{index}=".ljust(prompt, "x"), "answer": "1"} for index in range(num_rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["env=dataset", "env.args.path=rows.jsonl", "reward=exact_match"]
    return ["experiment=text", f"model.path={model}", *own]


def derived(overrides: list[str], **options) -> list[str]:
    """The lines about defaults that gave way."""
    return [line for line in load_config("train", overrides, **options).warnings if ", not the default " in line]


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config("train", overrides)
    (violation,) = raised.value.violations
    return violation


PAIRS = [
    (["trainer.num_ranks=3"], "dataflow.batch_groups", 33, 32),
    (["algorithm.mini_batches=3", "algorithm.proximal=recompute"], "dataflow.batch_groups", 33, 32),
    (["trainer.max_tokens_per_micro_batch=100"], "model.max_context_tokens", 100, 128),
    (["model.max_context_tokens=4000"], "trainer.max_tokens_per_micro_batch", 4000, 2048),
    (["model.max_context_tokens=40"], "rollout.sampling.max_new_tokens", 20, 64),
    (["rollout.sampling.max_new_tokens=200"], "model.max_context_tokens", 400, 128),
    (["cluster.colocated=true"], "dataflow.max_staleness", 0, 1),
    (["evaluation.answers_per_task=4"], "evaluation.temperature", 1.0, 0.0),
    (["dataflow.min_group_size=9"], "dataflow.group_size", 9, 8),
]


@pytest.mark.parametrize(("typed", "key", "value", "default"), PAIRS)
def test_a_default_gives_way_to_what_was_set_and_is_refused_if_it_was_set_too(typed, key, value, default):
    composition = compose_all(["experiment=arithmetic", *typed])
    findings = composition.settle(lambda config: check_config(config, "train"))
    assert [one for one in findings if one.severity == "error"] == []
    found: object = composition.config.model_dump(mode="json")
    for name in key.split("."):
        found = found[name]
    assert found == value
    (line,) = composition.derived.values()
    assert line.startswith(f"{key}={json.dumps(value)}, not the default {json.dumps(default)}: ")
    with pytest.raises(ConfigError):
        compose_config(["experiment=arithmetic", *typed, f"{key}={default}"])


def test_keep_best_turns_on_the_evaluations_that_an_experiment_has_off():
    config = compose_config(["experiment=text", "evaluation.keep_best=true", "model.path=x/policy"])
    assert config.evaluation.every_steps == 2, "a quarter of its ten steps"


def test_two_checks_that_each_want_what_the_other_refuses_end_in_the_refusal():
    composition = compose_all(["experiment=arithmetic"])

    def check(config):
        seed = config.seed
        yield error(f"seed={seed} is odd or even", fits=[Fit("seed", 1 - seed, "it is the other")])

    (finding,) = composition.settle(check)
    assert finding.message.startswith("seed=")


def test_the_context_of_a_model_takes_the_place_of_a_longer_default_in_every_output(tmp_path):
    overrides = text(tmp_path, max_position_embeddings=512)
    assert derived(overrides) == [
        "model.max_context_tokens=512, not the default 1024: the checkpoint has no more positions.",
        "evaluation.num_tasks=3, not the default 8: there are no more held-out tasks.",
    ]
    config = load_config("train", overrides).config
    assert "max_context_tokens: 512" in to_yaml(config)
    assert "max_position_embeddings=512" in refusal([*overrides, "model.max_context_tokens=1024"])
    assert "there are only 3 held-out tasks" in refusal([*overrides, "evaluation.num_tasks=8"])


@pytest.mark.parametrize(("kind", "context"), [("linear", 400), ("dynamic", 400), ("yarn", 100), ("llama3", 100)])
def test_a_default_context_ends_where_scaled_rope_ends(tmp_path, kind, context):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 25}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    overrides = text(tmp_path, max_position_embeddings=100, rope_parameters=rope)
    assert load_config("train", overrides).config.model.max_context_tokens == context


def test_a_default_context_is_as_long_as_the_prompts_need_and_no_longer_than_the_model(tmp_path):
    overrides = text(tmp_path, prompt=1500)
    config = load_config("train", overrides).config
    assert 1500 + 32 <= config.model.max_context_tokens <= 1600
    assert "model.max_context_tokens=1024" in refusal([*overrides, "model.max_context_tokens=1024"])
    config = load_config("train", text(tmp_path, prompt=1500, max_position_embeddings=1520)).config
    assert config.model.max_context_tokens == 1520
    assert 1 <= config.rollout.sampling.max_new_tokens < 32, "what the prompts leave"
    found = refusal(text(tmp_path, prompt=1500, max_position_embeddings=512))
    assert "the model has 512 positions" in found
    assert "max_context_tokens" not in found


def test_a_few_long_prompts_do_not_decide_how_long_a_default_context_is(tmp_path):
    overrides = text(tmp_path)
    drawn = [Task(str(length), "x" * length) for length in (*[8] * 21, *[1500] * 19)]
    assert list(check_room(load_config("train", overrides).config, TaskSample(drawn, []))) == []


def test_linear_layers_of_the_model_are_the_default_targets_of_adapters(tmp_path):
    overrides = [*text(tmp_path, model_type="phi3", architectures=["Phi3ForCausalLM"], pad_token_id=0), "trainer=lora"]
    targets = load_config("train", overrides).config.trainer.lora.targets
    assert targets == ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")
    assert "q_proj names no linear layer" in refusal([*overrides, "trainer.lora.targets=[q_proj]"])


def test_a_run_may_take_the_memory_that_the_machine_has(tmp_path, machine):
    machine.setattr(hardware, "available_memory_bytes", lambda: 100 * GIB)
    machine.setattr(hardware, "total_memory_bytes", lambda: 128 * GIB)
    wide = {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 150_000, "intermediate_size": 8192}
    overrides = text(tmp_path, **wide)
    assert [line for line in derived(overrides) if "num_tasks" not in line] == []
    assert "cluster.pools.cpu.memory_gib=12, but 4 processes need" in refusal(
        [*overrides, "cluster.pools.cpu.memory_gib=12"]
    )


def test_a_default_micro_batch_shrinks_until_the_machine_holds_the_run_and_then_the_machine_is_too_small(
    tmp_path, machine
):
    wide = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    overrides = [*text(tmp_path, **wide), "checkpoint.every_minutes=0"]

    def at(gib: float) -> list[str]:
        machine.setattr(hardware, "total_memory_bytes", lambda: int(gib * GIB))
        machine.setattr(hardware, "available_memory_bytes", lambda: int(0.95 * gib * GIB))
        return overrides

    assert [line for line in derived(at(64)) if "num_tasks" not in line] == []
    (line,) = [line for line in derived(at(16)) if "num_tasks" not in line]
    assert line.startswith("trainer.max_tokens_per_micro_batch=1024, not the default 4096: the run fits into")
    found = refusal(at(6))
    assert found.startswith("memory: the run needs about")
    assert "trainer.max_tokens" not in found, "it is a default"
    assert "or change trainer.max_tokens_per_micro_batch" in refusal(
        [*at(6), "trainer.max_tokens_per_micro_batch=4096"]
    )


def test_published_versions_go_to_a_disk_if_the_shared_memory_of_a_container_is_too_small(tmp_path, machine):
    overrides = text(tmp_path, hidden_size=1024, num_hidden_layers=12, intermediate_size=4096)
    machine.setattr(hardware, "disk_bytes", lambda path: GIB // 16)
    machine.setattr(
        hardware, "free_disk_bytes", lambda path: GIB // 16 if path == hardware.SHARED_MEMORY else 500 * GIB
    )
    assert any(
        line.startswith("weights.directory=/tmp, not the default null: /dev/shm has 0.06")
        for line in derived(overrides)
    )
    machine.setattr(
        hardware, "free_disk_bytes", lambda path: GIB if path == hardware.SHARED_MEMORY.parent else GIB // 16
    )


def test_a_disk_without_room_keeps_one_checkpoint_and_a_smaller_one_is_refused(tmp_path, machine):
    overrides = text(tmp_path, hidden_size=1024, num_hidden_layers=12, intermediate_size=4096)
    state = 12 * load_config("train", overrides).config.model.shape.num_parameters / GIB
    machine.setattr(hardware, "free_disk_bytes", lambda path: int((2.5 * state + 1.5) * GIB))
    assert any(line.startswith("checkpoint.keep=1, not the default 2") for line in derived(overrides))
    machine.setattr(
        hardware, "free_disk_bytes", lambda path: int(0.5 * state * GIB) if "runs" in str(path) else 500 * GIB
    )
    found = refusal(overrides)
    assert found.startswith("disk: ")
    assert "checkpoint.keep" not in found


def test_pools_of_gpus_are_planned_with_the_memory_that_the_gpus_here_have(tmp_path, machine):
    machine.setattr(hardware, "gpu_memory_gib", lambda: 79.6)
    overrides = ["experiment=gsm8k_qwen_1gpu", *text(tmp_path)[1:]]
    loaded = load_config("train", overrides, dry_run=True)
    assert loaded.config.cluster.pools["gpu"].memory_gib == 79
    kept = load_config("train", [*overrides, "cluster.pools.gpu.memory_gib=24"], dry_run=True)
    assert kept.config.cluster.pools["gpu"].memory_gib == 24


def test_a_pool_of_gpus_needs_a_size():
    with pytest.raises(ConfigError, match="a pool of GPUs needs memory_gib"):
        compose_config(["experiment=arithmetic", "+cluster.pools.more={device: gpu, count: 1}"])


def test_a_key_in_a_file_of_the_users_is_set_also_in_one_that_it_builds_on(tmp_path):
    for name, lines in {
        "base": "model:\n  max_context_tokens: 1024\n",
        "mine": "defaults: [text, base]\ntotal_steps: 3\n",
    }.items():
        file = tmp_path / "own" / "experiment" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# @package _global_\n" + lines)
    (tmp_path / "own" / "env").mkdir()
    (tmp_path / "own" / "env" / "rows.yaml").write_text("factory: dataset\nargs: {path: rows.jsonl}\n")
    overrides = text(tmp_path, max_position_embeddings=512)
    own = ["experiment=mine", overrides[1], "env=rows", "reward=exact_match"]
    config = compose_config(own, config_dir=tmp_path / "own")
    assert {"model.max_context_tokens", "total_steps", "env.factory", "env.args.path", "model.path"} <= set(
        config.typed
    )
    assert not config.is_typed("evaluation.num_tasks")
    with pytest.raises(ConfigError, match="max_position_embeddings=512"):
        load_config("train", own, config_dir=tmp_path / "own")
    (tmp_path / "own" / "experiment" / "base.yaml").write_text("# @package _global_\nseed: 1\n")
    assert load_config("train", own, config_dir=tmp_path / "own").config.model.max_context_tokens == 512


def test_a_resumed_run_remembers_what_was_set_when_it_began(tmp_path):
    overrides = [*text(tmp_path, max_position_embeddings=512), "run_dir=run"]
    run_dir = prepare_run_dir(load_config("train", overrides).config)
    saved = saved_config.read_saved_config(run_dir)
    config = saved_config.changed_config(saved, ["total_steps=20"], run_dir)
    assert config.is_typed("model.path")
    assert config.is_typed("total_steps")
    assert not config.is_typed("model.max_context_tokens")
    composition = Composition(config, typed=list(config.typed), raw=config.model_dump(mode="json"))
    write_model(tmp_path / "model", max_position_embeddings=256, vocab_size=259)
    composition.settle(lambda one: model_files.check_contexts(one, "train"))
    assert composition.config.model.max_context_tokens == 256
    environment = json.loads((run_dir / "environment.json").read_text())
    del environment["typed"]  # of a version that did not write it
    (run_dir / "environment.json").write_text(json.dumps(environment))
    assert saved_config.changed_config(saved, [], run_dir).is_typed("model.max_context_tokens")


@pytest.mark.some(2)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 10, 20])
def test_small_sets_start_with_untouched_defaults(tmp_path, num_rows):
    config = load_config("train", text(tmp_path, num_rows)).config
    assert config.evaluation.num_tasks is not None
    assert config.evaluation.num_tasks < num_rows
    assert load_config("train", [*text(tmp_path, num_rows), "evaluation.num_tasks=0"]).config.evaluation.num_tasks == 0


def test_six_rows_without_held_out_ones_are_trained_without_evaluation_and_one_line_says_how_to_have_one(tmp_path):
    overrides = text(tmp_path, 3)
    (line,) = derived(overrides)
    assert line.startswith("evaluation.num_tasks=0, not the default 8: there are no held-out tasks")
    assert "env.args.held_out=train" in line
    assert "there are no held-out tasks. Use 0" in refusal([*overrides, "evaluation.num_tasks=2"])
    assert "there are no held-out tasks. Use 0" in refusal([*overrides, "evaluation.num_tasks=null"])
    on_rows = load_config("train", [*overrides, "env.args.held_out=train"]).config
    assert on_rows.evaluation.num_tasks == 3
    with pytest.raises(ConfigError, match="`penstock eval` only answers those"):
        load_config("eval", overrides)
    with pytest.raises(ConfigError, match="`penstock sample` only answers those"):
        load_config("sample", [*overrides, "sample.split=held_out"])
    assert load_config("sample", [*overrides, "sample.split=train"]).config.sample.num_tasks == 1024


@pytest.mark.parametrize(
    "typed", ["keep_best=true", "patience=2", "part=raw", "num_tasks_during_training=4", "every_steps=5"]
)
def test_what_needs_evaluations_is_refused_in_a_run_without_them(tmp_path, typed):
    found = refusal([*text(tmp_path), "evaluation.num_tasks=0", f"evaluation.{typed}"])
    assert "with evaluation.num_tasks=0, which is a run without evaluations" in found


SOURCE = """
from penstock.dataflow.task import Task

class Few:
    def __init__(self, seed, num_held_out=2):
        self.num_held_out = num_held_out

    def train(self):
        return iter([Task(f"t{n}", f"{n}=", {"answer": "1"}) for n in range(5)] * 2000)

    def held_out(self, num_tasks):
        if num_tasks > self.num_held_out >= 0:
            raise ValueError(f"there are {self.num_held_out}")
        return [Task(f"h{n}", f"{n}+", {"answer": "1"}) for n in range(max(0, self.num_held_out))][:num_tasks]

    def gold_response(self, task):
        return "1"
"""


@pytest.mark.parametrize(("found", "left"), [(3, 2), (1, 1), (0, 0), (-1, 0)])
@pytest.mark.parametrize(("command", "key"), [("train", "evaluation.num_tasks"), ("sft", "sft.eval_tasks")])
def test_a_task_source_with_few_held_out_tasks_is_asked_for_fewer(tmp_path, machine, command, key, found, left):
    machine.syspath_prepend(tmp_path)
    (tmp_path / "few_tasks.py").write_text(SOURCE)
    experiment = {"train": [*text(tmp_path)[:2], "reward=exact_match"], "sft": ["experiment=text_sft"]}[command]
    own = [*experiment, "env.factory=few_tasks:Few", f"env.args={{num_held_out: {found}}}"]
    config = load_config(command, own).config
    assert (config.evaluation.num_tasks if command == "train" else config.sft.eval_tasks) == left
    if found < 3:
        with pytest.raises(ConfigError, match=f"{key}=3|held_out.3. raised ValueError"):
            load_config(command, [*own, f"{key}=3"])


def test_groups_of_one_are_allowed_where_nothing_is_compared():
    for algorithm in (["algorithm=ppo"], ["algorithm=reinforce_pp", "algorithm/advantage=reinforce_pp"]):
        flow = compose_config(["experiment=arithmetic", *algorithm, "dataflow.group_size=1"]).dataflow
        assert (flow.group_size, flow.fewest_members) == (1, 1)
    config = compose_config(["experiment=arithmetic", "algorithm=reinforce_pp", "dataflow.group_size=1"])
    assert config.algorithm.advantage.type == "reinforce_pp", "without the baseline of its preset"
    assert compose_config(["experiment=arithmetic"]).dataflow.fewest_members == 2
    assert (
        compose_config(["experiment=arithmetic", "algorithm=ppo", "dataflow.min_group_size=1"]).dataflow.fewest_members
        == 1
    )


@pytest.mark.parametrize(
    "typed",
    [
        ["dataflow.group_size=1"],
        ["dataflow.min_group_size=1"],
        ["dataflow.group_size=1", "algorithm=reinforce_pp", "algorithm/advantage=reinforce_pp_baseline"],
        ["dataflow.group_size=1", "algorithm=online_dpo"],
        ["dataflow.group_size=1", "algorithm=ppo", "dataflow.filters.zero_variance=true"],
        ["dataflow.group_size=1", "algorithm=ppo", "dataflow.group_sizing=by_success"],
    ],
)
def test_groups_of_one_are_refused_where_answers_are_compared(typed):
    with pytest.raises(ConfigError, match=r"dataflow\.(min_)?group_size=1"):
        compose_config(["experiment=arithmetic", *typed])


def test_the_configuration_file_of_a_run_has_the_values_in_place_of_the_defaults(tmp_path):
    overrides = [*text(tmp_path, 3, max_position_embeddings=512), "run_dir=run"]
    written = yaml.safe_load((prepare_run_dir(load_config("train", overrides).config) / "config.yaml").read_text())
    assert written["model"]["max_context_tokens"] == 512
    assert written["evaluation"]["num_tasks"] == 0
