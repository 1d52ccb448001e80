"""Reward functions that were written for TRL or verl, called as these libraries call them: `reward.style=trl | verl`.

Both see the whole sampled text, reasoning included, as their own trainers would give it to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from inspect import Parameter, Signature
from numbers import Real
from typing import Any

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.config import PeerStyle


class PeerReward:
    """A function of another library as a Penstock reward.

    Args:
        function: Sync or async.
        args: Keyword arguments of every call, `reward.args`.

    Raises:
        ValueError: If its parameters are not those of the library.
    """

    style: PeerStyle
    recognised_by: frozenset[str]
    """Parameters that only functions of this library have."""
    given: frozenset[str]
    """Parameters that the library gives, in addition to columns of the task."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.function = function
        self.args = dict(args)
        call = getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self.is_pure = bool(getattr(function, "is_pure", False))
        parameters = inspect.signature(function).parameters
        self._takes = set(parameters)
        self._takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
        is_another = recognise(function) not in (self.style, None)
        if is_another or not (self._takes_all or self.recognised_by <= self._takes):
            wanted = " and ".join(sorted(self.recognised_by))
            raise ValueError(f"it takes {inspect.signature(function)}, without {wanted}")
        # Before a run, `penstock train` checks the fields of the tasks against this signature.
        columns = [
            Parameter(name, Parameter.KEYWORD_ONLY)
            for name, one in parameters.items()
            if one.default is one.empty
            and one.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
            and name not in self.given | set(args)
        ]
        trajectory, others = Parameter("trajectory", Parameter.POSITIONAL_ONLY), Parameter("_", Parameter.VAR_KEYWORD)
        self.__signature__ = Signature([trajectory, *columns, others])
        self.__module__, self.__qualname__ = function.__module__, getattr(function, "__qualname__", repr(function))

    def __call__(self, trajectory: Trajectory, /, **fields: Any) -> Any:
        """The reward and its parts; awaitable if the function is asynchronous."""
        arguments = self.arguments(trajectory, fields) | self.args
        returned = self.function(
            **{name: value for name, value in arguments.items() if self._takes_all or name in self._takes}
        )
        return self._awaited(returned) if inspect.isawaitable(returned) else self.reward(returned)

    async def _awaited(self, returned: Awaitable[Any]) -> Any:
        return self.reward(await returned)

    def arguments(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call."""
        raise NotImplementedError

    def reward(self, returned: Any) -> Any:
        """What a Penstock reward would return."""
        raise NotImplementedError


class TrlReward(PeerReward):
    """`(prompts, completions, **columns) -> list[float | None]`, called with lists of one element.

    If the prompt is chat messages, so is the completion: `[{"role": "assistant", "content": ...}]`, with the
    observations of an episode between the turns as messages of the user. A message of the assistant that ends the
    prompt is the beginning of the completion instead. None means that the function does not apply to the task, as for
    every reward: as one of several parts it adds nothing and is not recorded; alone it has no opinion.
    """

    style = "trl"
    recognised_by = frozenset({"completions"})
    given = frozenset({"prompts", "completions", "completion_ids", "log_extra", "log_metric"})

    def arguments(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As TRL gives them; `log_extra` and `log_metric` record nothing."""
        columns = {name: [value] for name, value in fields.items()}
        prompt: str | list[Mapping[str, str]] = trajectory.prompt
        completion: str | list[dict[str, str]] = trajectory.text
        if trajectory.messages:
            prompt, completion = list(trajectory.messages), _messages(trajectory)
            if prompt[-1]["role"] == "assistant":
                completion[0]["content"] = prompt.pop()["content"] + completion[0]["content"]
        return {
            **columns,
            "prompts": [prompt],
            "completions": [completion],
            "completion_ids": [trajectory.token_ids[trajectory.loss_mask].tolist()],
            "log_extra": lambda *_: None,
            "log_metric": lambda *_: None,
        }

    def reward(self, returned: Any) -> Any:
        """The only element, or None.

        Raises:
            ValueError: If there is not exactly one.
        """
        if isinstance(returned, str | Mapping) or not hasattr(returned, "__len__") or len(returned) != 1:
            raise ValueError(
                f"it returned {returned!r:.200} of type {type(returned).__name__}; with reward.style=trl it returns a "
                "list with a float or None for each completion, of which there is 1 in a call"
            )
        return returned[0]


class VerlReward(PeerReward):
    """`compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict` with the key `score`.

    The ground truth is the field `ground_truth`, or that entry of the field `reward_model`, or the field `answer`.
    Numbers of a dict are recorded as parts of the reward; its other values are ignored, but for the text `pred`, the
    answer by which evaluations vote, as in verl.
    """

    style = "verl"
    recognised_by = frozenset({"solution_str", "ground_truth"})
    given = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})

    def arguments(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As verl gives them.

        Raises:
            ValueError: If the task has no ground truth.
        """
        nested = fields.get("reward_model")
        sources = [fields.get("ground_truth"), nested.get("ground_truth") if isinstance(nested, Mapping) else None]
        truth = next((one for one in [*sources, fields.get("answer")] if one is not None), None)
        if truth is None:
            raise ValueError(
                f"the task has no field ground_truth, reward_model.ground_truth or answer, one of which reward.style="
                f"verl gives as ground_truth. Its fields are {sorted(fields)}"
            )
        return {
            "data_source": fields.get("data_source", ""),
            "solution_str": trajectory.text,
            "ground_truth": truth,
            "extra_info": dict(fields.get("extra_info") or {}),
        }

    def reward(self, returned: Any) -> Any:
        """The score, with the other numbers of a dict as parts.

        Raises:
            ValueError: If a dict has no `score`.
        """
        if not isinstance(returned, Mapping):
            return returned
        if "score" not in returned:
            raise ValueError(
                f"it returned a dict without score, which reward.style=verl needs: {dict(returned)!r:.200}"
            )
        numbers = {
            name: value
            for name, value in returned.items()
            if name not in ("score", "reward") and (isinstance(value, Real) or getattr(value, "shape", None) == ())
        }
        answer = {"answer": returned["pred"]} if isinstance(returned.get("pred"), str) else {}
        return {**numbers, "reward": returned["score"], **answer}


PEERS: tuple[type[PeerReward], ...] = (TrlReward, VerlReward)


def recognise(function: Callable[..., Any]) -> PeerStyle | None:
    """The library whose reward functions have the parameters of `function`; None if it is one of Penstock."""
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    if "trajectory" in names:
        return None
    return next((peer.style for peer in PEERS if peer.recognised_by <= names), None)


def _messages(trajectory: Trajectory) -> list[dict[str, str]]:
    """The sampled turns as messages of the assistant, with the observations between them."""
    if trajectory.episode is None:
        return [{"role": "assistant", "content": trajectory.text}]
    messages = []
    for turn in trajectory.episode.turns:
        messages.append({"role": "assistant", "content": turn.reasoning + turn.response})
        if turn.observation:
            messages.append({"role": "user", "content": turn.observation})
    return messages
