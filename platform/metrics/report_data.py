"""What the scripts of the report draw, as JSON: sampled groups with their tokens, and windows of the timeline."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.dataflow.trajectory import MAIN_THREAD
from penstock.platform.metrics.timeline import GROUPS, RUN

MAX_TOKENS_SHOWN = 1500
"""Sampled tokens of a trajectory that are shown, and others; the page says how many are left out."""
MAX_OBSERVATION_SHOWN = 300
"""Tokens, first and last ones, that are shown of an observation and of the prompt of a thread, among those."""
MAX_TURNS_SHOWN = 400
"""Turns and observations of a trajectory that are listed, though none of their tokens may be shown."""
MAX_THREADS_SHOWN = 100
"""Threads of a trajectory that are listed; the page says how many are left out."""
MAX_TEXT_SHOWN = 20_000
"""Characters of a prompt, or of all turns without tokens, that are shown."""
MAX_GROUPS_BYTES = 5_000_000
"""Size of all groups as JSON. Further ones are left out, and the page says how many."""
STEPS_PER_WINDOW = 16
MAX_GROUP_SLICES = 4000
"""Slices of groups in a window. Whole lanes beyond it are left out, and the page says how many."""


def groups_data(rows: Iterable[dict[str, Any]], answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The trajectory browser's groups. Of each source the rows of a group follow one another.

    Args:
        rows: Sampled trajectories, newest step first.
        answers: Answers of evaluations, with `evaluation_set`, newest step first.

    Returns:
        `groups`, and `num_left_out`, the number of those beyond `MAX_GROUPS_BYTES`.
    """
    shown: list[dict[str, Any]] = []
    num_bytes = num_left_out = 0
    for source, of_source in (("training", rows), ("evaluation", answers)):
        for _, members in itertools.groupby(of_source, key=lambda row: (row["step"], row["group_id"])):
            group = _group(source, list(members))
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
        "members": [_member(row, mean, has_own_prompt=row["prompt"] != first["prompt"]) for row in members],
    }


def _member(row: dict[str, Any], group_mean: float | None, *, has_own_prompt: bool) -> dict[str, Any]:
    reward, threads = row["reward"], _threads(row)
    facts = _facts_of_threads(row, threads)
    if row.get("tokens"):
        said = _tokens(row, threads, has_own_prompt=has_own_prompt)
    else:
        said = {"turns": _texts(filter(_is_trained, row["turns"])) or _texts([_whole(row)])}
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
        "threads": facts[:MAX_THREADS_SHOWN],
        "num_threads_left_out": max(0, len(facts) - MAX_THREADS_SHOWN),
        "side_turns": _texts(turn for turn in row["turns"] if not _is_trained(turn)),
        **said,
    }


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    """A trajectory without turns as one turn."""
    return {"role": "policy", "thread": MAIN_THREAD, "text": row["response"], "num_tokens": row["num_tokens"]}


