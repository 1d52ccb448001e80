"""Configurations that cannot work are refused with their key before anything starts; none ends in a traceback."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks import imports
from penstock.platform.checks.load import compose_config, load_config
from penstock.platform.cli.dry_run import print_dry_run
from penstock.platform.config.compose import compose_all
from penstock.platform.config.field_errors import _alternatives as kinds_of
from penstock.platform.config.schema import RunConfig
from tests.command_line import ENVIRONMENT, run_cli
from tests.tiers import by_tier

LONG = "n" * 300
MODULES = {
    "exits_at_import": "import os\nos._exit(3)\n",
    "interrupts_at_import": "raise KeyboardInterrupt\n",
    "leaves_at_import": "raise SystemExit(0)\n",
    "crashes_at_import": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "loops_at_import": "while True:\n    pass\n",
    "thread_at_import": "import threading\nprint('hello')\nthreading.Thread(target=threading.Event().wait).start()\n",
    "own": "number = 3\n\nclass Named:\n    pass\n\ndef one(x):\n    return x\n",
}


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A folder with modules of the user, which is the working directory."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def few_tasks(monkeypatch):
    """Many configurations are checked, each with few tasks."""
    monkeypatch.setattr("penstock.platform.checks.tasks.NUM_TRAIN_TASKS", 8)


def violations(*overrides: str, config_dir: Path | None = None) -> list[str]:
    """What a dry run refuses."""
    words = list(overrides)
    if not any(word.lstrip("+").startswith("experiment") for word in words):
        words.insert(0, "experiment=arithmetic")
    try:
        load_config("train", words, config_dir=config_dir, dry_run=True)
    except ConfigError as error:
        return error.violations
    return []


REFUSED = [
    # Choices of config groups.
    ("experiment=null", "experiment=null"),
    ("experiment=3", "experiment=3"),
    ("experiment={a:1}", "experiment="),
    ("experiment=[arithmetic,text]", "experiment=[arithmetic,text]"),
    ("experiment=arithmetic experiment=text", "experiment=arithmetic experiment=text"),
    ("trainer=null", "trainer=null"),
    ("trainer=[deepspeed,torch]", "trainer=[deepspeed,torch]"),
    ("rollout/engine=null", "rollout/engine=null"),
    ("tracker=[jsonl,null]", "tracker=null"),
    ("cluster.pools=null", "cluster.pools"),
    # Numbers.
    ("trainer.optimizer.lr=inf", "trainer.optimizer.lr"),
    ("trainer.optimizer.lr=nan", "trainer.optimizer.lr"),
    ("trainer.optimizer.lr=1e10", "trainer.optimizer.lr"),
    ("trainer.optimizer.eps=inf", "trainer.optimizer.eps"),
    ("trainer.optimizer.eps=1e30", "trainer.optimizer.eps"),
    ("trainer.optimizer.weight_decay=1e6", "trainer.optimizer.weight_decay"),
    ("trainer.optimizer.gradient_clip_norm=inf", "trainer.optimizer.gradient_clip_norm"),
    ("trainer.optimizer.betas=[nan,0.9]", "trainer.optimizer.betas"),
    ("trainer.optimizer.warmup_steps=99999999999999999999", "trainer.optimizer.warmup_steps"),
    ("critic.optimizer.lr=1e10 algorithm=ppo", "critic.optimizer.lr"),
    ("algorithm.kl.coefficient=inf", "algorithm.kl.coefficient"),
    ("algorithm.kl.coefficient=1e12", "algorithm.kl.coefficient"),
    ("algorithm.loss.clip_high=inf", "algorithm.loss.clip_high"),
    ("algorithm.advantage.epsilon=inf", "algorithm.advantage.epsilon"),
    ("algorithm.correction.decoupled.max_weight=inf", "algorithm.correction.decoupled.max_weight"),
    ("+algorithm.reward_weights={a:nan}", "algorithm.reward_weights"),
    ("dataflow.pass_reward=nan", "dataflow.pass_reward"),
    ("dataflow.max_live_gib=inf", "dataflow.max_live_gib"),
    ("dataflow.batch_timeout_s=1e-9", "dataflow.batch_timeout_s"),
    ("dataflow.batch_timeout_s=inf", "dataflow.batch_timeout_s"),
    ("rollout.request_timeout_s=1e-9", "rollout.request_timeout_s"),
    ("rollout.start_timeout_s=1e30", "rollout.start_timeout_s"),
    ("trainer.step_timeout_s=1e-9", "trainer.step_timeout_s"),
    ("reward.timeout_s=1e-9", "reward.timeout_s"),
    ("env.episode.timeout_s=inf", "env.episode.timeout_s"),
    ("weights.timeout_s=1e-9", "weights.timeout_s"),
    ("cluster.threads_per_process=1000", "cluster.threads_per_process"),
    ("cluster.pools.cpu.memory_gib=inf", "cluster.pools.cpu.memory_gib"),
    ("dataflow.group_size=100000", "dataflow.group_size"),
    ("dataflow.batch_groups=10000000", "dataflow.batch_groups"),
    ("total_steps=99999999999999999999", "total_steps"),
    ("seed=99999999999999999999", "seed"),
    ("checkpoint.keep=99999999999", "checkpoint.keep"),
    ("evaluation.num_tasks=8 evaluation.num_tasks_during_training=100", "evaluation.num_tasks_during_training=100"),
    ("evaluation.num_tasks=8 evaluation.answers_per_task=4 evaluation.temperature=0", "evaluation.answers_per_task=4"),
    ("evaluation.num_tasks=8 evaluation.max_failed_share=1", "evaluation.max_failed_share"),
    ("evaluation.num_tasks=8 evaluation.keep_best=true evaluation.every_steps=0", "evaluation.keep_best=true"),
    ("evaluation.num_tasks=8 evaluation.patience=3 evaluation.every_steps=0", "evaluation.patience=3"),
    ("evaluation.num_tasks=8 evaluation.num_tasks_during_training=4 evaluation.keep_best=true", "evaluation.keep_best"),
    ("+env.streams.a={weight:inf}", "env.streams.a.weight"),
    # Names that belong together.
    (
        "reward.fn=null reward.args={} +reward.parts.right.fn=penstock.envs.rewards.exact_match:exact_match "
        "evaluation.num_tasks=8 evaluation.part=wrong",
        "evaluation.part names wrong",
    ),
    (
        "reward.fn=null reward.args={} +reward.parts.right.fn=penstock.envs.rewards.exact_match:exact_match "
        "+algorithm.reward_weights={wrong:1.0}",
        "algorithm.reward_weights names wrong",
    ),
    (
        "reward.fn=null reward.args={} +reward.parts.right.fn=penstock.envs.rewards.exact_match:exact_match "
        "dataflow.filters.zero_variance=true dataflow.filters.zero_variance_part=wrong",
        "dataflow.filters.zero_variance_part names wrong",
    ),
    # Objects that cannot be used.
    ("algorithm/advantage=custom algorithm.advantage.function=os:getcwd", "algorithm.advantage.function='os:getcwd'"),
    ("algorithm/advantage=custom algorithm.advantage.function=own:one", "algorithm.advantage.function='own:one'"),
    ("algorithm/loss=custom algorithm.loss.function=own:Named", "algorithm.loss.function='own:Named'"),
    ("algorithm/loss=custom algorithm.loss.function=own:number", "algorithm.loss='own:number'"),
    ("dataflow.filters.user=os:getcwd", "dataflow.filters.user='os:getcwd'"),
    ("dataflow.group_sizing=os:getcwd", "dataflow.group_sizing='os:getcwd'"),
    ("dataflow.length_limiting=own:one", "dataflow.length_limiting='own:one'"),
    ("env.curriculum=os:getcwd", "env.curriculum='os:getcwd'"),
    ("reward.fn=os:getcwd", "reward.fn=posix:getcwd"),
    ("reward.fn=own:number", "reward.fn='own:number'"),
    ("env.factory=os:getcwd", "env.args="),
    ("env.factory=no_such_module:tasks", "env.factory='no_such_module:tasks'"),
    # Modules that end or block the process that imports them.
    ("reward.fn=exits_at_import:f", "reward.fn='exits_at_import:f'"),
    ("env.factory=interrupts_at_import:f", "env.factory='interrupts_at_import:f'"),
    ("dataflow.filters.user=leaves_at_import:f", "dataflow.filters.user='leaves_at_import:f'"),
    ("env.curriculum=crashes_at_import:f", "env.curriculum='crashes_at_import:f'"),
    ("algorithm/loss=custom algorithm.loss.function=exits_at_import:f", "algorithm.loss.function='exits_at_import:f'"),
    ("env=dataset env.args={rows:exits_at_import.rows}", "env.args.rows='exits_at_import.rows'"),
    # Pools and addresses.
    ("rollout.engine.tensor_parallel_size=4", "rollout.engine.tensor_parallel_size=4"),
    ("cluster.address=garbage", "cluster.address"),
    ("cluster.address=''", "cluster.address"),
    ("cluster.address=http://host", "cluster.address"),
    ("weights.memory=device", "weights.memory"),
    # Run directories.
    ("run_dir=/proc/run", "run_dir='/proc/run' is in /proc"),
    ("run_dir=/sys/run", "run_dir='/sys/run' is in /sys"),
    ("run_dir=/etc/run", "run_dir='/etc/run' is in /etc"),
    ("run_dir=/dev/run", "run_dir='/dev/run' is in /dev"),
    ('run_dir="~/run"', "run_dir='~/run' begins with ~"),
    (f"run_dir=runs/{LONG}", "has 305 characters, 300 bytes between two slashes"),
    (f"name={LONG}", "name="),
    ('run_dir="a\nb"', 'run_dir="a\\nb" has a control character'),
    ('model.path="a\tb"', 'model.path="a\\tb" has a control character'),
    ("run_dir=/", "run_dir=/ is the working directory or contains it"),
]  # fmt: skip


@pytest.mark.some(6)
@pytest.mark.usefixtures("user", "few_tasks")
@pytest.mark.parametrize("refused", REFUSED, ids=[words[:60] for words, _ in REFUSED])
def test_what_cannot_work_is_refused_by_name(refused):
    overrides, named = refused
    found = violations(*overrides.split(" "))
    assert any(violation.startswith(named) or f" {named}" in violation for violation in found), found


def leaves(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the schema that is no section, with its field; `x` stands for a name chosen by the user."""
    for name, field in section.model_fields.items():
        path, annotation = f"{prefix}{name}", field.annotation
        if get_origin(annotation) is dict:
            path, annotation = f"{path}.x", get_args(annotation)[1]
        inner = [kind for kind in kinds_of(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for one in inner:
            yield from leaves(one, f"{path}.")
        if not inner:
            yield path, field


def mutations(kinds: list[Any]) -> Iterator[str]:
    """Values, as typed, that a key of these kinds does not or hardly takes."""
    if {int, float} & set(kinds):
        yield from ("nan", "inf", "-inf", "-1", "0", "1e30", "1e-300", "99999999999999999999", "''", "true", "[1]")
    if str in kinds:
        yield from ("''", '"\n"', "nan", "[]", f"'{LONG}'", "'a b'", "/", "'~'")
    if any(get_origin(kind) is Literal or (isinstance(kind, type) and hasattr(kind, "__members__")) for kind in kinds):
        yield from ("null", "''", "3", "[]")
    if bool in kinds:
        yield from ("null", "3", "'yes'")
    if any(get_origin(kind) in (tuple, list) for kind in kinds):
        yield from ("3", "{a:1}", "[null]", "[[]]", "[nan,nan]", "[inf,-inf]", "[]")
    if any(get_origin(kind) is dict for kind in kinds):
        yield from ("3", "[1]", "{a:{b:[null]}}", "null")
    if NoneType in kinds:
        yield "null"


MUTATIONS = {path: (field, list(mutations(kinds_of(field.annotation)))) for path, field in leaves()}
NO_NUMBERS = ("nan", "inf", "-inf", "99999999999999999999", "true", "[1]", "''")


def try_value(path: str, value: str) -> None:
    """A dry run with one changed key either works or is refused in plain lines; no number is inf, NaN or huge."""
    words = ["experiment=arithmetic", "evaluation.num_tasks=8", f"{path}={value}"]
    composition = compose_all(words)
    problems = composition.problems
    is_number = {int, float} & set(kinds_of(MUTATIONS[path][0].annotation))
    assert problems or not (is_number and value in NO_NUMBERS), words[-1]
    if not problems:  # otherwise it would be checked with another value
        try:
            print_dry_run(load_config("train", words, dry_run=True), "train", Console(file=StringIO()))
        except ConfigError as error:
            problems = error.violations
    assert all(problem.isprintable() for problem in problems), words[-1]


@pytest.mark.full
@pytest.mark.usefixtures("user", "few_tasks")
def test_an_odd_value_of_each_key_ends_in_no_traceback():
    each = [(path, values[index % len(values)]) for index, (path, (_, values)) in enumerate(MUTATIONS.items())]
    for path, value in each[:: by_tier(4, full=1)]:
        try_value(path, value)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.parametrize("path", MUTATIONS)
@pytest.mark.usefixtures("user", "few_tasks")
def test_no_odd_value_of_any_key_ends_in_a_traceback(path):
    for value in MUTATIONS[path][1]:
        try_value(path, value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"factory: caf\xe9\n", "cannot be read"),
        (b"\xff\xfef\x00", "cannot be read"),
        (b"- one\n- two\n", "holds a list"),
        (b"text\n", "holds a str"),
        (b"factory: [\n", "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_section_is_refused_by_its_name(user, content, words):
    file = user / "own" / "env" / "mine.yaml"
    file.parent.mkdir(parents=True)
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    (violation,) = violations("env=mine", config_dir=user / "own")
    assert violation.startswith(f"{file} {words}")


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbffactory: arithmetic\n"], ids=["empty", "byte-order mark"])
def test_an_empty_file_and_one_with_a_byte_order_mark_are_read(user, content):
    file = user / "own" / "env" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    found = violations("env=mine", "evaluation.num_tasks=8", config_dir=user / "own")
    assert [one.partition(" ")[0] for one in found] == ([] if content else ["env.factory"])


def has_ended(pid: str) -> bool:
    """Whether a process is gone, or dead and not yet reaped, within 10 s."""
    for _ in range(100):
        try:
            if not Path("/proc", pid, "cmdline").read_bytes():
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.full
def test_a_module_that_loops_at_import_is_ended_with_what_it_has_started(user, monkeypatch):
    monkeypatch.setattr(imports, "IMPORT_TIMEOUT_S", 5.0)
    (user / "starts_and_loops.py").write_text(
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "while True:\n    pass\n"
    )
    (violation,) = violations("reward.fn=starts_and_loops:reward", "dataflow.filters.user=starts_and_loops:other")
    assert "starts_and_loops cannot be imported: a process that tried did not end within 5 s" in violation
    assert has_ended((user / "child").read_text())


def test_a_module_with_a_thread_that_does_not_end_is_accepted(user):
    config = compose_config(["experiment=arithmetic", "env.factory=thread_at_import:tasks"])
    assert list(imports.check_imports(config)) == []


def test_each_module_that_cannot_be_imported_is_named(user):
    found = violations("reward.fn=exits_at_import:f", "env.factory=own:one", "dataflow.filters.user=leaves_at_import:f")
    assert [one.partition("=")[0] for one in found] == ["reward.fn", "dataflow.filters.user"]
    assert "ended with exit code 3" in found[0]
    assert "raised SystemExit 0" in found[1]


def make_run(folder: Path, name: str = "arithmetic") -> Path:
    """A directory with what a run writes at its start."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: {name}\n")
    for file in ("environment.json", "data.json"):
        (folder / file).write_text("{}")
    return folder


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run_dir=runs/other/inside"], "run_dir=runs/other/inside is inside"),
        (["run_dir=runs/other"], "exists and is not empty"),
        (["run_dir=runs/other", "overwrite=true"], "holds the run other, and this one is name=arithmetic"),
        (["name=other", "overwrite=true", "model.path=runs/other/policy"], "would delete model.path=runs/other/policy"),
        (["run_dir=runs/outer", "overwrite=true"], "would delete 1 other runs inside it, such as runs/outer/cell"),
    ],
)
def test_overwriting_deletes_only_an_earlier_run_of_the_same_name(user, overrides, words):
    make_run(user / "runs" / "other", "other")
    policy = user / "runs" / "other" / "policy"
    policy.mkdir()
    (policy / "config.json").write_text('{"model_type": "qwen3"}')
    make_run(user / "runs" / "outer")
    make_run(user / "runs" / "outer" / "cell")
    found = violations(*overrides)
    assert any(words in violation for violation in found), found


def test_an_earlier_run_of_the_same_name_may_be_overwritten(user):
    make_run(user / "runs" / "arithmetic")
    assert violations("overwrite=true") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["experiment=null"], "experiment=null"),
        (["experiment=arithmetic", "trainer.optimizer.lr=inf"], "trainer.optimizer.lr=Infinity"),
        (["experiment=arithmetic", f"name={LONG}"], "name="),
        (["experiment=arithmetic", "reward.fn=crashes_at_import:f"], "reward.fn='crashes_at_import:f'"),
        (["experiment=arithmetic", "env.factory=exits_at_import:f"], "env.factory='exits_at_import:f'"),
        (["experiment=arithmetic", "run_dir=/proc/run"], "run_dir='/proc/run'"),
    ],
)
def test_the_command_exits_2_with_the_key_and_leaves_nothing(user, overrides, named, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join([str(user), os.environ.get("PYTHONPATH", "")]))
    before = sorted(user.rglob("*.*"))
    ended = run_cli("train", "--dry-run", *overrides, cwd=user, timeout_s=120)
    assert ended.returncode == 2
    assert f"  - {named}" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert [path for path in sorted(user.rglob("*.*")) if path not in before and "__pycache__" not in path.parts] == []
