"""Checks against the machine and against what the user plugs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks import machine
from penstock.platform.checks.load import compose_config, load_config
from penstock.platform.checks.model_probe import Answer
from penstock.platform.cluster import hardware
from tests.model_folder import write_model

PLUGIN = """
from penstock.dataflow.task import Task

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

class Few(Source):
    def held_out(self, num_tasks):
        if num_tasks > 5:
            raise ValueError("only 5")
        return super().held_out(num_tasks)

def broken(seed):
    raise RuntimeError("no luck")
"""


@pytest.fixture
def overrides(tmp_path, monkeypatch):
    """The demo on a machine that has all it needs, with a plug-in of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    policy = write_model(tmp_path / "policy")
    monkeypatch.setattr("penstock.platform.checks.model_files.ask", lambda _question: Answer([]))
    monkeypatch.setattr("penstock.platform.checks.tasks.NUM_MEASURED_TASKS", 4)
    monkeypatch.setattr(
        "penstock.rollout.tokenization.tokenizers.load_codec", lambda _path, _env=None: CharacterCodec()
    )
    return ["experiment=arithmetic", f"model.path={policy}", "env.factory=my_plugin:Source", "env.args={}"]


class CharacterCodec:
    turn_end, named_ends = None, ()

    def encode_prompt(self, prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, prompt))

    def spelled_token(self, _prompt: str) -> None:
        """It has no special tokens."""


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
    found = absent([*overrides, "cluster=one_gpu", "dataflow=synchronous", "rollout/engine=vllm"])
    assert "the pool gpu is one of GPUs" in found
    assert "no NVIDIA driver" in found


def test_reward_workers_on_gpus_that_are_not_there_are_refused(overrides, monkeypatch):
    pool = "+cluster.pools.judge={device: gpu, count: 2, memory_gib: 24}"
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    load_config("train", [*overrides, pool])
    found = absent([*overrides, pool, "reward.pool=judge"])
    assert "the pool judge is one of GPUs, but this machine has no NVIDIA driver" in found
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: False)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 1)
    found = absent([*overrides, pool, "reward.pool=judge", "reward.num_workers=2"])
    assert "the run uses 2, but nvidia-smi lists 1" in found


def test_a_cpu_build_and_missing_devices_are_refused(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: True)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 0)
    typed = [*overrides, "cluster=one_gpu", "dataflow=synchronous", "rollout/engine=vllm"]
    with pytest.raises(ConfigError) as raised:
        load_config("train", typed)
    build, count = raised.value.violations
    assert "FLAVOR=cuda" in build
    assert "the run uses 1, but nvidia-smi lists 0" in count


def on_a_gpu(monkeypatch, driver="580.65.06", capabilities=None):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: False)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "nvidia_driver_version", lambda: driver)
    monkeypatch.setattr(hardware, "gpu_capabilities", lambda: capabilities or {"NVIDIA L4": "8.9"})


ONE_GPU = ["cluster=one_gpu", "dataflow=synchronous", "rollout/engine=vllm"]


def test_a_driver_that_is_too_old_is_named_with_both_versions_and_what_to_do(overrides, monkeypatch):
    on_a_gpu(monkeypatch, driver="575.57.08")
    found = absent([*overrides, *ONE_GPU])
    assert "575.57.08, but the CUDA 13.0 build of torch needs 580.65.06 or newer" in found
    assert "Install a newer driver" in found


def test_a_gpu_that_is_too_old_is_named_with_both_capabilities(overrides, monkeypatch):
    on_a_gpu(monkeypatch, capabilities={"Tesla T4": "7.5"})
    assert "Tesla T4 has compute capability 7.5, and 8.0 is needed" in absent([*overrides, *ONE_GPU])
    on_a_gpu(monkeypatch, capabilities={"Tesla T4": "7.5", "NVIDIA A100": "8.0"})
    load_config("train", [*overrides, *ONE_GPU])


def test_too_little_memory_and_disk_are_refused_with_both_numbers(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 1 << 30)
    found = absent(overrides)
    assert "memory" in found
    assert "but 1.0 of " in found
    monkeypatch.undo()


