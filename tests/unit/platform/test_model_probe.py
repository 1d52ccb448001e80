"""What is kept of what libraries say about a model, and for how long."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.platform.checks import model_probe
from penstock.platform.checks.model_probe import Answer, Question
from penstock.weights import kept_answers
from penstock.weights.model_config import ModelForm
from tests.model_folder import write_model

FORM = ModelForm("padded", "fused", "sdpa", ("packed rows change a logprob by 1",))


@pytest.fixture
def question(tmp_path, monkeypatch) -> Question:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Question(str(write_model(tmp_path / "policy")), "sdpa", None, 1, 64, False, "cpu", True)


def in_two_processes(question: Question, first: Answer, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """What the second of two processes is answered, in which the library says `again`."""
    for said in (first, Answer(["again"])):
        model_probe._asked_once.cache_clear()
        monkeypatch.setattr(model_probe, "_ask_child", lambda _question, said=said: said)
        found = model_probe.ask(question)
    return found


def test_an_answer_without_problems_is_kept_wherever_the_folder_is(question, tmp_path, monkeypatch):
    assert in_two_processes(question, Answer([], FORM), monkeypatch) == Answer([], FORM)
    moved = shutil.move(question.folder, tmp_path / "moved")
    assert model_probe.ask(question._replace(folder=str(moved))) == Answer([], FORM)


@pytest.mark.parametrize(
    "first", [Answer(["ImportError: no such library"]), Answer([], FORM._replace(is_accident=True))]
)
def test_a_refusal_and_a_form_that_an_accident_chose_are_asked_again(first, question, monkeypatch):
    assert in_two_processes(question, first, monkeypatch) == Answer(["again"])


def test_a_check_that_is_repeated_waits_for_one_answer(question, monkeypatch):
    asked = []

    def _ask_child(question: Question) -> Answer:
        asked.append(question)
        raise RuntimeError("no answer within 120 s")

    monkeypatch.setattr(model_probe, "_ask_child", _ask_child)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no answer within 120 s"):
            model_probe.ask(question)
    assert asked == [question]


@pytest.mark.parametrize(
    "file", ["trainer/models/tiny_instance.py", "trainer/batches/collate.py", "kernels/linear_logprob.py",
             "rollout/engines/torch/cache.py", "weights/hf_folder.py"]
)  # fmt: skip
def test_an_answer_is_asked_again_after_a_change_of_any_code_that_answers(file, tmp_path, monkeypatch):
    package = Path(kept_answers.__file__).parents[1]
    for folder in kept_answers._ANSWERING:
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(kept_answers, "__file__", str(tmp_path / "weights" / "kept_answers.py"))
    found = []
    for _ in range(2):
        kept_answers._answering.cache_clear()
        found.append(kept_answers.digest_of("?"))
        with (tmp_path / file).open("a") as source:
            source.write("# changed\n")
    kept_answers._answering.cache_clear()
    assert found[0] != found[1]


def test_a_user_without_a_home_has_a_cache_and_an_empty_variable_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert kept_answers.cache_folder() == tmp_path / ".cache" / "penstock"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: {}["no such user"])
    with pytest.raises(RuntimeError):
        Path.home()
    kept_answers.keep("kind", "digest", ["answer"])
    assert kept_answers.cache_folder().is_relative_to(tmp_path / "temporary")
    assert kept_answers.kept("kind", "digest") == ["answer"]
