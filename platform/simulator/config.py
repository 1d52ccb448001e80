"""Configuration of `penstock simulate KEY=VALUE ...`. Costs are given in real tokens, bytes and seconds.

The defaults are estimates for a 7-B model in bfloat16 on an 80-GiB GPU, not a fit: a decode step reads 14 GB of
weights (4.2 ms at 3.35 TB/s, 5 ms with overhead) and per sequence about 0.24 GB of KV at 4 k tokens (0.07 ms, 0.1 ms
with overhead); a token prefills in 2 · 7e9 FLOP at 500 TFLOP/s = 28 µs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.dataflow.errors import ConfigError
from penstock.platform.simulator.world import LengthProfile
from penstock.weights.config import UpdateMode


class FaultLevel(StrEnum):
    """Amount of simulated faults."""

    NONE = "none"
    LIGHT = "light"
    HEAVY = "heavy"
    STALLS = "stalls"
    """Only stalls of the driver's event loop, for which nobody may be declared lost."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Frequencies of faults.

    Attributes:
        engine_steps: Mean time between two faults of one engine, in expected step times.
        kinds: Relative frequency of crash, hang of an engine, hang of its whole process, and slowness.
        outage_steps: Mean duration of such a fault, and of the start of a process, in expected step times.
        all_lost_steps: Mean time between two losses of all engines at once, in expected step times.
        scale_steps: Mean time between two changes of the number of engines, in expected step times.
        drain_steps: Mean time between two nodes that are drained and then lost, in expected step times.
        start_fails: Probability that an engine process does not come up.
        refusals: Probability per engine and version that its first update is refused.
        memory_kills: Probability per engine and version that the process is killed for memory while it updates.
        reward_raises: Probability per score that the reward raises an error.
        reward_hangs: Probability per score that the reward hangs.
        scores_lost: Probability per score that its worker stops answering before it is delivered.
        reward_death_steps: Mean time between two deaths of reward workers, in expected step times.
        environment_raises: Probability per turn that the environment raises an error.
        environment_hangs: Probability per turn that the environment hangs.
        bad_steps: Probability per step that its loss or gradient is not finite.
        trainer_crashes: Probability per step that a rank dies.
        rank_hangs: Probability per step that it never returns.
        lost: Probability per delta that this and all later messages of its request are lost.
        acks_lost: Probability per engine and version that its first acknowledgement is lost.
        delayed: Probability per completion that it arrives late.
        duplicated: Probability per completion that it arrives a second time, later.
        stray_steps: Mean time between two duplicated, late or invalid reports, in expected step times.
        driver_steps: Mean number of trained steps after which the driver dies.
        disk_deaths: Probability per driver that it dies at one of its first file operations.
        full_disk_steps: Mean time until the disk is full, in expected step times.
        poison: Share of the tasks whose prompt every engine refuses.
        stall_steps: Mean time between two stalls of the driver's event loop, in expected step times.
        num_stalls: Stalls of one driver.
        speed_spread: Largest relative deviation of an engine's speed from its nominal speed.
        skew: Largest relative error of the rate of an engine's clock.
    """

    engine_steps: float = math.inf
    kinds: tuple[float, float, float, float] = (0, 0, 0, 0)
    outage_steps: float = 0.0
    all_lost_steps: float = math.inf
    scale_steps: float = math.inf
    drain_steps: float = math.inf
    start_fails: float = 0.0
    refusals: float = 0.0
    memory_kills: float = 0.0
    reward_raises: float = 0.0
    reward_hangs: float = 0.0
    scores_lost: float = 0.0
    reward_death_steps: float = math.inf
    environment_raises: float = 0.0
    environment_hangs: float = 0.0
    bad_steps: float = 0.0
    trainer_crashes: float = 0.0
    rank_hangs: float = 0.0
    lost: float = 0.0
    acks_lost: float = 0.0
    delayed: float = 0.0
    duplicated: float = 0.0
    stray_steps: float = math.inf
    driver_steps: float = math.inf
    disk_deaths: float = 0.0
    full_disk_steps: float = math.inf
    poison: float = 0.0
    stall_steps: float = math.inf
    num_stalls: int = 0
    speed_spread: float = 0.0
    skew: float = 0.0


RATES: dict[FaultLevel, FaultRates] = {
    FaultLevel.LIGHT: FaultRates(
        engine_steps=20.0,
        kinds=(1, 1, 1, 2),
        outage_steps=1.0,
        all_lost_steps=100.0,
        scale_steps=20.0,
        drain_steps=50.0,
        start_fails=0.01,
        refusals=0.005,
        memory_kills=0.005,
        reward_raises=0.01,
        reward_hangs=0.002,
        scores_lost=0.001,
        reward_death_steps=40.0,
        environment_raises=0.005,
        environment_hangs=0.001,
        bad_steps=0.02,
        trainer_crashes=0.005,
        rank_hangs=0.002,
        lost=0.0005,
        acks_lost=0.01,
        delayed=0.01,
        duplicated=0.01,
        stray_steps=2.0,
        driver_steps=20.0,
        disk_deaths=0.2,
        full_disk_steps=30.0,
        poison=0.01,
        stall_steps=10.0,
        num_stalls=1,
        speed_spread=0.01,
        skew=0.01,
    ),
    FaultLevel.HEAVY: FaultRates(
        engine_steps=5.0,
        kinds=(2, 1, 1, 1),
        outage_steps=1.5,
        all_lost_steps=25.0,
        scale_steps=4.0,
        drain_steps=15.0,
        start_fails=0.05,
        refusals=0.05,
        memory_kills=0.03,
        reward_raises=0.05,
        reward_hangs=0.01,
        scores_lost=0.005,
        reward_death_steps=4.0,
        environment_raises=0.02,
        environment_hangs=0.005,
        bad_steps=0.1,
        trainer_crashes=0.05,
        rank_hangs=0.02,
        lost=0.003,
        acks_lost=0.03,
        delayed=0.05,
        duplicated=0.05,
        stray_steps=0.3,
        driver_steps=4.0,
        disk_deaths=0.8,
        full_disk_steps=12.0,
        poison=0.05,
        stall_steps=5.0,
        num_stalls=2,
        speed_spread=0.05,
        skew=0.05,
    ),
    FaultLevel.STALLS: FaultRates(stall_steps=1.0, num_stalls=8),
}


PROFILES: dict[str, LengthProfile] = {
    "constant": LengthProfile("constant", 512, 0.0, 4096),
    "short": LengthProfile("lognormal", 256, 0.5, 2048),
    "longtail": LengthProfile("lognormal", 4096, 1.0, 32768),
    "exponential": LengthProfile("exponential", 2048, 0.0, 32768),
}
"""Named length profiles. `sigma`, `mean_tokens` and `cap_tokens` override individual values."""


class SimulationConfig(BaseModel):
    """Configuration of a simulated run.

    Attributes:
        profile: Named length profile.
        sigma: σ of the lognormal; overrides the profile.
        mean_tokens: Mean response length in tokens; overrides the profile.
        cap_tokens: Longest response in tokens; overrides the profile.
        prompt_tokens: Prompt length, tokens.
        grain: Real tokens per simulated token; sets the speed of the simulation and the resolution of spans.
        engines: Number of engines.
        slots: Requests one engine decodes at once.
        kv_tokens: KV-cache capacity of one engine, tokens.
        trainer_devices: Devices the trainer computes on.
        colocated: Trainer and engines share the devices and take turns (needs eta=0).
        decode_base_s: Seconds of a decode step with an empty batch: reading the weights.
        decode_per_sequence_s: Seconds that each running sequence adds to a decode step.
        prefill_s_per_token: Seconds to prefill one prompt token; decoding is paused during prefill.
        engine_speeds: Relative speed per engine, repeated over the engines.
        train_s_per_token: Device-seconds to train one token.
        train_fixed_s: Seconds of a training step that do not depend on its size.
        weight_bytes: Bytes of a published version.
        publish_bytes_per_s: Bandwidth to one engine.
        swap_s: Seconds that an engine is paused to swap staged weights.
        routing: Policy that selects the engine of a request.
        update_mode: How engines receive weights while they generate.
        overlap: Whether the trainer continues during a publish.
        adaptive_concurrency: Whether engines get fewer requests while their KV cache is full.
        turns: Mean number of turns of an episode; 1 is a single turn without an environment.
        observation_tokens: Tokens of an observation between two turns.
        tool_mean_s: Mean time of an environment between two turns, seconds; lognormal.
        tool_sigma: σ of the logarithm of this time.
        tool_cap_s: Maximum of this time, seconds.
        environments: Number of concurrent episodes; further episodes wait.
        reward_mean_s: Mean latency of a reward, seconds; exponential.
        reward_workers: Number of concurrent rewards.
        steps: Number of batches to train.
        batch: B, groups per batch.
        group_size: Trajectories per group.
        eta: η, max_staleness, versions.
        on_expiry: What happens to groups that would become too old.
        surplus: Redundant groups beyond the credits.
        min_group_size: Smallest number of members with which a group trains after others have failed.
        max_live: Maximum number of live trajectories (as set by `dataflow.max_live_gib`); none is no limit.
        stream: Whether the trainer starts with the first groups of a batch while the rest is generated.
        max_retries: Retries of one trajectory.
        faults: Amount of simulated faults.
        checkpoint_every: Steps between checkpoints, from which a driver that died goes on.
        eval_every: Steps between evaluations during training; 0 disables them.
        check_every: Events between two checks of every live group; the cheap checks run after each event.
        batch_timeout_s: Longest wait for a batch without a new token, score or ready group, virtual seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: Literal["constant", "short", "longtail", "exponential"] = "longtail"
    sigma: float | None = Field(default=None, ge=0, le=3)
    mean_tokens: float | None = Field(default=None, gt=0)
    cap_tokens: int | None = Field(default=None, ge=1)
    prompt_tokens: int = Field(default=256, ge=1)
    grain: int = Field(default=16, ge=1)
    engines: int = Field(default=4, ge=1)
    slots: int = Field(default=16, ge=1)
    kv_tokens: int = Field(default=600_000, ge=1)
    trainer_devices: int = Field(default=1, ge=1)
    colocated: bool = False
    decode_base_s: float = Field(default=5e-3, ge=0)
    decode_per_sequence_s: float = Field(default=1e-4, ge=0)
    prefill_s_per_token: float = Field(default=28e-6, ge=0)
    engine_speeds: tuple[float, ...] = (1.0,)
    train_s_per_token: float = Field(default=100e-6, gt=0)
    train_fixed_s: float = Field(default=0.5, gt=0)
    weight_bytes: int = Field(default=14_000_000_000, ge=0)
    publish_bytes_per_s: float = Field(default=25e9, gt=0)
    swap_s: float = Field(default=0.1, ge=0)
    routing: Literal["prefix_aware", "least_loaded"] = "prefix_aware"
    update_mode: UpdateMode = "keep_kv"
    overlap: bool = False
    adaptive_concurrency: bool = False
    turns: int = Field(default=1, ge=1)
    observation_tokens: int = Field(default=64, ge=1)
    tool_mean_s: float = Field(default=1.0, ge=0)
    tool_sigma: float = Field(default=1.0, ge=0, le=3)
    tool_cap_s: float = Field(default=60.0, gt=0)
    environments: int = Field(default=64, ge=1)
    reward_mean_s: float = Field(default=0.1, ge=0)
    reward_workers: int = Field(default=64, ge=1)
    steps: int = Field(default=12, ge=1)
    batch: int = Field(default=4, ge=1)
    group_size: int = Field(default=4, ge=1)
    eta: int = Field(default=2, ge=0)
    on_expiry: Literal["wait", "trim", "drop"] = "wait"
    surplus: int = Field(default=0, ge=0)
    min_group_size: int = Field(default=2, ge=1)
    max_live: int | None = Field(default=None, ge=1)
    stream: bool = False
    max_retries: int = Field(default=4, ge=0)
    faults: FaultLevel = FaultLevel.NONE
    checkpoint_every: int = Field(default=2, ge=1)
    eval_every: int = Field(default=0, ge=0)
    check_every: int = Field(default=64, ge=1)
    batch_timeout_s: float = Field(default=36_000.0, gt=0)

    @property
    def lengths(self) -> LengthProfile:
        """The profile with its overrides applied."""
        base = PROFILES[self.profile]
        return LengthProfile(
            shape=base.shape,
            mean=base.mean if self.mean_tokens is None else self.mean_tokens,
            sigma=base.sigma if self.sigma is None else self.sigma,
            cap=base.cap if self.cap_tokens is None else self.cap_tokens,
        )


