"""Groups on disk: what is read is what was written, and nothing of what is torn, damaged or of another format is."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from penstock.dataflow import saved_groups
from penstock.dataflow.errors import CheckpointError
from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.saved_groups import Failure, MemberProgress, OpenGroup, PartialTokens, decode, encode
from penstock.dataflow.trajectory import Alternatives, Episode, GroupPayload, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span

TURNS = (
    Turn("4", "stop", 2, "and now 2+2 ≠ 5?", 3, num_interruptions=1, thread="main", reasoning="<think>é</think>"),
    Turn("yes", "length", 1, thread="check"),
)


def played(index: int) -> Trajectory:
    """Two threads, of which the second begins with all tokens of the first one's prompt; an episode with two turns."""
    mask = np.array([False, False, True, True, False, False, True])
    return Trajectory(
        TrajectoryId(f"7/{index}"),
        TaskId("sums/7"),
        token_ids=np.arange(index, index + 7, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.1 - 1 / 3, 0).astype(np.float32),
        spans=(Span(1, 1), Span(2, 1), Span(1, 1)),
        prompt="2+2=",
        response="4yes",
        finish_reason="stop",
        reward=1 / 3,
        reward_parts={"thread/check": 0.1, "length": -1e-9},
        episode=Episode(TURNS, "max_turns", reward=None, parts={"quality": 0.5}, counts={"tool_calls": 2.0}),
        threads=(Thread("main", 4, "2+2="), Thread("check", 3, "2+2=", fork_of="main")),
        retried_after="timeout: 5 s",
        reasoning="<think>é</think>",
        alternatives=Alternatives.of([(5, 9), (), (index,)]),
    )


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert (found.flags.writeable, found.flags.aligned) == (True, True), "torch needs both"
    elif isinstance(expected, tuple):
        assert (type(found), len(found)) == (type(expected), len(expected))
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif is_dataclass(expected):
        assert type(found) is type(expected)
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


def test_a_payload_with_threads_and_an_episode_comes_back_bit_for_bit() -> None:
    values = np.linspace(-1, 0, 6, dtype=np.float32)
    payload = GroupPayload(GroupId(7), (played(0), played(1)), min_version=2, reference=values, proximal=values[::-1])
    assert_same(decode(encode(payload), "here"), payload)


def test_a_payload_of_single_turns_comes_back_with_what_it_lacks_as_none() -> None:
    plain = Trajectory(
        TrajectoryId("0/0"),
        TaskId("t"),
        np.array([3, 4], np.int32),
        np.array([False, True]),
        np.array([0, -1], np.float32),
        (Span(0, 1),),
        "p",
        "r",
        "length",
    )
    found = decode(encode(GroupPayload(GroupId(0), (plain,))), "here")
    assert_same(found, GroupPayload(GroupId(0), (plain,)))
    assert (found.values, found.trajectories[0].reward, found.trajectories[0].episode) == (None, None, None)


def test_open_groups_come_back_as_far_as_their_members_have_come() -> None:
    deltas = (
        TokenDelta((5, 6), (-0.5, -0.25), (Span(3, 2),), alternatives=Alternatives.of([(7,), ()])),
        TokenDelta((7,), (-0.125,), (Span(4, 1),), alternatives=Alternatives.of([(8, 9)])),
    )
    members = (
        MemberProgress(trajectory=played(0)),
        MemberProgress(deltas=deltas, failures=(Failure("env", "5 s"),)),
        MemberProgress(failures=(Failure("engine", "gone", is_final=True),), has_failed=True),
        MemberProgress(),
    )
    packed = OpenGroup(GroupId(9), members, is_judged=True).packed()
    (found,) = decode(encode((packed,)), "here")
    assert_same(found, packed)
    delta = found.members[1].partial.delta()
    assert delta[:3] == ((5, 6, 7), (-0.5, -0.25, -0.125), (Span(3, 2), Span(4, 1)))
    assert delta.alternatives.rows() == ((7,), (), (8, 9))
    assert found.packed() == found, "packed again, the tokens so far are kept"


def test_threads_have_the_alternatives_of_their_own_tokens() -> None:
    main, check = played(4).split_threads()
    assert main.alternatives is not None
    assert check.alternatives is not None
    assert (main.alternatives.rows(), check.alternatives.rows()) == (((5, 9), ()), ((4,),))
    assert main.alternatives.padded().tolist() == [[5, 9], [-1, -1]]
    assert Alternatives.of([]).rows() == ()
    assert Alternatives.of([(), ()]).padded().shape == (2, 0)


def test_no_part_of_a_torn_or_damaged_record_is_used() -> None:
    data = encode(GroupPayload(GroupId(7), (played(0),)))
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=rf"^spool/7: .* {length} bytes: it was torn or damaged"):
            decode(data[:length], "spool/7")
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match="torn or damaged"):
            decode(bytes(changed), "spool/7")


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_refused_with_both_numbers(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = GroupPayload(GroupId(7), (played(0),))
    with monkeypatch.context() as changed:
        changed.setattr(saved_groups, "FORMAT", other)
        data = encode(payload)
    with pytest.raises(CheckpointError, match=rf"^spool/7: has format {other}, .* reads format 3\. Resume with"):
        decode(data, "spool/7")


def test_the_form_is_that_of_the_documentation() -> None:
    """Pinned by a record put together by hand: a reader of another program, or of a later version, relies on it."""
    header = json.dumps(
        {
            "format": 3,
            "arrays": [["<i4", [2]], ["<f4", [2]]],
            "value": {
                "@": "PartialTokens",
                "of": {
                    "token_ids": {"@": "array", "of": 0},
                    "logprobs": {"@": "array", "of": 1},
                    "spans": [{"@": "Span", "of": [3, 2]}],
                    "alternatives": None,
                },
            },
        }
    ).encode()
    body = struct.pack("<Q", len(header)) + header + struct.pack("<2i", 8, 9) + struct.pack("<2f", -0.5, -1.0)
    found = decode(body + struct.pack("<I", zlib.crc32(body)), "here")
    assert_same(found, PartialTokens(np.array([8, 9], np.int32), np.array([-0.5, -1], np.float32), (Span(3, 2),)))
