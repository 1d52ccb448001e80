"""From the stated costs, in real tokens, to the costs of the simulated parts, in simulated tokens."""

from __future__ import annotations

from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.decoding import EngineCost
from penstock.platform.simulator.environments import ToolTimes
from penstock.platform.simulator.parts import TrainerCost
from penstock.rollout.dialogue import EpisodeBudget


def engine_cost(config: SimulationConfig) -> EngineCost:
    """Costs per simulated token, which stands for `grain` real ones."""
    grain = config.grain
    return EngineCost(
        base_s=config.decode_base_s * grain,
        per_sequence_s=config.decode_per_sequence_s * grain,
        prefill_s=config.prefill_s_per_token * grain,
        slots=config.slots,
        kv_tokens=config.kv_tokens // grain,
        cache_tokens=config.kv_tokens // grain,
        stage_s=config.weight_bytes / config.publish_bytes_per_s,
        swap_s=config.swap_s,
        recomputes_kv=config.update_mode == "recompute_kv",
    )


def tool_times(config: SimulationConfig) -> ToolTimes:
    """Seconds between two turns."""
    return ToolTimes(config.tool_mean_s, config.tool_sigma, config.tool_cap_s)


def episode_budget(config: SimulationConfig) -> EpisodeBudget:
    """Enough for every episode, as none is to be cut off."""
    turns = 2 * config.turns
    told = config.prompt_tokens + turns * config.observation_tokens
    return EpisodeBudget(max_turns=turns, max_tokens=told + config.lengths.cap + turns + 1)


def trainer_cost(config: SimulationConfig) -> TrainerCost:
    """Costs of a step over simulated tokens."""
    return TrainerCost(
        fixed_s=config.train_fixed_s,
        per_token_s=config.train_s_per_token * config.grain,
        devices=config.trainer_devices,
        export_s=0.0,
        weight_bytes=config.weight_bytes,
    )


def expected_step_s(config: SimulationConfig) -> float:
    """Seconds of a step if generation were balanced and nothing waited: the slower of generation and training."""
    tokens = config.batch * config.group_size * config.lengths.mean
    full_step_s = config.decode_base_s + config.decode_per_sequence_s * config.slots
    tools_s = config.batch * config.group_size * (config.turns - 1) * config.tool_mean_s / config.environments
    generate_s = tools_s + tokens * full_step_s / (config.slots * config.engines)
    train_s = config.train_fixed_s + tokens * config.train_s_per_token / config.trainer_devices
    return generate_s + train_s if config.colocated else max(generate_s, train_s)
