"""Texts on the command line and in files arrive as they were meant, or a line says how they were read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.platform.config.compose import Composition, compose_all, to_yaml
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.saved_config import changed_config, read_saved_config
from tests.tiers import examples


def compose(*overrides: str, config_dir: Path | None = None) -> Composition:
    return compose_all(["experiment=arithmetic", *overrides], config_dir)


def stops(*overrides: str) -> tuple[str, ...]:
    composition = compose(*overrides)
    assert not composition.problems
    assert composition.config is not None
    return composition.config.rollout.sampling.stop


@pytest.mark.parametrize(
    ("typed", "expected", "said"),
    [
        (r'["\n\n"]', ("\n\n",), "was read as ⏎⏎: in double quotes"),
        (r'["\nUser:","a\t1"]', ("\nUser:", "a\t1"), "was read as ⏎User:, a⇥1"),
        (r'["a\tb"]', (r"a\tb",), r"was read as a\tb: in double quotes"),
        (r'["\\n"]', (r"\n",), r"was read as \n: in double quotes"),
        (r'["\r\n","\text{"]', ("\r\n", r"\text{"), "was read as ␍⏎"),
        (r"['\n\n']", (r"\n\n",), r"\n\n has a backslash and the letter n, which is no line break"),
        ('["\n\n"]', ("\n\n",), ""),
        ('["</answer>","\u3000","\u00a0","👨\u200d👩\u200d👧","\u2028","\x85"]', None, ""),
        (r'["\boxed{","\"x\"\\"]', (r"\boxed{", '"x"\\'), ""),
        (f'["{"x" * 400}"]', ("x" * 400,), ""),
        (r'["\${x}"]', ("${x}",), ""),
    ],
)
def test_a_stop_text_is_what_its_quotes_say_and_the_reading_is_told(
    typed: str, expected: tuple[str, ...] | None, said: str
) -> None:
    composition = compose(f"rollout.sampling.stop={typed}")
    assert not composition.problems
    assert composition.config is not None
    wanted = ("</answer>", "\u3000", "\u00a0", "👨\u200d👩\u200d👧", "\u2028", "\x85") if expected is None else expected
    assert composition.config.rollout.sampling.stop == wanted
    assert len(composition.remarks) == bool(said)
    assert said.casefold() in "".join(composition.remarks).casefold()


@pytest.mark.parametrize(
    "path",
    [
        "models/modèle π 日本",
        "runs/👨\u200d👩\u200d👧",
        "a\u00a0b",
        "it's (1) & co/x",
        "C:\\x é\\",
        "100% ok, really=1",
    ],
)
def test_a_path_is_what_was_typed_whatever_characters_it_has(path: str) -> None:
    composition = compose(f"run_dir={path}", f"model.path={path}")
    assert not composition.problems
    assert composition.config is not None
    assert (composition.config.run_dir, composition.config.model.path) == (path, path)


def test_every_text_of_the_command_line_has_the_same_rule() -> None:
    composition = compose(
        r"""env.args={a: "x\ny", b: [2.5, null, true, p q], c: "\frac\t12"}""",
        r"evaluation.part='x\ny'",
        r'env.reasoning={open: "<a>\n", close: "</a>"}',
    )
    assert composition.config is not None
    assert not composition.problems
    args = {"a": "x\ny", "b": [2.5, None, True, "p q"], "c": "\\frac\t12"}
    assert composition.config.env.args == args
    assert composition.config.env.reasoning is not None
    assert composition.config.env.reasoning.open == "<a>\n"
    read, reasoning, doubtful = composition.remarks
    assert read.startswith(r"env.args was read as x⏎y, \frac⇥12")
    assert reasoning.startswith("env.reasoning was read as <a>⏎")
    assert doubtful.startswith(r"evaluation.part: x\ny has a backslash")


def test_a_stop_text_of_a_file_is_as_yaml_says(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [arithmetic, _self_]\n"
        r"""rollout: {sampling: {stop: ["\n\n", '\n', "\nUser:"]}}"""
    )
    composition = compose_all(["experiment=mine"], tmp_path)
    assert composition.config is not None
    assert composition.config.rollout.sampling.stop == ("\n\n", r"\n", "\nUser:")
    (remark,) = composition.remarks
    assert "a backslash and the letter n" in remark


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rollout.sampling.stop=[5]", """Quote it: 'rollout.sampling.stop=["5"]'."""),
        ("rollout.sampling.stop=[END,1.5]", """Quote it: 'rollout.sampling.stop=["1.5"]'."""),
        ("rollout.sampling.stop=[true]", """Quote it: 'rollout.sampling.stop=["true"]'."""),
        ("rollout.sampling.stop=END", """Quote it: 'rollout.sampling.stop=["END"]'."""),
        ("name=5", """Quote it: 'name="5"'."""),
        ("name=1e-6", """Quote it: 'name="1e-6"'."""),
        ("+name=1_000", """Quote it: 'name="1_000"'."""),
        ("name=nan", """Quote it: 'name="nan"'."""),
        ("name=True", """Quote it: 'name="True"'."""),
        ("rollout.sampling.stop=[END,1e-6]", """Quote it: 'rollout.sampling.stop=["1e-6"]'."""),
        ('rollout.sampling.stop=["${x}"]', r"write \${ where these two characters are meant"),
        ('rollout.sampling.stop=["${"]', r"write \${ where these two characters are meant"),
        ('rollout.sampling.stop=["\udcff"]', "has bytes that are no UTF-8"),
        ('run_dir="\udcff"', "has bytes that are no UTF-8"),
        ('run_dir="a\x7fb"', "has a control character"),
        ('run_dir="a\x9fb"', "has a control character"),
        ("tracker=[rivers]", "For one of your own set tracker.rivers.factory=package.module:function"),
        ("model.dtype=fp8", 'model.dtype="fp8" is not a valid choice. Choices: float32, bfloat16.'),
    ],
)
def test_a_value_that_cannot_be_used_has_one_line_that_says_how_to_write_it(typed: str, said: str) -> None:
    (problem,) = compose(typed).problems
    assert said in problem


@pytest.mark.parametrize("key", ["run_dir", "model.path"])
@pytest.mark.parametrize(
    "name", ["a\u3000b", "a\u00a0b", "👨\u200d👩\u200d👧", "né ü 汉", "a\u2028b", "\u202eabc", "\ufeffx"]
)
def test_a_path_may_hold_any_character_but_control_characters(key: str, name: str, tmp_path: Path) -> None:
    problems = compose(f'{key}="{tmp_path}/{name}"').problems
    assert key == "model.path" or not problems
    assert all("does not exist" in one for one in problems)


TEXT = st.text(min_size=1) | st.lists(
    st.sampled_from(["${", "\\", "}", "$", "\n", "\r", "\x85", "'", '"', "\u2028", "- ", "# ", "\x00"]), min_size=1
).map("".join)


@pytest.mark.full
@given(TEXT)
@settings(max_examples=examples(60), deadline=None)
def test_a_run_is_resumed_with_the_stop_text_that_it_saved(text: str) -> None:
    config = CONFIG.model_copy(
        update={
            "rollout": CONFIG.rollout.model_copy(
                update={"sampling": CONFIG.rollout.sampling.model_copy(update={"stop": (text,)})}
            )
        }
    )
    saved = yaml.safe_load(to_yaml(config))
    assert saved == config.model_dump(mode="json")
    resumed = changed_config(saved, ["total_steps=77"], Path(config.run_dir))
    assert (resumed.rollout.sampling.stop, resumed.total_steps) == ((text,), 77)


def test_a_saved_configuration_with_the_beginning_of_an_interpolation_is_read(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"run_dir": "runs/${"})
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert read_saved_config(tmp_path)["run_dir"] == "runs/${"


CONFIG: RunConfig = compose().config  # type: ignore[assignment]
