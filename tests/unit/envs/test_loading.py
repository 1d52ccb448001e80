"""Import paths from YAML: what does not resolve is named, with the nearest match."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.import_path import load_object
from penstock.envs.loading import load_reward, load_task_source
from penstock.envs.tasks.arithmetic import ArithmeticTasks, Problem, exact_match
from penstock.envs.workers.scoring import RewardRunner


def test_both_spellings_nested_names_and_aliased_modules_resolve() -> None:
    assert load_object("penstock.envs.tasks.arithmetic:exact_match") is exact_match
    assert load_object("penstock.envs.tasks.arithmetic.exact_match") is exact_match
    assert load_object("penstock.envs.tasks.arithmetic:Problem.from_prompt") == Problem.from_prompt
    assert load_object("os.path.join") is os.path.join


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact_match", "is no import path"),
        ("penstock.envs.tasks.arithmetic:exact match", "is no import path"),
        ("penstok.envs.arithmetic:exact_match", "no module 'penstok'.*Did you mean 'penstock'"),
        (
            "penstock.envs.tasks.arithmetik:exact_match",
            "penstock.envs.tasks has no module or attribute 'arithmetik'.*'arithmetic'",
        ),
        (
            "penstock.envs.tasks.arithmetic:exact_mach",
            "penstock.envs.tasks.arithmetic has no attribute 'exact_mach'.*'exact_match'",
        ),
        ("penstock.envs.tasks.arithmetic.exact_mach", "Did you mean 'exact_match'"),
        ("penstock.envs.tasks.arithmetic.Problem:answer", "penstock.envs.tasks.arithmetic.Problem is no module"),
    ],
)
def test_the_part_that_does_not_resolve_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_reward(RewardConfig(fn=path))
    assert caught.value.violations[0].startswith(f"reward.fn={path!r}")


@pytest.mark.parametrize("path", ["nope:f", "tokn:f", "penstock.envs.tasks.arithmetic:answer", "penstock.rewards:f"])
def test_nothing_is_suggested_where_nothing_is_close(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    assert "Did you mean" not in str(caught.value)


def test_a_module_that_raises_or_lacks_a_dependency_is_an_error_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "penstock_test_broken.py").write_text("1 / 0")
    (tmp_path / "penstock_test_needs.py").write_text("import not_installed_anywhere")
    with pytest.raises(ConfigError, match="importing penstock_test_broken raised ZeroDivisionError"):
        load_object("penstock_test_broken:reward")
    with pytest.raises(ConfigError, match=r"importing penstock_test_needs raised .*'not_installed_anywhere'"):
        load_object("penstock_test_needs:reward")


def test_a_reward_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is not callable: it is .*, of type str"):
        load_reward(RewardConfig(fn="penstock.envs.registry:GROUP"))


@pytest.mark.parametrize(
    ("how", "cause"), [("1 / 0", "ZeroDivisionError: division by zero"), ("exit(3)", "SystemExit: 3")]
)
async def test_a_reward_that_raises_when_it_is_built_is_an_error_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, cause: str
) -> None:
    body = f"""
class Reward:
    @classmethod
    def build(cls, context): {how}
    def __call__(self, trajectory, **_): return 1.0
"""
    (tmp_path / f"penstock_test_builds_{how[0]}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardConfig(fn=f"penstock_test_builds_{how[0]}:Reward")
    message = re.escape(f"reward.fn='{config.fn}': its build raised {cause}")
    with pytest.raises(ConfigError, match=message):
        load_reward(config)
    runner = RewardRunner(config)
    with pytest.raises(ConfigError, match=message):  # as its process says it
        await runner.start()
    await runner.shutdown()


def test_a_task_source_is_built_from_its_config() -> None:
    config = EnvConfig(factory="penstock.envs.tasks.arithmetic:ArithmeticTasks", args={"digits": 3})
    source = load_task_source(config, seed=1)
    assert source.held_out(5) == ArithmeticTasks(1, 3).held_out(5)


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("ArithmeticTasks", {"digts": 3}, "unexpected keyword argument 'digts'.*Did you mean 'digits'"),
        ("ArithmeticTasks", {"digits": 9}, "digits=9 is outside 1..6"),
        ("HELD_OUT_PERCENT", {}, "is not callable"),
        ("Task", {}, "refuses them"),
    ],
)
def test_what_is_no_task_source_is_refused(factory: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task_source(EnvConfig(factory=f"penstock.envs.tasks.arithmetic:{factory}", args=args), seed=0)


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned a dict without train and held_out"):
        load_task_source(EnvConfig(factory="builtins:dict"), seed=0)
