"""The report of episodes with several threads: the tree, what is folded, what is not trained, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dataflow.trajectory import Episode, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.platform.metrics.report import write_report
from penstock.platform.metrics.report_data import (
    MAX_OBSERVATION_SHOWN,
    MAX_TEXT_SHOWN,
    MAX_THREADS_SHOWN,
    MAX_TOKENS_SHOWN,
    MAX_TURNS_SHOWN,
    groups_data,
)
from penstock.platform.metrics.run_record import read_run
from penstock.platform.metrics.trajectory_table import TrajectoryTable, read_trajectories
from tests.agent_runs import HOSTILE, write_agent_run
from tests.chromium import CHROMIUM, inspect_page
from tests.unit.platform.test_report import a_trajectory, data_of, without_plotly


@pytest.fixture(scope="module")
def agent_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agent_run(tmp_path_factory.mktemp("agents"))


def member_of(run_dir: Path, number: int = 0) -> dict[str, Any]:
    (group,) = data_of(write_report(run_dir).read_text(encoding="utf-8"))["groups"]
    member: dict[str, Any] = group["members"][number]
    return member


def text_of(member: dict[str, Any], thread: str, *roles: str) -> str:
    """What is shown of a thread, or of some roles in it."""
    said = [one for one in member["stretches"] if one["thread"] == thread and one["role"] in (roles or one["role"])]
    return "".join(chain.from_iterable(one["texts"] for one in said))


def a_long_episode(*threads: list[Turn]) -> Trajectory:
    """Threads of a prompt of one token and these turns."""
    mask: list[bool] = []
    described: list[Thread] = []
    num_sampled = 0
    said: list[Turn] = []
    for number, turns in enumerate(threads):
        of_thread = [False]
        for turn in turns:
            of_thread += [True] * turn.num_tokens + [False] * turn.num_observation_tokens
            num_sampled += turn.num_tokens
        said += [replace(turn, thread=f"t{number}") for turn in turns]
        mask += of_thread
        described.append(Thread(f"t{number}", len(of_thread)))
    whole = a_trajectory()
    return Trajectory(
        whole.trajectory_id, whole.task_id, np.arange(len(mask), dtype=np.int32), np.array(mask),
        np.zeros(len(mask), np.float32), (Span(4, num_sampled),), whole.prompt, "", "stop", 1.0,
        episode=Episode(tuple(said), "done"), threads=tuple(described),
    )  # fmt: skip


def shown(run_dir: Path, trajectory: Trajectory) -> dict[str, Any]:
    (run_dir / "config.yaml").write_text("name: long\n")
    TrajectoryTable(run_dir, lambda ids: ["x" for _ in ids]).write_step(1, [trajectory], version=5)
    return member_of(run_dir)


def first_row(agent_run: Path) -> dict[str, Any]:
    record = read_run(agent_run)
    return next(record.rows(record.trajectories))


def test_the_threads_of_an_episode_are_told_with_what_they_fork_and_those_not_trained_last(agent_run: Path) -> None:
    threads = member_of(agent_run)["threads"]
    told = [(one["trained"], one["fork_of"], one.get("after_turn"), one["num_turns"]) for one in threads]
    assert told == [
        (True, None, 0, 3),
        (True, "main", 2, 2),
        (True, None, 0, 1),
        (True, None, 0, 1),
        (True, None, 0, 2),
        (False, None, None, 1),
        (False, None, None, 1),
        (False, None, None, 1),
    ]
    assert threads[0]["name"] == "main"
    assert len({one["name"] for one in threads}) == len(threads)
    row = first_row(agent_run)
    sampled = [turn for turn in row["turns"] if turn["role"] == "policy"]
    assert sum(one["num_tokens"] for one in threads if one["trained"]) == sum(row["loss_mask"]) == row["num_tokens"]
    assert sum(one["num_tokens"] for one in threads) == sum(turn["num_tokens"] for turn in sampled)
    assert sum(one["sampling_s"] for one in threads) == pytest.approx(sum(turn["seconds"] for turn in sampled))


def test_a_fork_is_shown_from_where_it_differs(agent_run: Path) -> None:
    member = member_of(agent_run)
    _, again, first_asked, second_asked, shortened, *_ = member["threads"]
    assert "I could rewrite the module" in text_of(member, "main")
    assert text_of(member, again["name"]).startswith("One replacement is enough")
    assert again["num_own"] == 0, "the same request was sent again"
    row = first_row(agent_run)
    length = {name: count for name, _, count in row["threads"]}
    ids = row["token_ids"]
    start, shared = length["main"], again["num_shared"]
    assert ids[start : start + shared] == ids[:shared]
    assert not any(row["loss_mask"][start : start + shared])
    assert row["loss_mask"][start + shared]
    shown = [one for one in member["stretches"] if one["thread"] == again["name"]]
    assert shared + sum(one["num_tokens"] for one in shown) == length[again["name"]]
    assert "Look at src/a.py" in text_of(member, first_asked["name"], "prompt")
    assert "Look at src/b.py" in text_of(member, second_asked["name"], "prompt")
    assert "So far: The comma was not read" in text_of(member, shortened["name"], "prompt")
    assert not text_of(member, "main", "prompt"), "it is the prompt of the group"


def test_turns_that_are_not_trained_are_kept_to_be_read_without_tokens(agent_run: Path) -> None:
    row = first_row(agent_run)
    untrained = [turn for turn in row["turns"] if not turn.get("trained", True)]
    assert row["turns"][-len(untrained) :] == untrained
    member = member_of(agent_run)
    assert [turn["text"] for turn in member["side_turns"]] == [turn["text"] for turn in untrained]
    assert {turn["text"].split()[0] for turn in untrained} == {"Komma", "tests/test_part_*.py,", "The"}
    everything = "".join(chain.from_iterable(one["texts"] for one in member["stretches"]))
    assert "Komma statt" not in everything


def test_files_without_the_keys_of_today_are_shown(agent_run: Path, tmp_path: Path) -> None:
    (row, *_) = read_trajectories(next((agent_run / "trajectories").glob("*.parquet")))
    for turn in row["turns"]:
        turn.pop("seconds")
    row["turns"] = [turn for turn in row["turns"] if turn.pop("trained", True)]
    ((member,),) = (group["members"] for group in groups_data([row], [])["groups"])
    assert all(one["trained"] for one in member["threads"])
    assert [one["num_turns"] for one in member["threads"]] == [3, 2, 1, 1, 2]
    assert member["side_turns"] == []
    assert sum(one["sampling_s"] for one in member["threads"]) == 0.0
    row["tokens"] = []
    ((member,),) = (group["members"] for group in groups_data([row], [])["groups"])
    assert [turn["text"] for turn in member["turns"]] == [turn["text"] for turn in row["turns"]]


def test_a_long_thread_leaves_space_for_the_others(tmp_path: Path) -> None:
    long, short = [Turn("", "stop", 2 * MAX_TOKENS_SHOWN)], [Turn("", "stop", 20)]
    member = shown(tmp_path, a_long_episode(long, short, long))
    # Of the threads after the first the prompt is shown, too.
    counts = [len(text_of(member, f"t{number}")) for number in range(3)]
    assert counts == [740, 1 + 20, 1 + 740]
    assert member["num_left_out"] == 4 * MAX_TOKENS_SHOWN + 20 - MAX_TOKENS_SHOWN


def test_long_observations_leave_space_for_what_the_policy_said(tmp_path: Path) -> None:
    turns = [Turn("", "stop", 50, "…", 5000) for _ in range(6)] + [Turn("", "stop", 50)]
    member = shown(tmp_path, a_long_episode(turns))
    said = [one for one in member["stretches"] if one["role"] == "policy"]
    observed = [one for one in member["stretches"] if one["role"] == "environment"]
    assert [len(one["texts"]) for one in said] == [50] * 7
    counts = [one["num_tokens"] - one["num_left_out"] for one in observed]
    assert counts == [MAX_OBSERVATION_SHOWN] * 5 + [0], "also those are listed of which nothing is shown"
    assert observed[0]["texts"] == ["x" * 150 + " … (4,700 more tokens) … " + "x" * 150]


def test_of_very_many_turns_the_first_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    member = shown(tmp_path, a_long_episode([Turn("", "stop", 30, "…", 10) for _ in range(2000)]))
    assert len(member["stretches"]) == MAX_TURNS_SHOWN
    assert member["threads"][0]["num_turns"] == 2000
    assert member["num_left_out"] == 2000 * 40 - 2 * MAX_TOKENS_SHOWN


def test_of_very_many_titles_the_first_are_listed_and_the_page_says_how_many_are_not(tmp_path: Path) -> None:
    titles = tuple(Turn("word " * 1000, "stop", 5, thread=f"title{number}") for number in range(2 * MAX_TURNS_SHOWN))
    one = a_long_episode([Turn("", "stop", 5)])
    assert one.episode is not None
    one.episode = replace(one.episode, side_turns=titles)
    member = shown(tmp_path, one)
    assert (len(member["threads"]), member["num_threads_left_out"]) == (MAX_THREADS_SHOWN, 701)
    assert len(member["side_turns"]) == MAX_TURNS_SHOWN
    assert sum(turn["text"].count("word ") for turn in member["side_turns"]) == MAX_TEXT_SHOWN // len("word ")
    assert member["side_turns"][4]["text"] == "… (5,000 more characters)"


def test_what_an_agent_and_its_tools_wrote_is_escaped(agent_run: Path) -> None:
    page = without_plotly(write_report(agent_run).read_text(encoding="utf-8"))
    assert "<script>document.title" not in page
    assert "<img" not in page
    assert HOSTILE in text_of(data_of(page)["groups"][0]["members"][0], member_of(agent_run)["threads"][4]["name"])


LOOK = """async page => {
  const soon = () => new Promise(resolve => setTimeout(resolve, 300));
  const tree = page.querySelector(".member .threads"), threads = [...tree.querySelectorAll(".thread")];
  const depth = one => (one === tree ? 0 : depth(one.parentElement) + (one.tagName === "UL"));
  const answer = {
    depths: threads.map(depth),
    opened: threads.map(one => one.open),
    untrained: threads.map(one => one.classList.contains("untrained")),
    filled: threads.filter(one => one.querySelector(".text")).length,
    folds: [...threads[0].querySelectorAll(".fold")].map(one => [one.open, one.getBoundingClientRect().height]),
    unreachable: [...page.querySelectorAll("#groups summary, #groups button")].filter(one => one.tabIndex < 0).length,
  };
  const forked = threads[1].querySelector("summary");
  forked.focus();
  forked.click();
  await soon();
  threads[0].open = false;
  const link = threads[1].querySelector(".note .link");
  link.focus();
  answer.link = page.activeElement.textContent;
  link.click();
  answer.parentOpen = threads[0].open;
  answer.wentTo = page.activeElement.textContent;
  const fold = threads[0].querySelector(".fold"), shading = page.getElementById("browse-shading");
  fold.open = true;
  const token = threads[0].querySelector(".token"), before = token.style.background;
  shading.value = "advantage";
  shading.dispatchEvent(new Event("change"));
  answer.reshaded = token.isConnected && before !== token.style.background && fold.open;
  for (let pass = 0; pass < 2; pass += 1) { // a thread has folds once it was opened
    for (const one of page.querySelectorAll("#groups details")) one.open = true;
    await soon();
  }
  answer.injected = page.querySelectorAll("#groups img, #groups script").length;
  const widths = bar => [...bar.children].map(part => parseFloat(part.style.width));
  answer.times = [...threads[0].querySelectorAll(".turn .times")].map(widths);
  answer.said = page.querySelector("#groups").textContent;
  return answer;
}"""


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_tree_of_an_episode_is_folded_linked_and_fits_phones_and_wide_screens(agent_run: Path) -> None:
    path = write_report(agent_run)
    threads = member_of(agent_run)["threads"]
    for result in inspect_page(path, [390, 1400], [".member", ".thread"], asked=LOOK):
        answer = result["answer"]
        assert not result["errors"]
        assert not result["too_wide"]
        assert result["page_width"] <= result["width"]
        assert "hostile" not in result["title"]
        assert answer["depths"] == [0, 1, 0, 0, 0, 0, 0, 0]
        assert answer["opened"] == [True, *[False] * 7]
        assert answer["untrained"] == [not one["trained"] for one in threads]
        assert answer["filled"] == 1, "the other threads are filled when they are opened"
        assert answer["folds"], "the listing is long"
        highest = 30 if result["width"] == 1400 else 70
        assert all(not is_open and height <= highest for is_open, height in answer["folds"]), answer["folds"]
        assert answer["unreachable"] == 0
        assert answer["link"] == "main after turn 2"
        assert answer["parentOpen"]
        assert answer["wentTo"].startswith("turn 2")
        assert answer["reshaded"], "without closing what is open"
        assert answer["injected"] == 0
        assert HOSTILE in answer["said"]
        assert "not trained" in answer["said"]
        of_main = [turn for turn in first_row(agent_run)["turns"] if turn["thread"] == "main"]
        seconds = [turn["seconds"] for turn in of_main if turn["role"] == "policy"]
        widths = [sampling for sampling, _ in answer["times"]]
        assert np.argsort(widths).tolist() == np.argsort(seconds).tolist()
        assert result["counts"] == {".member": 4, ".thread": 4 * len(threads)}
        assert "the same request was answered again" in answer["said"]
