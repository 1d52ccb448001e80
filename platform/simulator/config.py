"""Configuration of `penstock simulate KEY=VALUE ...`. Costs are given in real tokens, bytes and seconds.

The defaults are estimates for a 7-B model in bfloat16 on an 80-GiB GPU, not a fit: a decode step reads 14 GB of
weights (4.2 ms at 3.35 TB/s, 5 ms with overhead) and per sequence about 0.24 GB of KV at 4 k tokens (0.07 ms, 0.1 ms
with overhead); a token prefills in 2 · 7e9 FLOP at 500 TFLOP/s = 28 µs.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.settings import Settings
from penstock.platform.simulator.world import LengthProfile
from penstock.weights.config import UpdateMode

PROFILES: dict[str, LengthProfile] = {
    "constant": LengthProfile("constant", 512, 0.0, 4096),
    "short": LengthProfile("lognormal", 256, 0.5, 2048),
    "longtail": LengthProfile("lognormal", 4096, 1.0, 32768),
    "exponential": LengthProfile("exponential", 2048, 0.0, 32768),
}
"""Named length profiles. `sigma`, `mean_tokens` and `cap_tokens` override individual values."""


class SimulationConfig(Settings):
    """Configuration of a simulated run."""

    model_config = ConfigDict(allow_inf_nan=True)

    profile: Literal["constant", "short", "longtail", "exponential"] = "longtail"
    """Named length profile."""
    sigma: float | None = Field(default=None, ge=0, le=3)
    """σ of the lognormal; overrides the profile."""
    mean_tokens: float | None = Field(default=None, gt=0)
    """Mean response length in tokens; overrides the profile."""
    cap_tokens: int | None = Field(default=None, ge=1)
    """Longest response in tokens; overrides the profile."""
    prompt_tokens: int = Field(default=256, ge=1)
    """Prompt length, tokens."""
    grain: int = Field(default=16, ge=1)
    """Real tokens per simulated token; sets the speed of the simulation and the resolution of spans."""
    engines: int = Field(default=4, ge=1)
    """Number of engines."""
    slots: int = Field(default=16, ge=1)
    """Requests one engine decodes at once."""
    kv_tokens: int = Field(default=600_000, ge=1)
    """KV-cache capacity of one engine, tokens."""
    trainer_devices: int = Field(default=1, ge=1)
    """Devices the trainer computes on."""
    colocated: bool = False
    """Trainer and engines share the devices and take turns (needs eta=0)."""
    decode_base_s: float = Field(default=5e-3, ge=0)
    """Seconds of a decode step with an empty batch: reading the weights."""
    decode_per_sequence_s: float = Field(default=1e-4, ge=0)
    """Seconds that each running sequence adds to a decode step."""
    prefill_s_per_token: float = Field(default=28e-6, ge=0)
    """Seconds to prefill one prompt token; decoding is paused during prefill."""
    engine_speeds: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    """Relative speed per engine, repeated over the engines."""
    rank_speeds: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    """Relative speed per trainer rank, of at least two, over which one is repeated; a step takes as long as the slowest
    needs."""
    train_s_per_token: float = Field(default=100e-6, gt=0)
    """Device-seconds to train one token."""
    train_fixed_s: float = Field(default=0.5, gt=0)
    """Seconds of a training step that do not depend on its size."""
    weight_bytes: int = Field(default=14_000_000_000, ge=0)
    """Bytes of a published version."""
    publish_bytes_per_s: float = Field(default=25e9, gt=0)
    """Bandwidth to one engine."""
    swap_s: float = Field(default=0.1, ge=0)
    """Seconds that an engine is paused to swap staged weights."""
    routing: Literal["prefix_aware", "least_loaded"] = "prefix_aware"
    """Policy that selects the engine of a request."""
    update_mode: UpdateMode = "keep_kv"
    """How engines receive weights while they generate."""
    overlap: bool = False
    """Whether the trainer continues during a publish."""
    adaptive_concurrency: bool = False
    """Whether engines get fewer requests while their KV cache is full."""
    turns: int = Field(default=1, ge=1)
    """Mean number of turns of an episode; 1 is a single turn without an environment."""
    observation_tokens: int = Field(default=64, ge=1)
    """Tokens of an observation between two turns."""
    tool_mean_s: float = Field(default=1.0, ge=0)
    """Mean time of an environment between two turns, seconds; lognormal."""
    tool_sigma: float = Field(default=1.0, ge=0, le=3)
    """σ of the logarithm of this time."""
    tool_cap_s: float = Field(default=60.0, gt=0)
    """Maximum of this time, seconds."""
    environments: int = Field(default=64, ge=1)
    """Number of concurrent episodes; further episodes wait."""
    reward_mean_s: float = Field(default=0.1, ge=0)
    """Mean latency of a reward, seconds; exponential."""
    reward_workers: int = Field(default=64, ge=1)
    """Number of concurrent rewards."""
    steps: int = Field(default=12, ge=1)
    """Number of batches to train."""
    batch: int = Field(default=4, ge=1)
    """B, groups per batch."""
    group_size: int = Field(default=4, ge=1)
    """Trajectories per group."""
    eta: int = Field(default=2, ge=0)
    """η, max_staleness, versions."""
    on_expiry: Literal["wait", "trim", "drop"] = "wait"
    """What happens to groups that would become too old."""
    surplus: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Redundant groups beyond the credits; `auto` adapts their number."""
    max_surplus: int = Field(default=4, ge=1)
    """Largest number of them with `auto`."""
    min_group_size: int = Field(default=2, ge=1)
    """Smallest number of members with which a group trains after others have failed."""
    max_live: int | None = Field(default=None, ge=1)
    """Maximum number of live trajectories (as set by `dataflow.max_live_gib`); none is no limit."""
    stream: bool = False
    """Whether the trainer starts with the first groups of a batch while the rest is generated."""
    max_retries: int = Field(default=4, ge=0)
    """Retries of one trajectory."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations during training; 0 disables them."""
    batch_timeout_s: float = Field(default=36_000.0, gt=0)
    """Longest wait for a batch without a new token, score or ready group, virtual seconds."""

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