def parse_simulation(overrides: list[str]) -> SimulationConfig:
    """Parse `KEY=VALUE` words. `pools=ENGINESxSLOTS+TRAINER_DEVICES` sets three keys at once.

    Raises:
        ConfigError: Listing all violations.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            problems.append(f"simulate: {override!r} is not KEY=VALUE. Write e.g. eta=2.")
        elif key == "pools":
            values.update(_pools(value, problems))
        elif key == "engine_speeds":
            values[key] = tuple(value.strip("[]()").split(","))
        elif key not in SimulationConfig.model_fields:
            near = get_close_matches(key, [*SimulationConfig.model_fields, "pools"], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            problems.append(f"{key}: unknown key.{hint} Keys: {', '.join(SimulationConfig.model_fields)}, pools.")
        else:
            values[key] = value
    try:
        config = SimulationConfig.model_validate(values)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, e['loc']))}={e['input']}: {e['msg']}." for e in error.errors()]
    if problems:
        raise ConfigError(problems)
    problems = list(_contradictions(config))
    if problems:
        raise ConfigError(problems)
    return config


def _contradictions(config: SimulationConfig) -> Iterator[str]:
    """Yield the contradictions between keys."""
    if config.colocated and config.eta:
        yield f"colocated=true with eta={config.eta}: taking turns is synchronous. Set eta=0."
    if config.min_group_size > config.group_size:
        yield f"min_group_size={config.min_group_size} is above group_size={config.group_size}. Lower it."
    batch = config.batch * config.group_size
    if config.max_live is not None and config.max_live < batch:
        yield f"max_live={config.max_live} is below the {batch} trajectories of a batch, which cannot close. Raise it."


def _pools(value: str, problems: list[str]) -> dict[str, int]:
    rollout, _, trainer = value.partition("+")
    numbers = [*rollout.split("x"), trainer or "1"]
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        problems.append(
            f"pools={value} is not ENGINESxSLOTS+TRAINER_DEVICES. Write e.g. pools=24x16+8: 24 engines of 16 slots, "
            "8 devices that train."
        )
        return {}
    engines, slots, devices = map(int, numbers)
    return {"engines": engines, "slots": slots, "trainer_devices": devices}
