"""What the scripts of the report draw, as JSON: sampled groups with their tokens, and windows of the timeline."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.platform.metrics.timeline import GROUPS, RUN

MAX_TOKENS_SHOWN = 1500
"""Sampled and observation tokens of a trajectory that are shown one by one; the page says how many are left out."""
MAX_TEXT_SHOWN = 20_000
"""Characters of a prompt, or of an answer without tokens, that are shown."""
MAX_GROUPS_BYTES = 5_000_000
"""Size of all groups as JSON. Further ones are left out, and the page says how many."""
STEPS_PER_WINDOW = 16
MAX_GROUP_SLICES = 4000
"""Slices of groups in a window. Whole lanes beyond it are left out, and the page says how many."""


def groups_data(rows: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trajectory browser's groups, newest step first.

    Args:
        rows: Sampled trajectories.
        answers: Answers of evaluations, with `evaluation_set`.

    Returns:
        `groups`, and `num_left_out`, the number of those beyond `MAX_GROUPS_BYTES`.
    """
    shown: list[dict[str, Any]] = []
    num_bytes = num_left_out = 0
    for source, of_source in (("training", rows), ("evaluation", answers)):
        by_group: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in of_source:
            name = row["group_id"] if source == "training" else row["task_id"]
            by_group.setdefault((row["step"], name), []).append(row)
        for _, members in sorted(by_group.items(), key=lambda item: -item[0][0]):
            group = _group(source, members)
            size = len(json.dumps(group))
            # Training groups take at most 70 % of the size, so that answers of evaluations are shown, too.
            if num_bytes + size > MAX_GROUPS_BYTES * (0.7 if source == "training" else 1.0):
                num_left_out += 1
                continue
            num_bytes += size
            shown.append(group)
    return {"groups": shown, "num_left_out": num_left_out}


