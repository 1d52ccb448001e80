"""The configurations over which the fault seeds are spread, and `python -m tests.simulation.configurations 0:250`.

Seed s runs configuration s modulo their number, with s ÷ their number as the seed of the simulation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tests.simulation.wirings import simulate_wired

SMALL = ["profile=short", "sigma=1", "engines=3", "slots=6", "batch=3", "group_size=3", "steps=6"]
HEAVY, LIGHT = [*SMALL, "faults=heavy"], [*SMALL, "faults=light", "eta=1"]
EPISODES = [*HEAVY, "turns=3", "environments=8", "tool_mean_s=2"]

CONFIGURATIONS: dict[str, list[str]] = {
    "weights in flight": [*HEAVY, "eval_every=2"],
    "weights in flight, KV recomputed": [*HEAVY, "update_mode=recompute_kv", "eval_every=2"],
    "weights after a drain": [*HEAVY, "update_mode=drain", "eval_every=2"],
    "several versions": [*HEAVY, "update_mode=multi_version", "eval_every=2"],
    "few faults, waiting": [*LIGHT, "on_expiry=wait"],
    "few faults, trimming": [*LIGHT, "on_expiry=trim"],
    "few faults, dropping": [*LIGHT, "on_expiry=drop"],
    "checkpoints at every step, dropping": [*HEAVY, "checkpoint_every=1", "on_expiry=drop", "eta=1"],
    "stalls": [*SMALL, "faults=stalls", "eval_every=2"],
    "stalls, streamed": [*SMALL, "faults=stalls", "stream=true", "overlap=true", "eta=1"],
    "stalls, colocated": [*SMALL, "faults=stalls", "colocated=true", "eta=0"],
    "redundant groups": [*HEAVY, "surplus=2"],
    "redundant groups, eta 1": [*HEAVY, "surplus=2", "eta=1"],
    "redundant groups, synchronous": [*HEAVY, "surplus=2", "eta=0"],
    "redundant groups, adapted": [*HEAVY, "surplus=auto", "steps=12"],
    "redundant groups, adapted, publishes overlap": [*HEAVY, "surplus=auto", "overlap=true", "eta=1", "steps=12"],
    "redundant groups, adapted, synchronous": [*HEAVY, "surplus=auto", "eta=0", "steps=16", "checkpoint_every=1"],
    "streamed": [*HEAVY, "stream=true"],
    "streamed and trimmed": [*HEAVY, "stream=true", "on_expiry=trim"],
    "streamed, dropping": [*HEAVY, "stream=true", "on_expiry=drop"],
    "publishes overlap, synchronous": [*HEAVY, "overlap=true", "eta=0"],
    "publishes overlap": [*HEAVY, "overlap=true", "eta=1", "update_mode=recompute_kv"],
    "publishes overlap, eta 2": [*HEAVY, "overlap=true"],
    "colocated": [*HEAVY, "colocated=true", "eta=0"],
    "streams with quotas": [*HEAVY, "streams=3", "on_expiry=trim"],
    "a filter, sizes by task, survivors": [
        *HEAVY,
        *("filter_share=0.3", "sizing=true", "min_group_size=2", "max_retries=1"),
    ],
    "a reward without an opinion, survivors": [
        *HEAVY,
        *("abstain_share=0.35", "filter_share=0.1", "min_group_size=2", "max_retries=1"),
    ],
    "a reward without an opinion, resumed often": [*HEAVY, "abstain_share=0.4", "checkpoint_every=1", "on_expiry=drop"],
    "difficulty and stages": [*HEAVY, "streams=3", "hooks=true"],
    "bounded bytes": [*HEAVY, "max_live=13", "eta=3"],
    "all of it": [
        *HEAVY,
        *("streams=2", "filter_share=0.2", "sizing=true", "max_live=20", "eval_every=2"),
    ],
    "slow rewards": [*HEAVY, "reward_mean_s=10"],
    "adaptive concurrency": [*HEAVY, "adaptive_concurrency=true", "kv_tokens=2000"],
    "episodes": EPISODES,
    "episodes, several versions": [*EPISODES, "update_mode=multi_version", "eval_every=2"],
    "episodes, trimmed and streamed": [*EPISODES, "on_expiry=trim", "stream=true", "eta=1"],
    "episodes, publishes overlap": [*EPISODES, "overlap=true", "eta=1"],
}


def seeds_of(name: str, num_seeds: int) -> range:
    """The seeds of one configuration among the first `num_seeds`."""
    place, count = list(CONFIGURATIONS).index(name), len(CONFIGURATIONS)
    return range(len(range(place, num_seeds, count)))


def violations(numbers: Iterable[int]) -> Iterator[str]:
    """Run these fault seeds; yield what each finds, with what replays it."""
    names = list(CONFIGURATIONS)
    for number in numbers:
        seed, place = divmod(number, len(names))
        if (found := violation(names[place], seed)) is not None:
            yield found


def violation(name: str, seed: int) -> str | None:
    """Run one seed of a configuration."""
    found = simulate_wired(CONFIGURATIONS[name], seed).violation
    return None if found is None else f"{name}, seed {seed}: {found}\n  {' '.join(CONFIGURATIONS[name])}"


if __name__ == "__main__":
    begin, end = map(int, sys.argv[1].split(":"))
    sys.exit("\n".join(violations(range(begin, end))) or 0)