Schema = TypeVar("Schema", bound=SimulationConfig)


def parse_simulation(overrides: list[str]) -> SimulationConfig:
    """Parse `KEY=VALUE` words. `pools=ENGINESxSLOTS+TRAINER_DEVICES` sets three keys at once.

    Raises:
        ConfigError: Listing all violations.
    """
    return parse_as(SimulationConfig, overrides)


def parse_as(schema: type[Schema], overrides: list[str]) -> Schema:
    """As `parse_simulation`, with the keys of `schema`.

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
        elif key in ("engine_speeds", "rank_speeds"):
            values[key] = tuple(value.strip("[]()").split(","))
        elif key not in schema.model_fields:
            near = get_close_matches(key, [*schema.model_fields, "pools"], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            problems.append(f"{key}: unknown key.{hint} Keys: {', '.join(schema.model_fields)}, pools.")
        else:
            values[key] = value
    try:
        config = schema.model_validate(values)
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
    if config.surplus and config.on_expiry != "wait":
        yield (
            f"surplus={config.surplus} with on_expiry={config.on_expiry}: redundant groups are cancelled when a batch "
            "waits for them, and only on_expiry=wait waits. Use on_expiry=wait or surplus=0."
        )
    if config.surplus and config.stream:
        yield (
            f"surplus={config.surplus} with stream=true: redundant groups are cancelled when a batch closes, but a "
            "streamed batch has trained most of its groups by then. Use one of the two."
        )
    if len(config.engine_speeds) > config.engines:
        yield (
            f"engine_speeds has {len(config.engine_speeds)} speeds for engines={config.engines}: the others would not "
            "count. Use as many engines."
        )
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