def _group(source: str, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = members[0]
    rewards = [row["reward"] for row in members if row["reward"] is not None]
    mean = sum(rewards) / len(rewards) if len(rewards) > 1 else None
    return {
        "source": source,
        "set": first.get("evaluation_set", ""),
        "step": first["step"],
        "group": first["group_id"],
        "task": first["task_id"],
        "prompt": _shortened(first["prompt"]),
        "members": [_member(row, mean) for row in members],
    }


def _member(row: dict[str, Any], group_mean: float | None) -> dict[str, Any]:
    reward = row["reward"]
    return {
        "name": row["trajectory_id"],
        "reward": reward,
        "versus_group": None if group_mean is None or reward is None else reward - group_mean,
        "parts": row["reward_parts"],
        "end": row["finish_reason"],
        "num_tokens": row["num_tokens"],
        "spans": row["spans"],
        "staleness": row["staleness"],
        "retried_after": row["retried_after"],
        **(_tokens(row) if row.get("tokens") else {"turns": row["turns"] or [_whole(row)]}),
    }


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    """A trajectory without turns as one turn."""
    return {"role": "policy", "text": _shortened(row["response"]), "num_tokens": row["num_tokens"]}


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    """What each token is shown with: turns and what the environment said, thread after thread.

    A stretch has what its turn has, and per token: texts, and for sampled ones versions, logprobs (of the engine),
    trained (logprobs of the trainer) and advantages, where known.
    """
    mask, texts = row["loss_mask"], row["tokens"]
    versions = itertools.chain.from_iterable([version] * count for version, count in row["spans"])
    stretches: list[dict[str, Any]] = []
    position = num_shown = num_left_out = 0
    for name, _, length in row["threads"] or [["", None, len(mask)]]:
        end = position + length
        position = next((index for index in range(position, end) if mask[index]), end)
        for turn in [one for one in row["turns"] if not name or one["thread"] == name] or [_whole(row)]:
            places = range(position, position + turn["num_tokens"])
            position = places.stop
            is_sampled = turn["role"] == "policy"
            of_turn = [next(versions) for _ in places] if is_sampled else []
            kept = places[: max(0, MAX_TOKENS_SHOWN - num_shown)]
            num_shown += len(kept)
            num_left_out += len(places) - len(kept)
            stretch = {**turn, "texts": [texts[index] for index in kept]}
            del stretch["text"]
            if is_sampled:
                stretch |= {"versions": of_turn[: len(kept)], "logprobs": _numbers(row["behavior_logprobs"], kept)}
                if row["logprobs"]:
                    stretch |= {"trained": _numbers(row["logprobs"], kept)}
                    stretch |= {"advantages": _numbers(row["advantages"], kept)}
            if kept:
                stretches.append(stretch)
        position = end
    return {"stretches": stretches, "num_left_out": num_left_out}


def _numbers(values: Sequence[float], positions: Sequence[int]) -> list[float | None]:
    return [round(values[index], 3) if math.isfinite(values[index]) else None for index in positions]


def _shortened(text: str) -> str:
    left = len(text) - MAX_TEXT_SHOWN
    return text if left <= 0 else f"{text[:MAX_TEXT_SHOWN]}… ({left:,} more characters)"


def timeline_data(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Windows of the timeline: the first steps, some in the middle and the last ones.

    Returns:
        Of each window its label, its length in seconds, the names of the run's tracks, and the slices as
        [row, begin s, length s, name, what a tooltip says]; rows of groups come after those of the run.
    """
    slices = [event for event in events if event["ph"] == "X"]
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == RUN
    }
    steps = sorted((event for event in slices if event["pid"] == RUN and event["tid"] == 0), key=lambda one: one["ts"])
    last = max(0, len(steps) - STEPS_PER_WINDOW)
    starts = sorted({0, _with_groups(slices, steps, last // 2), last}) if steps else []
    return [_window(slices, steps[start : start + STEPS_PER_WINDOW], tracks, is_first=not start) for start in starts]


def _with_groups(slices: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], wanted: int) -> int:
    """The step near `wanted` from which on the groups of a long run are in the timeline."""
    begins = [step["ts"] for step in steps]
    trained = Counter(bisect(begins, event["ts"]) - 1 for event in slices if event["name"] == "train")
    best = max(trained.values(), default=0)
    starts = [index for index, count in trained.items() if 2 * count > best and 2 * trained[index - 1] <= best]
    return min((max(0, start) for start in starts), key=lambda start: abs(start - wanted), default=wanted)


def _window(
    slices: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], tracks: dict[int, str], *, is_first: bool
) -> dict[str, Any]:
    end = max(step["ts"] + step["dur"] for step in steps)
    # What precedes the first step, e.g. an evaluation, takes at most a third of the width.
    begin = min(event["ts"] for event in slices) if is_first else steps[0]["ts"]
    begin = max(begin, steps[0]["ts"] - (end - steps[0]["ts"]) // 2)
    inside = [event for event in slices if event["ts"] < end and event["ts"] + event["dur"] > begin]
    # Whole lanes, since a lane that ends early would look as if nothing was generated any more.
    counts = sorted(Counter(event["tid"] for event in inside if event["pid"] == GROUPS).items())
    totals = itertools.accumulate(count for _, count in counts)
    lanes = [lane for (lane, _), total in zip(counts, totals, strict=True) if total <= MAX_GROUP_SLICES]
    kept = set(lanes)
    of_groups = [event for event in inside if event["pid"] == GROUPS and event["tid"] in kept]
    places = [*((RUN, track) for track in sorted(tracks)), *((GROUPS, lane) for lane in lanes)]
    row_of = {place: row for row, place in enumerate(places)}
    shown = []
    for event in (*(one for one in inside if one["pid"] == RUN), *of_groups):
        since, until = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
        told = ", ".join(f"{key} {value}" for key, value in event["args"].items())
        row = row_of[event["pid"], event["tid"]]
        shown.append([row, round((since - begin) / 1e6, 4), round((until - since) / 1e6, 4), event["name"], told])
    return {
        "label": f"{steps[0]['name']} … {steps[-1]['name']}",
        "seconds": (end - begin) / 1e6,
        "tracks": [tracks[track] for track in sorted(tracks)],
        "num_lanes": len(lanes),
        "num_lanes_left_out": len(counts) - len(lanes),
        "slices": shown,
    }
