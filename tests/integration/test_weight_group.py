"""Weights between processes over gloo: exact, at the plan's bytes, relayed, and with named errors when one is lost.

The processes run weight_group_stories.py. The test process serves the store.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.weights_plan import bytes_per_link, wire_bytes
from penstock.weights.transport.process_group.group import serve_store
from tests.integration.weight_group_stories import BACK, BUCKET_BYTES, HOST, PROGRAM, STORIES, Story, plan_to
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.integration


def told(story: str, folder: Path, may_die: set[int]) -> list[Story]:
    """The observations of each process of a story."""
    store = serve_store(HOST)
    num_processes = STORIES[story][1]
    arguments = [(story, rank, store.port, folder) for rank in range(num_processes)]
    run_ranks(PROGRAM, arguments, timeout_s=120, may_die=frozenset(may_die))
    files = [folder / f"{story}{rank}" for rank in range(num_processes)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def links_of(processes: list[Story], chapter: str) -> dict[tuple[int, int], int]:
    """Bytes from group rank to group rank, as the senders count them; the receivers must count the same."""
    count = {
        side: {
            (rank, int(peer)) if side == "sent" else (int(peer), rank): num_bytes
            for rank, process in enumerate(processes)
            for peer, num_bytes in process[chapter][side].items()
        }
        for side in ("sent", "received")
    }
    assert count["sent"] == count["received"]
    return count["sent"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[Story]:
    return told("exact", tmp_path_factory.mktemp("group"), set())


@pytest.fixture(scope="module")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> list[Story]:
    return told("relayed", tmp_path_factory.mktemp("group"), {0, 3})


@pytest.mark.parametrize("chapter", ["v1", "v2", "bfloat16", "again"])
def test_engines_hold_exactly_what_vllm_would_slice(exact: list[Story], chapter: str) -> None:
    assert [process[chapter]["wrong"] for process in exact] == [[]] * 4


@pytest.mark.parametrize(("chapter", "item_bytes"), [("v1", 4), ("v2", 4), ("bfloat16", 2)])
def test_every_link_carries_the_bytes_of_the_plan(exact: list[Story], chapter: str, item_bytes: int) -> None:
    plan = plan_to(2, item_bytes)
    expected = {(src, 2 + dst): num_bytes for (src, dst), num_bytes in bytes_per_link(plan).items()}
    assert links_of(exact, chapter) == expected
    assert len(plan.buckets) > 20


def test_no_process_makes_more_memory_than_a_bucket(exact: list[Story], relayed: list[Story]) -> None:
    chapters = [process[chapter] for process in exact for chapter in ("v1", "v2", "bfloat16")]
    chapters += [relayed[rank]["three"] for rank in (1, 2, 4)]
    assert all(0 < chapter["extra_bytes"] <= BUCKET_BYTES for chapter in chapters)
    assert all(chapter["allocated_bytes"] == chapter["extra_bytes"] for chapter in chapters)


@pytest.mark.parametrize("codec", ["full", "delta", "int8_delta"])
def test_what_arrives_through_a_codec_is_what_the_sums_of_the_senders_say(relayed: list[Story], codec: str) -> None:
    for version in range(4):
        chapters = [process[codec][version] for process in relayed if codec in process]
        sums: Counter[str] = Counter()
        for chapter in chapters[:2]:
            for rank, buffer, checksum in chapter["sums"]:
                assert rank == 0
                sums[buffer] += checksum
        engines = chapters[2:]
        assert len(engines) == 2, "the one between them dies before it writes"
        assert all(chapter["checksums"] == {name: total % 2**64 for name, total in sums.items()} for chapter in engines)
        largest_step = 0.0 if codec != "int8_delta" else 0.5
        assert all(chapter["off"] <= largest_step for chapter in engines)


def test_a_delta_sends_what_has_changed_and_relays_it_as_it_is(relayed: list[Story]) -> None:
    whole, first, second = relayed[0]["full"][1], *relayed[0]["delta"][:2]
    assert sum(first["sent"].values()) > sum(whole["sent"].values()) * 0.99, "nothing is known of the receivers"
    assert sum(second["sent"].values()) < 0.12 * sum(whole["sent"].values())
    changed, elements = second["changed"]
    assert changed == pytest.approx(elements / 50, rel=0.05)
    sent_by_trainers = sum(sum(relayed[rank]["delta"][1]["sent"].values()) for rank in (0, 1))
    assert sum(relayed[2]["delta"][1]["sent"].values()) == pytest.approx(sent_by_trainers, rel=0.01)


def test_the_way_back_is_the_identity(exact: list[Story]) -> None:
    assert [process["back"]["wrong"] for process in exact] == [[]] * 4
    sent = {(rank - 2, int(peer)): n for rank in (2, 3) for peer, n in exact[rank]["back"]["sent"].items()}
    assert sent == bytes_per_link(BACK)


def test_it_coexists_with_the_default_group(exact: list[Story]) -> None:
    assert [process.get("default group") for process in exact] == [2.0, 2.0, None, None]


def test_members_that_disagree_are_named(exact: list[Story]) -> None:
    assert "weights v7: training rank 0 is about to transfer weights v6 plan" in exact[1]["disagreement"]
    assert "weights v6: training rank 1 is about to transfer weights v7 plan" in exact[0]["disagreement"]
    assert all("Join one of the next generation" in process["closed"] for process in exact)


def test_the_trainer_sends_the_same_to_three_replicas_as_to_one(relayed: list[Story]) -> None:
    plan = plan_to(1)
    to_first = {(src, 2): num_bytes for (src, _), num_bytes in bytes_per_link(plan).items()}
    assert links_of(relayed[:3], "one") == to_first
    assert links_of(relayed[:3] + relayed[4:], "survivors")[2, 3] == wire_bytes(plan)
    for rank in (0, 1, 2, 4):
        assert relayed[rank]["three"]["wrong"] == []
    assert relayed[1]["three"]["sent"] == {"2": to_first[1, 2]}
    assert relayed[0]["three"]["sent"] == {"2": to_first[0, 2]}
    assert relayed[2]["three"]["sent"] == relayed[4]["three"]["received"] | {"3": wire_bytes(plan)}


def test_a_member_that_never_joins_is_named(relayed: list[Story]) -> None:
    for rank in (0, 1, 2, 4):
        assert "5 of 6 members are present, engine-3 rank 0 did not join within 2 s" in relayed[rank]["absent"]


def test_an_engine_that_dies_is_named_on_all_others_and_a_group_without_it_works(relayed: list[Story]) -> None:
    for rank in (2, 4):
        assert re.search(
            r"^weights v3: engine-\d rank 0, bucket \d+ of \d+: engine-1 rank 0 is lost after [\d.]+ s "
            r"\(time-out 8 s\) with [\d,]+ bytes of this bucket and [\d,]+ of the version pending\. ",
            relayed[rank]["lost"],
        )
    for rank in (0, 1):
        assert re.search(
            rf"^weights v3: training rank {rank}, .* engine-0 rank 0 is lost .* It has reported: weights v3: engine-0 "
            r"rank 0, .*: engine-1 rank 0 is lost",
            relayed[rank]["lost"],
        )
    for rank in (0, 1, 2, 4):
        assert relayed[rank]["survivors"]["wrong"] == []


def test_an_engine_that_hangs_is_named_after_the_time_out(relayed: list[Story]) -> None:
    assert "engine-2 rank 0 is too late after 1.5 s (time-out 1.5 s)" in relayed[2]["late"]
    for rank in (0, 1):
        assert re.search(r"engine-0 rank 0 is (lost|too late)", relayed[rank]["late"])


def test_a_death_in_the_middle_of_a_message_is_detected_before_the_time_out(relayed: list[Story]) -> None:
    assert not relayed[2]["all was received"]
    assert relayed[2]["in the middle of a message"] == "lost"