def test_too_little_disk_is_refused_with_both_numbers(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 0 if "runs" in str(path) else 1 << 40)
    found = absent(overrides)
    assert "need about 0.5 GiB below" in found
    assert "0.0 GiB are free" in found


def test_too_little_shared_memory_is_refused(overrides, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 0 if "shm" in str(path) else 1 << 40)
    found = absent(overrides)
    assert "shared memory: two versions of the policy need" in found
    assert "--shm-size" in found


def test_a_missing_folder_for_published_versions_is_refused(overrides):
    assert "weights.directory=/no/such is not a folder" in problem([*overrides, "weights.directory=/no/such"])


@pytest.mark.some(4)
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
    typed = ["model.max_context_tokens=128", "rollout.sampling.max_new_tokens=64"]
    found = problem([*overrides, *typed, override], dry_run=True)
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
    found = problem([*overrides, *typed, "evaluation.num_tasks=64"])
    assert "evaluation.num_tasks=64: there are only 8 held-out tasks" in found
    found = problem([*overrides, *typed, "evaluation.num_tasks_during_training=64"])
    assert "evaluation.num_tasks_during_training=64: there are only 8 held-out tasks" in found
    load_config("train", [*overrides, *typed])


def test_a_source_of_ones_own_that_raises_if_there_are_fewer_is_told_what_to_do(overrides):
    found = problem([*overrides, "env.factory=my_plugin:Few", "evaluation.num_tasks=1024"])
    assert "env.factory=my_plugin:Few: held_out(1024) raised ValueError: only 5. If there are fewer" in found
    load_config("train", [*overrides, "env.factory=my_plugin:Few", "evaluation.num_tasks=5"])


def test_a_warm_start_needs_worked_answers(overrides):
    with pytest.raises(ConfigError, match="gold_response"):
        load_config("sft", ["experiment=arithmetic_sft", *overrides[2:]])


def test_a_worked_example_longer_than_the_context_is_refused(overrides):
    typed = [
        "experiment=arithmetic_sft",
        *overrides[2:],
        "model.max_context_tokens=128",
        "env.args={answer_chars: 200}",
    ]
    with pytest.raises(ConfigError, match=r"example of t0 has 205 tokens, above model.max_context_tokens=128"):
        load_config("sft", typed)
    load_config("sft", [*typed[:-1], "env.args={answer_chars: 20}"])


def test_a_new_policy_needs_an_embedding_for_every_token(overrides):
    with pytest.raises(ConfigError, match=r"vocab_size=31 is below the 32 tokens of model.tokenizer=characters"):
        load_config("sft", ["experiment=arithmetic_sft", "model.shape.vocab_size=31"])


def test_too_few_held_out_tasks_for_a_warm_start_name_its_own_key(overrides):
    with pytest.raises(ConfigError, match=r"sft.eval_tasks=1000000: there are only 16200 held-out tasks"):
        load_config("sft", ["experiment=arithmetic_sft", "sft.eval_tasks=1000000"])


def test_problems_of_keys_machine_and_plug_ins_come_in_one_message(overrides):
    typed = ["dataflow.max_stalness=1", "dataflow.batch_groups=32", "trainer.num_ranks=5"]
    typed += ["model.path=/no/model", "reward.fn=my_plugin.reword"]
    with pytest.raises(ConfigError) as raised:
        load_config("train", [*overrides, *typed])
    starts = ("dataflow.max_stalness", "dataflow.batch_groups=32", "model.path=/no/model", "reward.fn=")
    assert len(raised.value.violations) == len(starts)
    assert all(any(found.startswith(start) for found in raised.value.violations) for start in starts)


def test_experts_cannot_be_recorded_on_a_gpu_without_the_prefix_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "ask", lambda _question: Answer([]))
    args = "rollout.engine.args.enable_prefix_caching=false"
    dense = compose_config(["experiment=gsm8k_qwen_1gpu", args])
    experts = dense.model.shape.model_copy(update={"num_experts": 8, "expert_size": 64})
    mixture = dense.model_copy(update={"model": dense.model.model_copy(update={"shape": experts})})
    (said,) = machine.check_passed_on(mixture, "train")
    assert "vLLM records experts with its prefix cache only" in said.message
    assert list(machine.check_passed_on(mixture, "eval")) == list(machine.check_passed_on(dense, "train")) == []
