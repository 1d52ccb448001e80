"""What asynchrony, updates in flight, routing and redundant groups are worth, simulated by the shipping controller.

    python benchmarks/comparisons.py NAME [--seeds 0:3]     (one to some minutes; prints one JSON object)

A comparison gives its figures, its cost model and the ceiling: what the ratio would be if no device or slot ever
waited. Nothing here is fitted. Rates are those of the steady state: the steps while the window fills at the start and
empties at the end are left out, on both sides. The figures of docs/concepts/simulation.md are from here.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.simulation import Outcome, simulate
from penstock.platform.simulator.sweep import Bias, rounded

TRAIN_SHARE = 0.25
"""Training a batch on all devices ÷ generating it on all devices, balanced by tokens."""
STEADY_STEPS = 12
"""Number of measured steps in the steady state."""


def must_complete(config: SimulationConfig, seed: int) -> Outcome:
    """Simulate one seed; it must complete."""
    outcome = simulate(config, seed)
    if outcome.violation is not None:
        raise PenstockError(f"simulate: {outcome.violation} (seed {seed})")
    return outcome


def enough_steps(eta: int) -> int:
    """Steps to fill the pipeline (two windows), to measure, and to empty it (one window)."""
    return 2 * (eta + 1) + STEADY_STEPS + eta + 1


def steady_step_s(outcome: Outcome, config: SimulationConfig) -> float:
    """Seconds per step between the filling and the emptying of the window."""
    ends = [end for end, _, _ in outcome.trained.steps]
    last = len(ends) - 1 - (config.eta + 1)
    first = min(2 * (config.eta + 1), last - 1)
    return (ends[last] - ends[first]) / (last - first)


def step_seconds(config: SimulationConfig, seeds: Iterable[int]) -> float:
    """Seconds per training step in the steady state, mean over seeds."""
    times = [steady_step_s(must_complete(config, seed), config) for seed in seeds]
    return sum(times) / len(times)


def with_train_share(values: Mapping[str, Any]) -> SimulationConfig:
    """Set the cost of training to `TRAIN_SHARE` of token-balanced generation on the same devices."""
    config = SimulationConfig(**values)
    token_s = (config.decode_base_s + config.decode_per_sequence_s * config.slots) / config.slots
    return config.model_copy(update={"train_s_per_token": TRAIN_SHARE * token_s, "train_fixed_s": 1e-3})


MODELS: dict[str, dict[str, float]] = {
    "constant step": {"decode_per_sequence_s": 0.0},
    "step grows with batch": {},
}
"""Two models of decoding: every slot has its own speed (what makes stragglers costliest, and the usual one in such
comparisons), and the default of platform/simulator/config.py, where a straggler alone runs 1.3 times as fast."""

LONGTAIL = {
    "profile": "longtail",
    "grain": 32,
    "slots": 16,
    "batch": 64,
    "group_size": 8,
    "reward_workers": 512,
}
DEVICES = 32
SPLITS = (22, 24, 26)
"""Devices that generate; the others train."""


def async_vs_sync(seeds: Iterable[int]) -> dict[str, Any]:
    """Asynchronous training against the best synchronous arrangement of 32 devices × 16 slots, 512 trajectories."""
    seeds = list(seeds)
    figures: dict[str, Any] = {
        "cost_model": f"{DEVICES} devices x 16 slots; 64 groups x 8; lognormal mean 4096, sigma 1.0, cap 32768; "
        f"training on all devices takes {TRAIN_SHARE} of token-balanced generation on all; publish 0.56 s during "
        "generation and 0.1 s of stall, colocated 0 s and 0.1 s; rewards 0.1 s",
    }
    for name, decode in MODELS.items():
        base = with_train_share({**LONGTAIL, **decode})
        arrangement, best = best_synchronous(base, seeds)
        figures[name] = {"sync_step_s": rounded(best), "sync_best": arrangement}
        figures[name]["ceiling"] = rounded(best / perfect_step_s(base))
        for policy, stream in (("wait", False), ("wait", True), ("trim", True)):
            for eta in (1, 2, 4):
                times = {
                    d: step_seconds(split(base, d, eta=eta, on_expiry=policy, stream=stream), seeds) for d in SPLITS
                }
                d = min(times, key=times.__getitem__)
                figures[name][f"{policy}{' streamed' if stream else ''} eta={eta}"] = {
                    "ratio": rounded(best / times[d]),
                    "split": f"{d}+{DEVICES - d}",
                }
    return figures


def best_synchronous(base: SimulationConfig, seeds: Iterable[int]) -> tuple[str, float]:
    """The fastest on-policy arrangement and its seconds per step: taking turns, or split, whole batches or streamed."""
    sync = {"colocated": step_seconds(colocated(base), seeds)}
    for d in SPLITS:
        sync[f"{d}+{DEVICES - d}"] = step_seconds(split(base, d, eta=0), seeds)
        sync[f"{d}+{DEVICES - d} streamed"] = step_seconds(split(base, d, eta=0, stream=True), seeds)
    best = min(sync, key=sync.__getitem__)
    return best, sync[best]


def colocated(base: SimulationConfig) -> SimulationConfig:
    """All devices generate, then all train."""
    changes = {"engines": DEVICES, "trainer_devices": DEVICES, "colocated": True, "eta": 0, "weight_bytes": 0}
    return base.model_copy(update={**changes, "steps": enough_steps(0)})


def split(
    base: SimulationConfig, engines: int, *, eta: int, on_expiry: str = "wait", stream: bool = False
) -> SimulationConfig:
    """Some devices generate, the others train."""
    changes = {"engines": engines, "trainer_devices": DEVICES - engines, "eta": eta, "on_expiry": on_expiry}
    return base.model_copy(update={**changes, "stream": stream, "steps": enough_steps(eta)})


def perfect_step_s(config: SimulationConfig) -> float:
    """Seconds of a step if no device ever waited: the ceiling of any schedule."""
    token_s = (config.decode_base_s + config.decode_per_sequence_s * config.slots) / config.slots
    tokens = config.batch * config.group_size * config.lengths.mean
    return (1 + TRAIN_SHARE) * tokens * token_s / DEVICES


def busy_step_s(config: SimulationConfig) -> float:
    """Seconds of a step if no slot of the engines and no device of the trainer, as they are split, ever waited."""
    token_s = (config.decode_base_s + config.decode_per_sequence_s * config.slots) / config.slots
    tokens = config.batch * config.group_size * config.lengths.mean
    return tokens * max(token_s / config.engines, config.train_s_per_token / config.trainer_devices)


POLICIES = (("wait", False), ("wait", True), ("trim", True), ("drop", True))
"""(on_expiry, stream_micro_batches) compared."""


def evict_bias(seeds: Iterable[int]) -> dict[str, Any]:
    """Speed, bias and tokens lost of the expiry policies over η."""
    seeds = list(seeds)
    base = with_train_share(LONGTAIL)
    arrangement, best = best_synchronous(base, seeds)
    figures: dict[str, Any] = {
        "cost_model": "as async-vs-sync, step grows with batch, split 26+6; 4 windows and 24 steps each",
        "sync_best": arrangement,
        "ceiling": rounded(best / perfect_step_s(base)),
    }
    for policy, stream in POLICIES:
        for eta in (1, 2, 4, 8):
            config = split(base, 26, eta=eta, on_expiry=policy, stream=stream)
            config = config.model_copy(update={"steps": enough_steps(eta) + STEADY_STEPS + eta + 1})
            outcomes = [must_complete(config, seed) for seed in seeds]
            bias = Bias()
            for outcome in outcomes:
                bias.add(outcome, config)
            times = [steady_step_s(outcome, config) for outcome in outcomes]
            trimmed = sum(outcome.trained.trimmed_tokens for outcome in outcomes)
            figures[f"{policy}{' streamed' if stream else ''} eta={eta}"] = {
                "speed": rounded(best * len(times) / sum(times)),
                "length_bias": rounded(bias.length_bias),
                "kept_p99": rounded(bias.kept_p99),
                "trimmed_token_share": rounded(trimmed / sum(bias.trained)),
                "max_staleness_seen": max(outcome.trained.max_staleness for outcome in outcomes),
            }
    return figures


def inflight_vs_drain(seeds: Iterable[int]) -> dict[str, Any]:
    """Weight updates under running requests against draining the engines first, at η = 1."""
    seeds = list(seeds)
    figures: dict[str, Any] = {"cost_model": "as async-vs-sync at eta=1, on_expiry=wait, split 24+8"}
    for name, decode in MODELS.items():
        base = split(with_train_share({**LONGTAIL, **decode}), 24, eta=1)
        flight = step_seconds(base, seeds)
        drain = step_seconds(base.model_copy(update={"update_mode": "drain"}), seeds)
        figures[name] = {"inflight_step_s": rounded(flight), "drain_step_s": rounded(drain)}
        figures[name] |= {"ratio": rounded(drain / flight), "ceiling": rounded(drain / busy_step_s(base))}
    return figures


ENVIRONMENTS = 32
TURNS, TOOL_MEAN_S, TOOL_SIGMA, TOOL_CAP_S = 6, 6.0, 1.5, 300.0
"""Of an episode: turns on average, and what a tool call between two of them takes."""


def rollout_granularity(seeds: Iterable[int]) -> dict[str, Any]:
    """Environments with tool latency: a new episode as soon as one ends, against a barrier per batch."""
    seeds = list(seeds)
    base = SimulationConfig(
        profile="short",
        mean_tokens=600,
        cap_tokens=4000,
        turns=TURNS,
        tool_mean_s=TOOL_MEAN_S,
        tool_sigma=TOOL_SIGMA,
        tool_cap_s=TOOL_CAP_S,
        environments=ENVIRONMENTS,
        engines=2,
        slots=ENVIRONMENTS,
        batch=16,
        group_size=4,
        train_fixed_s=1e-3,
    )
    episodes = base.batch * base.group_size
    balanced_s = episodes * episode_s(base) / ENVIRONMENTS
    tokens = episodes * base.lengths.mean
    base = base.model_copy(update={"train_s_per_token": TRAIN_SHARE * balanced_s / tokens})
    figures: dict[str, Any] = {
        "cost_model": f"{ENVIRONMENTS} environments, one episode each, of 1 to {2 * TURNS - 1} turns; a tool call "
        f"takes lognormal time, mean {TOOL_MEAN_S:.0f} s, sigma {TOOL_SIGMA}, at most {TOOL_CAP_S:.0f} s; 600 tokens "
        "per episode on 2 engines, default decode costs; batches of 16 groups x 4; training takes "
        f"{TRAIN_SHARE} of a balanced batch",
    }
    for name, eta in (("barrier", 0), ("eta=2", 2), ("eta=4", 4)):
        config = base.model_copy(update={"eta": eta, "steps": enough_steps(eta) + 12})
        outcomes = [must_complete(config, seed) for seed in seeds]
        use = [outcome.environment_s / (ENVIRONMENTS * outcome.train_s) for outcome in outcomes]
        figures[name] = {
            "utilisation": rounded(sum(use) / len(use)),
            "step_s": rounded(sum(steady_step_s(o, config) for o in outcomes) / len(outcomes)),
        }
    for name in ("eta=2", "eta=4"):
        figures[name]["ratio"] = rounded(figures["barrier"]["step_s"] / figures[name]["step_s"])
    figures["ceiling"] = {"utilisation": 1.0, "ratio": rounded(figures["barrier"]["step_s"] / balanced_s)}
    return figures


def episode_s(config: SimulationConfig) -> float:
    """Seconds of an average episode in a full environment: its tokens, one after another, and its tools."""
    step_s = config.decode_base_s + config.decode_per_sequence_s * config.environments / config.engines
    return config.lengths.mean * step_s + (config.turns - 1) * config.tool_mean_s


def prefix_routing(seeds: Iterable[int]) -> dict[str, Any]:
    """Makespan of one batch of groups with long prompts: members where their prefix is, or on any idle engine."""
    seeds = list(seeds)
    base = SimulationConfig(
        profile="short",
        prompt_tokens=8192,
        engines=16,
        slots=16,
        batch=128,
        group_size=8,
        eta=0,
        steps=4,
        train_fixed_s=1e-3,
        train_s_per_token=1e-9,
        weight_bytes=0,
        swap_s=0.0,
    )
    figures: dict[str, Any] = {
        "cost_model": "16 engines x 16 slots; 128 groups x 8; prompts of 8192 tokens at 28 us each, answers lognormal "
        "mean 256, sigma 0.5; default decode costs; a prompt is prefilled once per engine that sees it; rewards 0.1 s",
    }
    spans = {}
    for routing in ("prefix_aware", "least_loaded"):
        outcomes = [must_complete(base.model_copy(update={"routing": routing}), seed) for seed in seeds]
        spans[routing] = sum(steady_step_s(outcome, base) for outcome in outcomes) / len(outcomes)
        prefilled = sum(outcome.engines.prefilled for outcome in outcomes)
        total = prefilled + sum(outcome.engines.prefix_hits for outcome in outcomes)
        figures[routing] = {"makespan_s": rounded(spans[routing])}
        figures[routing]["recomputed_prefix_share"] = rounded(prefilled / total)
    figures["ratio"] = rounded(spans["least_loaded"] / spans["prefix_aware"])
    prefill_s = base.batch * base.prompt_tokens * base.prefill_s_per_token / base.engines  # each prompt once
    figures["ceiling"] = rounded(spans["least_loaded"] / (busy_step_s(base) + prefill_s))
    return figures


def redundant_groups(seeds: Iterable[int]) -> dict[str, Any]:
    """Useful groups per second of 16 workers when b of them are redundant: the first 16 − b groups train."""
    seeds = list(seeds)
    figures: dict[str, Any] = {
        "cost_model": "16 groups x 2 at once; exponential lengths, mean 2048; every slot has its own speed; eta=0; "
        "training and publishing take next to nothing",
    }
    rates = {}
    for surplus in (0, 1, 2, 4):
        config = SimulationConfig(
            profile="exponential",
            decode_per_sequence_s=0.0,
            engines=2,
            slots=16,
            batch=16 - surplus,
            surplus=surplus,
            group_size=2,
            eta=0,
            steps=40,
            train_fixed_s=1e-3,
            train_s_per_token=1e-9,
            weight_bytes=0,
            swap_s=0.0,
            reward_mean_s=0.0,
        )
        outcomes = [must_complete(config, seed) for seed in seeds]
        trained = sum(len(outcome.trained.steps) for outcome in outcomes) * config.batch
        rates[surplus] = trained / sum(outcome.train_s for outcome in outcomes)
        cancelled = sum(outcome.counts.dropped for outcome in outcomes if outcome.counts) / trained
        wasted = 1 - sum(sum(o.trained.lengths) for o in outcomes) / sum(o.engines.tokens for o in outcomes)
        figures[f"b={surplus}"] = {
            "useful_groups_per_s": rounded(rates[surplus]),
            "ratio": rounded(rates[surplus] / rates[0]),
            "cancelled_groups_per_trained": rounded(cancelled),
            "wasted_token_share": rounded(wasted),
        }
        figures["ceiling"] = rounded(1 / (busy_step_s(config) / config.batch) / rates[0])
    return figures


COMPARISONS = {
    "async-vs-sync": async_vs_sync,
    "evict-bias": evict_bias,
    "inflight-vs-drain": inflight_vs_drain,
    "rollout-granularity": rollout_granularity,
    "prefix-lb": prefix_routing,
    "backup": redundant_groups,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=COMPARISONS)
    parser.add_argument("--seeds", type=parse_seeds, default=range(3), help="FIRST:END, as of penstock simulate")
    arguments = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)
    print(json.dumps(COMPARISONS[arguments.name](arguments.seeds), indent=1))


if __name__ == "__main__":
    main()
