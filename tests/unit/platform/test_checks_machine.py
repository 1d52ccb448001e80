"""Checks against the machine and against what the user plugs in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import load_config
from penstock.platform.cluster import hardware

PLUGIN = """
from penstock.dataflow.trajectory import Task

not_callable = 3

def reward(trajectory, **fields):
    return 1.0

def needs_solution(trajectory, solution):
    return 1.0

class Source:
    def __init__(self, seed, leaks=False, prompt_chars=4, first=0, num_tasks=None, gives=None, answer_chars=None,
                 same_id=False):
        self.same_id = same_id
        self.leaks, self.prompt_chars, self.first = leaks, prompt_chars, first
        self.num_tasks, self.gives = num_tasks, gives
        if answer_chars:
            self.gold_response = lambda task: "1" * answer_chars

    def train(self):
        index = 0
        while index != self.num_tasks:
            yield self.gives or self._task(self.first + index)
            index += 1

    def held_out(self, num_tasks):
        return [self._task(index + (5 if self.leaks else 10_000)) for index in range(num_tasks)]

    def _task(self, index):
        return Task("t7" if self.same_id else f"t{index}", str(index).zfill(self.prompt_chars), {"answer": "1"})

def broken(seed):
    raise RuntimeError("no luck")
"""


@pytest.fixture
def overrides(tmp_path, monkeypatch):
    """The demo on a machine that has all it needs, with a plug-in of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    policy = tmp_path / "policy"
    policy.mkdir()
    shape = {"vocab_size": 32, "hidden_size": 128, "num_hidden_layers": 4, "tie_word_embeddings": True}
    (policy / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr("penstock.platform.checks.tasks.NUM_MEASURED_TASKS", 4)
    monkeypatch.setattr(
        "penstock.rollout.tokenization.tokenizers.load_codec", lambda _path, _marks=None: CharacterCodec()
    )
    return ["experiment=arithmetic", f"model.path={policy}", "env.factory=my_plugin:Source", "env.args={}"]


class CharacterCodec:
    def encode_prompt(self, prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, prompt))


def problem(overrides: list[str], *, dry_run: bool = False) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config("train", overrides, dry_run=dry_run)
    (violation,) = raised.value.violations
    return violation


def absent(overrides: list[str]) -> str:
    """The problem of a run that is only a warning in a dry run."""
    found = problem(overrides)
    assert load_config("train", overrides, dry_run=True).warnings == [found]
    return found


def test_a_good_configuration_has_no_warning(overrides):
    assert load_config("train", overrides).warnings == []
    assert load_config("eval", overrides).warnings == []


def test_a_missing_warm_start_says_how_to_create_it(overrides):
    found = absent([*overrides, "model.path=runs/arithmetic_sft-seed7/policy", "seed=7"])
    assert "runs/arithmetic_sft-seed7/policy does not exist" in found
    assert "penstock sft experiment=arithmetic_sft seed=7" in found


def test_the_warm_start_of_another_experiment_is_named_too_and_none_that_does_not_exist(overrides):
    found = absent([*overrides, "model.path=runs/text_sft-seed3/policy"])
    assert "Create it with `penstock sft experiment=text_sft seed=3`" in found
    assert "Give a model directory" in absent([*overrides, "model.path=runs/no_such_sft-seed0/policy"])


def test_a_missing_model_is_named(overrides):
    assert "model.path=/no/such/model does not exist" in absent([*overrides, "model.path=/no/such/model"])


