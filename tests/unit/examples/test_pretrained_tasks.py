"""The tasks of `make real`: nothing that is held out is trained on in another order, and only the right city counts."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from examples.pretrained import directory, facts
from penstock.envs.environment import Done, Observation


def facts_of(row: dict) -> frozenset[str]:
    """The sentences of a prompt without its question, in no order."""
    stated, _ = re.split(r" In which city does | First say what ", row["prompt"][0]["content"])
    return frozenset(re.findall(r"[^.]+\.", stated))


@pytest.mark.parametrize("task", ["", "_hops"])
def test_held_out_facts_are_in_no_row_that_is_trained_on(task: str) -> None:
    rows = facts.hops() if task else facts.rows()
    held_out = facts.held_out_hops() if task else facts.held_out()
    assert len(rows) >= 5000
    assert len(held_out) >= 500
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)
    assert not {facts_of(row) for row in rows} & {facts_of(row) for row in held_out}
    for of_split in (rows, held_out):
        assert Counter(row["answer"] for row in of_split).most_common(1)[0][1] <= 0.1 * len(of_split)


def test_larger_tasks_have_more_facts_and_each_says_its_answer_once() -> None:
    for rows, num_facts in (
        (facts.rows(), 2), (facts.more(), 4), (facts.hops_of_two(), 4), (facts.hops(), 6),
        (facts.more_hops(), 10),
    ):  # fmt: skip
        assert {len(facts_of(row)) for row in rows} == {num_facts}
        assert all(row["prompt"][0]["content"].count(row["answer"]) == 1 for row in rows)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Lima", 1.0),
        ("The pilot works in Lima.", 1.0),
        ("Lima or Oslo", 0.0),
        ("Oslo", 0.0),
        ("Limassol", 0.0),
        ("", 0.0),
    ],
)
def test_the_right_city_and_no_other_counts(said: str, reward: float) -> None:
    assert facts.names_the_city(SimpleNamespace(response=said), answer="Lima") == reward


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Omar is a pilot. The pilot works in Lima.", 1.0),
        ("Omar is a pilot.", 1.0),
        ("Nora is a pilot.", 0.0),
        ("Omar is a pilot. Nora is a baker.", 0.0),
        ("Omar is a baker", 0.0),
        ("pilot", 0.0),
        ("", 0.0),
    ],
)
def test_what_is_said_of_the_person_counts(said: str, reward: float) -> None:
    assert facts.says_the_job(SimpleNamespace(response=said), name="Omar", job="pilot") == reward


def play(task, *said: str) -> Done:
    """The end of an enquiry in which the policy says these things."""
    environment = directory.Directory(0).environment()
    environment.task = task
    for text in said:
        found = asyncio.run(environment.step(SimpleNamespace(text=text)))
        if isinstance(found, Done):
            return found
        assert isinstance(found, Observation)
    raise AssertionError("it has not ended")


def test_only_who_asks_the_right_person_learns_the_city(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LEAST_S", 0.0)
    monkeypatch.setattr(directory, "MOST_S", 0.0)
    source = directory.Directory(0)
    task = next(source.train())
    name, city = source.gold_actions(task)
    other, elsewhere = next(one for one in task.fields["entries"].items() if one[0] != name)
    for said, person, right_city in (
        ((f"Ask {name}.", f"In {city}."), 0.5, 0.5),
        ((f"Ask {name}.", elsewhere), 0.5, 0.0),
        ((other, elsewhere), 0.0, 0.0),
        ((f"{name} or {other}",), 0.0, 0.0),
        (("I do not know.",), 0.0, 0.0),
    ):
        assert play(task, *said).reward == {"names_the_person": person, "names_the_city": right_city}, said


def test_people_of_a_held_out_task_are_in_no_other() -> None:
    source = directory.Directory(0)
    held_out = {frozenset(task.fields["people"]) for task in source.held_out(512)}
    stream = source.train()
    assert not held_out & {frozenset(next(stream).fields["people"]) for _ in range(5000)}


def test_a_lookup_takes_its_time_and_the_same_in_every_run() -> None:
    found = [directory.latency_s(f"{n} Omar") for n in range(500)]
    assert found == [directory.latency_s(f"{n} Omar") for n in range(500)]
    assert min(found) == 0.2
    assert max(found) > 5 * sorted(found)[250], "a long tail"