def _texts(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns without tokens, each and all together with at most so much text."""
    shown, left = [], MAX_TEXT_SHOWN
    for turn in itertools.islice(turns, MAX_TURNS_SHOWN):
        shown.append({**turn, "text": _shortened(turn["text"], left)})
        left = max(0, left - len(turn["text"]))
    return shown


def _is_trained(turn: dict[str, Any]) -> bool:
    """Older files have trained turns only, which do not say so."""
    return bool(turn.get("trained", True))


class _Thread(NamedTuple):
    """Where a trained thread is in the arrays of its trajectory: begin ≤ own ≤ first ≤ end."""

    name: str
    fork_of: str | None
    turns: list[dict[str, Any]]
    """What was said in it; empty if the trajectory has a single turn."""
    begin: int
    """Its first token."""
    own: int
    """The first token that its parent does not have; `begin` if it forks none."""
    first: int
    """The first sampled token."""
    end: int
    """After its last token."""
    after_turn: int
    """Turns of its parent that it begins with."""


def _threads(row: dict[str, Any]) -> list[_Thread]:
    """The trained threads in their order, in which a thread comes after the one that it forks."""
    ids, mask = row["token_ids"], row["loss_mask"]
    found: dict[str, _Thread] = {}
    begin = 0
    for name, fork_of, length in row["threads"] or [["", None, len(mask)]]:
        turns = [turn for turn in row["turns"] if _is_trained(turn) and name in ("", turn["thread"])]
        end = begin + length
        first = next((index for index in range(begin, end) if mask[index]), end)
        own, after_turn = begin, 0
        above = found.get(fork_of)
        if above is not None:
            pairs = zip(ids[begin:first], ids[above.begin : above.end], strict=False)
            own += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            ends = itertools.accumulate((turn["num_tokens"] for turn in above.turns), initial=above.first - above.begin)
            said = zip(above.turns, itertools.islice(ends, 1, None), strict=True)
            after_turn = sum(turn["role"] == "policy" and turn_end <= own - begin for turn, turn_end in said)
        found[name] = _Thread(name or MAIN_THREAD, above and above.name, turns, begin, own, first, end, after_turn)
        begin = end
    return list(found.values())


def _facts_of_threads(row: dict[str, Any], threads: Sequence[_Thread]) -> list[dict[str, Any]]:
    """What the page says of the threads of an episode, those that are not trained last.

    Numbers of turns and tokens are of the policy, `num_shared` of the tokens that a fork has from its parent, `num_own`
    of the others before its first turn.
    """
    facts = [
        {"name": one.name, "trained": True, "fork_of": one.fork_of, "after_turn": one.after_turn}
        | {"num_shared": one.own - one.begin, "num_own": one.first - one.own, **_sums(one.turns)}
        for one in threads
        if one.turns
    ]
    untrained: dict[str, list[dict[str, Any]]] = {}
    for turn in row["turns"]:
        if not _is_trained(turn):
            untrained.setdefault(turn["thread"], []).append(turn)
    facts += [{"name": name, "trained": False, "fork_of": None, **_sums(turns)} for name, turns in untrained.items()]
    return facts


def _sums(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    sampled = [turn for turn in turns if turn["role"] == "policy"]
    observed = [turn for turn in turns if turn["role"] != "policy"]
    return {
        "num_turns": len(sampled),
        "num_tokens": sum(turn["num_tokens"] for turn in sampled),
        "sampling_s": round(sum(turn.get("seconds", 0.0) for turn in sampled), 3),
        "environment_s": round(sum(turn.get("seconds", 0.0) for turn in observed), 3),
    }


def _tokens(row: dict[str, Any], threads: Sequence[_Thread], *, has_own_prompt: bool) -> dict[str, Any]:
    """What each token is shown with: turns and what the environment said, thread after thread.

    A stretch has what its turn has, and per sampled token: texts, versions, logprobs (of the engine), trained (logprobs
    of the trainer) and advantages, where known; of others one text. The prompt of a thread is a stretch, too: of a fork
    what follows the tokens of its parent, of the first thread if it is not that of the group.
    """
    texts = row["tokens"]
    versions = itertools.chain.from_iterable([version] * count for version, count in row["spans"])
    said: list[list[dict[str, Any]]] = []
    for index, thread in enumerate(threads):
        prompt = {"role": "prompt", "thread": thread.name, "num_tokens": thread.first - thread.own}
        has_prompt = prompt["num_tokens"] and (index or has_own_prompt)
        said.append([*([prompt] if has_prompt else []), *(thread.turns or [_whole(row)])])
    shares = {
        is_sampled: _shares(
            [sum(_num_shown(turn) for turn in turns if (turn["role"] == "policy") == is_sampled) for turns in said],
            MAX_TOKENS_SHOWN,
        )
        for is_sampled in (True, False)
    }
    stretches: list[dict[str, Any]] = []
    num_left_out = 0
    for number, (thread, turns) in enumerate(zip(threads, said, strict=True)):
        position = thread.first
        for turn in turns:
            is_sampled = turn["role"] == "policy"
            begin = thread.own if turn["role"] == "prompt" else position
            position = begin + turn["num_tokens"]
            count = min(_num_shown(turn), shares[is_sampled][number])
            shares[is_sampled][number] -= count
            not_shown = turn["num_tokens"] - count
            num_left_out += not_shown
            stretch = {key: value for key, value in turn.items() if key != "text"} | {"num_left_out": not_shown}
            if is_sampled:
                kept = range(begin, begin + count)
                of_turn = list(itertools.islice(versions, turn["num_tokens"]))
                stretch |= {"versions": of_turn[:count], "logprobs": _numbers(row["behavior_logprobs"], kept)}
                if row["logprobs"]:
                    stretch |= {"trained": _numbers(row["logprobs"], kept)}
                    stretch |= {"advantages": _numbers(row["advantages"], kept)}
                stretch["texts"] = [texts[place] for place in kept]
            else:
                until, since = begin + (count + 1) // 2, position - count // 2
                gap = [f" … ({not_shown:,} more tokens) … "] if not_shown and count else []
                stretch["texts"] = ["".join([*texts[begin:until], *gap, *texts[since:position]])]
            if count or len(stretches) < MAX_TURNS_SHOWN:
                stretches.append(stretch)
    return {"stretches": stretches, "num_left_out": num_left_out}


def _num_shown(turn: dict[str, Any]) -> int:
    """Tokens of a turn that are shown if there is space: all that were sampled, some of the others."""
    count: int = turn["num_tokens"]
    return count if turn["role"] == "policy" else min(count, MAX_OBSERVATION_SHOWN)


def _shares(wanted: Sequence[int], total: int) -> list[int]:
    """Divide `total` evenly; what those that want little leave is for the others."""
    shares = [0] * len(wanted)
    for num_left, index in zip(
        range(len(wanted), 0, -1), sorted(range(len(wanted)), key=wanted.__getitem__), strict=True
    ):
        shares[index] = min(wanted[index], total // num_left)
        total -= shares[index]
    return shares


def _numbers(values: Sequence[float], positions: Sequence[int]) -> list[float | None]:
    return [round(values[index], 3) if math.isfinite(values[index]) else None for index in positions]


def _shortened(text: str, most: int = MAX_TEXT_SHOWN) -> str:
    left = len(text) - most
    return text if left <= 0 else f"{text[:most]}… ({left:,} more characters)"


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