def test_a_hub_name_must_be_in_the_cache(overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "hf download Org/Model" in absent([*overrides, "model.path=Org/Model"])
    snapshot = tmp_path / "hub" / "models--Org--Model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    load_config("train", [*overrides, "model.path=Org/Model"])


def test_a_folder_that_is_no_model_is_refused(overrides, tmp_path):
    assert "has no config.json" in problem([*overrides, f"model.path={tmp_path}"])


def test_a_file_is_no_model_directory(overrides, tmp_path):
    (tmp_path / "model.bin").touch()
    assert "model.bin is a file" in problem([*overrides, f"model.path={tmp_path / 'model.bin'}"])


def auxiliary_model(tmp_path: Path, vocab_size: int, vocabulary: dict[str, int]) -> Path:
    """A model that is not the policy; both have a tokenizer."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "hidden_size": 999}))
    ours = {"0": 2, "1": 3, "+": 4}
    for folder, ids in ((tmp_path / "policy", ours), (other, vocabulary)):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}, "added_tokens": []}))
    return other


AUXILIARY = {
    "critic.path": "algorithm=ppo",
    "teacher.path": "algorithm=distill",
    "reference.path": "algorithm=online_dpo",
}


@pytest.mark.parametrize("key", AUXILIARY)
def test_an_auxiliary_model_with_the_policys_tokenizer_is_accepted(overrides, tmp_path, key):
    other = auxiliary_model(tmp_path, 32, {"0": 2, "1": 3, "+": 4})
    load_config("train", [*overrides, AUXILIARY[key], f"{key}={other}"])


@pytest.mark.parametrize("key", AUXILIARY)
def test_an_auxiliary_model_with_another_vocabulary_or_tokenizer_is_refused(overrides, tmp_path, key):
    other = auxiliary_model(tmp_path, 33, {"0": 2, "1": 3, "+": 4})
    found = problem([*overrides, AUXILIARY[key], f"{key}={other}"])
    assert "vocab_size=32 differs from the checkpoint's vocab_size=33" in found
    assert f"({key}, " in found
    (other / "config.json").write_text(json.dumps({"vocab_size": 32}))
    swapped = {"model": {"vocab": {"0": 3, "1": 2, "+": 4}}}
    (other / "tokenizer.json").write_text(json.dumps(swapped))
    found = problem([*overrides, AUXILIARY[key], f"{key}={other}"])
    assert "2 of 3 tokens have a different id" in found
    assert "'0' 3 instead of 2" in found


def test_a_shape_that_is_not_the_checkpoints_is_refused(overrides):
    found = problem([*overrides, "model.shape.num_layers=5"])
    assert "model.shape.num_layers=5 differs from the checkpoint's num_hidden_layers=4" in found


def partner(overrides: list[str], folder: Path, letters: str, num_layers: int = 3) -> list[str]:
    """The overrides of a run of two policies, each with its tokenizer."""
    ours = Path(overrides[1].partition("=")[2])
    theirs = folder / "partner"
    theirs.mkdir()
    shape = json.loads((ours / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**shape, "hidden_size": 96, "num_hidden_layers": num_layers}))
    for path, vocabulary in ((ours, "abc"), (theirs, letters)):
        words = {letter: number for number, letter in enumerate(vocabulary)}
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return ["experiment=arithmetic_two_policies", *overrides[1:], f"partner.model.path={theirs}"]


def test_a_partner_of_the_same_tokenizer_is_taken(overrides, tmp_path):
    assert load_config("train", partner(overrides, tmp_path, "abc")).warnings == []


def test_a_partner_whose_tokens_mean_something_else_is_refused(overrides, tmp_path):
    assert "2 of 3 tokens have a different id than in the policy's" in problem(partner(overrides, tmp_path, "acb"))


def test_a_partner_of_another_shape_than_stated_is_refused(overrides, tmp_path):
    found = problem(partner(overrides, tmp_path, "abc", num_layers=5))
    assert "partner.model.shape.num_layers=3 differs from the checkpoint's num_hidden_layers=5" in found


def test_targets_of_adapters_that_the_checkpoint_has_not_are_refused_with_the_nearest(overrides, tmp_path):
    tensors = {f"model.layers.0.self_attn.{name}.weight": np.zeros((2, 2), np.float32) for name in ("q_proj", "qkv")}
    save_file(tensors | {"model.norm.weight": np.zeros(2, np.float32)}, tmp_path / "policy" / "model.safetensors")
    lora = [*overrides, "trainer=lora", "trainer.lora.targets=[q_proj,qvk]"]
    assert "trainer.lora.targets: qvk names no linear layer" in problem(lora)
    assert "Nearest: qkv" in problem(lora)
    assert "norm names no" in problem([*overrides, "trainer=lora", "trainer.lora.targets=[qkv,norm]"])
    load_config("train", [*overrides, "trainer=lora", "trainer.lora.targets=[self_attn.q_proj]"])


def test_a_run_directory_in_use_is_refused(overrides):
    Path("runs/old").mkdir(parents=True)
    load_config("train", [*overrides, "name=old"])
    Path("runs/old/metrics.jsonl").touch()
    found = problem([*overrides, "name=old"], dry_run=True)
    assert "run_dir=runs/old exists and is not empty" in found
    assert "overwrite=true" in found
    load_config("train", [*overrides, "name=old", "overwrite=true"])


def test_a_folder_that_is_not_a_run_is_never_overwritten(overrides):
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").touch()
    found = problem([*overrides, "run_dir=thesis", "overwrite=true"], dry_run=True)
    assert "run_dir=thesis has files, but none that a run writes" in found
    assert "overwrite=true deletes only runs" in found


def test_the_working_directory_is_no_run_directory(overrides):
    assert "is the working directory or contains it" in problem([*overrides, "run_dir=."], dry_run=True)


def test_a_file_in_the_way_of_the_run_directory_is_refused(overrides):
    Path("runs").touch()
    assert "is a file" in problem(overrides)


def test_gpu_pools_without_a_driver_are_refused(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    found = absent([*overrides, "cluster=one_gpu", "dataflow=synchronous", "rollout/engine=vllm_colocated"])
    assert "cluster.pools.gpu.device=gpu" in found
    assert "no NVIDIA driver" in found


def test_reward_workers_on_gpus_that_are_not_there_are_refused(overrides, monkeypatch):
    pool = "+cluster.pools.judge={device: gpu, count: 2, memory_gib: 24}"
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    load_config("train", [*overrides, pool])
    found = absent([*overrides, pool, "reward.pool=judge"])
    assert "cluster.pools.judge.device=gpu, but this machine has no NVIDIA driver" in found
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: False)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 1)
    found = absent([*overrides, pool, "reward.pool=judge", "reward.num_workers=2"])
    assert "2 GPUs are configured, but nvidia-smi lists 1" in found


def test_a_cpu_build_and_missing_devices_are_refused(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: True)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 0)
    typed = [*overrides, "cluster=one_gpu", "dataflow=synchronous", "rollout/engine=vllm_colocated"]
    with pytest.raises(ConfigError) as raised:
        load_config("train", typed)
    build, count = raised.value.violations
    assert "FLAVOR=cuda" in build
    assert "1 GPUs are configured, but nvidia-smi lists 0" in count


def test_too_little_memory_and_disk_are_refused_with_both_numbers(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 1 << 30)
    found = absent(overrides)
    assert "memory" in found
    assert "1.0 GiB are free" in found
    monkeypatch.undo()


def test_too_little_disk_is_refused_with_both_numbers(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 0 if "runs" in str(path) else 1 << 40)
    found = absent(overrides)
    assert "need about 0.5 GiB of disk, 0.0 GiB are free" in found


def test_too_little_shared_memory_is_refused(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 0 if "shm" in str(path) else 1 << 40)
    found = absent(overrides)
    assert "weights.directory: two versions of the policy need" in found
    assert "--shm-size" in found


def test_a_missing_folder_for_published_versions_is_refused(overrides):
    assert "weights.directory=/no/such is not a folder" in problem([*overrides, "weights.directory=/no/such"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.fn=my_plugin.reword", ["reward.fn", "my_plugin", "Did you mean 'reward'?"]),
        ("reward.fn=my_plugn.reward", ["reward.fn", "no module 'my_plugn'"]),
        ("reward.fn=my_plugin:not_callable", ["reward.fn", "not callable"]),
        ("env.factory=my_plugin:Sorce", ["env.factory", "Did you mean 'Source'?"]),
        ("env.factory=my_plugin:not_callable", ["env.factory", "not callable"]),
        ("env.factory=my_plugin:broken", ["env.factory=my_plugin:broken", "RuntimeError: no luck"]),
        ("env.args={depth: 3}", ["env.args", "depth"]),
        ("env.args={leaks: true}", ["training tasks are also among the", "held-out", "hash"]),
        ("env.args={same_id: true}", ["two different tasks have the id 't7', 0000 and 0001", "Number the tasks"]),
        ("env.args={num_tasks: 0}", ["env.factory=my_plugin:Source", "train() gave no task"]),
        ("env.args={gives: text}", ["env.factory=my_plugin:Source", "train() gave a str", "Task"]),
        ("+env.streams.a.args={first: 10000}", ["1024 of the first 4096 training tasks are also among the"]),
        ("reward.fn=my_plugin:needs_solution", ["reward.fn", "(trajectory, answer=…)", "'solution'", "**_"]),
        ("env.args={prompt_chars: 100}", ["100 tokens", "max_new_tokens=64", "164", "max_context_tokens=128"]),
    ],
)
def test_a_plug_in_that_cannot_work_is_named(overrides, override, words):
    found = problem([*overrides, override], dry_run=True)
    assert all(word in found for word in words), found


def test_a_turn_too_short_for_the_scripted_answers_is_a_warning_with_both_numbers(overrides):
    answers = "env.args={answer_chars: 64}"
    (found,) = load_config("train", [*overrides, answers]).warnings
    assert "rollout.sampling.max_new_tokens=64 cannot hold the scripted answers of 128 of 128 tasks" in found
    assert "that of t0 needs 65 tokens in a turn" in found
    assert load_config("train", [*overrides, answers, "rollout.sampling.max_new_tokens=65"]).warnings == []


@pytest.mark.parametrize("path", ["my_plugin.reward", "my_plugin:reward"])
def test_both_forms_of_import_paths_work(overrides, path):
    load_config("train", [*overrides, f"reward.fn={path}"])


def test_too_few_held_out_tasks_are_refused_with_both_numbers(overrides):
    typed = ["env.factory=penstock.envs.tasks.arithmetic:ArithmeticTasks", "env.args={digits: 1}"]
    found = problem([*overrides, *typed])
    assert "evaluation.num_tasks=1024" in found


def test_a_warm_start_needs_worked_answers(overrides):
    with pytest.raises(ConfigError, match="gold_response"):
        load_config("sft", ["experiment=arithmetic_sft", *overrides[2:]])


def test_a_worked_example_longer_than_the_context_is_refused(overrides):
    typed = ["experiment=arithmetic_sft", *overrides[2:], "env.args={answer_chars: 200}"]
    with pytest.raises(ConfigError, match=r"example of t10000 has 206 tokens, above model.max_context_tokens=128"):
        load_config("sft", typed)
    load_config("sft", [*typed[:-1], "env.args={answer_chars: 20}"])


def test_a_new_policy_needs_an_embedding_for_every_token(overrides):
    with pytest.raises(ConfigError, match=r"vocab_size=31 is below the 32 tokens of model.tokenizer=characters"):
        load_config("sft", ["experiment=arithmetic_sft", "model.shape.vocab_size=31"])


def test_too_few_held_out_tasks_for_a_warm_start_name_its_own_key(overrides):
    with pytest.raises(ConfigError, match=r"sft.eval_tasks=1000000: arithmetic with digits=3"):
        load_config("sft", ["experiment=arithmetic_sft", "sft.eval_tasks=1000000"])


def test_problems_of_keys_machine_and_plug_ins_come_in_one_message(overrides):
    typed = ["dataflow.max_stalness=1", "trainer.num_ranks=5", "model.path=/no/model", "reward.fn=my_plugin.reword"]
    with pytest.raises(ConfigError) as raised:
        load_config("train", [*overrides, *typed])
    starts = ("dataflow.max_stalness", "dataflow.batch_groups=32", "model.path=/no/model", "reward.fn=")
    assert len(raised.value.violations) == len(starts)
    assert all(any(found.startswith(start) for found in raised.value.violations) for start in starts)
