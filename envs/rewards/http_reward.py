"""A reward that an HTTP service computes: it gets the trajectory as JSON and returns a number or named numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import RewardContext
from penstock.envs.http_client import JsonClient, ServiceError, bearer
from penstock.envs.retrying import RetryConfig
from penstock.envs.reward_result import to_reply

_TIMEOUT_SHARE = 0.95
"""Share of `reward.timeout_s` for all attempts of a call, so that it fails with its own cause before the time-out."""


class HttpConfig(RetryConfig):
    """The service."""

    url: str = Field(pattern=r"^https?://")
    """Its address."""
    key_variable: str | None = None
    """Environment variable of the reward workers with the key that is sent as `Authorization: Bearer`; None sends none.
    """
    request_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time for one attempt, seconds."""
    max_requests_per_s: float | None = Field(default=None, gt=0)
    """Attempts per second of each reward worker; None is unlimited."""


class RewardServiceError(Exception):
    """The service returned no reward, so the trajectory has none (not 0)."""


class HttpReward:
    """The reward that a service returns: a number, or an object of numbers like the dict of a reward function.

    Args:
        config: The service.
        context: Limits of a call.

    Raises:
        ConfigError: If its key is not set, or a call cannot finish in time.
    """

    is_called_before_start = False

    def __init__(self, config: HttpConfig, context: RewardContext) -> None:
        self._total_timeout_s = _TIMEOUT_SHARE * context.timeout_s
        if config.request_timeout_s > self._total_timeout_s:
            raise ConfigError(
                f"reward request_timeout_s={config.request_timeout_s:g} with reward.timeout_s="
                f"{context.timeout_s:g}: a call would end before its first attempt does. Set reward.timeout_s to "
                "several attempts and their waits."
            )
        interval_s = 0.0 if config.max_requests_per_s is None else 1 / config.max_requests_per_s
        if context.max_concurrency * interval_s > self._total_timeout_s:
            raise ConfigError(
                f"reward max_requests_per_s={config.max_requests_per_s:g} with reward.max_concurrency="
                f"{context.max_concurrency}: the last of them would be sent after "
                f"{context.max_concurrency * interval_s:.0f} s, reward.timeout_s={context.timeout_s:g}. Lower "
                "reward.max_concurrency, or raise reward.timeout_s."
            )
        try:
            headers = bearer(config.key_variable)
        except LookupError as error:
            raise ConfigError(
                f"reward key_variable={error.args[0]}. The service would refuse every request. Set it where the "
                "run is started and where the reward workers run."
            ) from None
        self._url = config.url
        self._request_timeout_s = config.request_timeout_s
        self._client = JsonClient(config, context.max_concurrency, headers, interval_s)

    @classmethod
    def build(cls, context: RewardContext, **args: Any) -> Self:
        """Build it from `reward.args`, an `HttpConfig`.

        Raises:
            ConfigError: If the key is not set, or the time-outs do not fit.
            ValueError: If an argument is unknown or wrong.
        """
        return cls(HttpConfig.model_validate(args), context)

    async def __call__(self, trajectory: Trajectory, /, **fields: Any) -> Mapping[str, float | str] | None:
        """Request the reward of one trajectory; None if the service answers null, which is no opinion.

        Raises:
            RewardServiceError: If there is no usable answer.
        """
        reply = to_reply(await self._post_json(encode_trajectory(trajectory, fields)), "the service answered")
        if "error" in reply:
            raise RewardServiceError(reply["error"])
        if "abstains" in reply:
            return None
        answer = {"answer": reply["answer"]} if "answer" in reply else {}
        return {**reply["parts"], "reward": reply["reward"], **answer}

    async def _post_json(self, body: object) -> Any:
        """Post a body; return the decoded reply.

        Raises:
            RewardServiceError: If there is no usable answer.
        """
        try:
            return await self._client.post(self._url, body, self._request_timeout_s, self._total_timeout_s)
        except (TypeError, ValueError) as error:
            raise RewardServiceError(f"the task cannot be sent to {self._url} as JSON: {error}") from error
        except ServiceError as error:
            raise RewardServiceError(f"{self._url} gave no reward: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def encode_trajectory(trajectory: Trajectory, fields: dict[str, Any]) -> dict[str, Any]:
    """The trajectory as plain data, if the fields are plain data."""
    turn_fields = ("response", "reasoning", "observation", "finish_reason", "thread")
    turns = [] if trajectory.episode is None else trajectory.episode.turns
    return {
        "task_id": trajectory.task_id,
        "fields": fields,
        "prompt": trajectory.prompt,
        "response": trajectory.response,
        "reasoning": trajectory.reasoning,
        "finish_reason": trajectory.finish_reason,
        "num_tokens": trajectory.num_sampled_tokens,
        "turns": [{name: getattr(turn, name) for name in turn_fields} for turn in turns],
        "episode_reward": None if trajectory.episode is None else trajectory.episode.reward,
    }
