"""A language model as a judge, behind any server with the OpenAI chat API: it gets a rubric and returns a score."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from inspect import Parameter, Signature
from string import Formatter
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import RewardContext
from penstock.envs.rewards.http_reward import HttpConfig, HttpReward, RewardServiceError
from penstock.envs.workers.reward_cache import LruCache

_MAX_SHOWN_CHARACTERS = 300


class JudgeConfig(HttpConfig):
    """The judge, its question and its scale.

    Attributes:
        url: Base URL of the API, e.g. `http://localhost:8000/v1`.
        model: Name of the model in the API.
        template: The question; `{prompt}`, `{response}` and fields of the task are filled in, `{{` is a brace.
        pattern: Regular expression with one group, the score; its last match in the answer counts.
        json_key: Key of the score in a JSON object in the answer, instead of `pattern`.
        lowest: Score that becomes reward 0.
        highest: Score that becomes reward 1.
        max_questions: Attempts to get an answer with a score in that range.
        cache_entries: Scores that each reward worker caches by their question.
        request: Further parameters of each request.
    """

    model: str
    template: str
    pattern: str | None = r"(?i)score[*_`\s]*:[*_`\s]*(-?\d+(?:\.\d+)?)"
    json_key: str | None = None
    lowest: float = 0.0
    highest: float = 10.0
    max_questions: int = Field(default=2, ge=1)
    cache_entries: int = Field(default=4096, ge=0)
    request: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("template")
    @classmethod
    def _shows_the_response(cls, template: str) -> str:
        if "response" not in names_in(template):
            raise ValueError("it has no {response}, so every response would get the same score")
        return template

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        try:
            num_groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from error
        if num_groups != 1:
            raise ValueError(f"it has {num_groups} groups, expected 1, the score; (?:...) groups without counting")
        return pattern

    @model_validator(mode="after")
    def _is_one_scale(self) -> Self:
        if (self.pattern is None) == (self.json_key is None):
            raise ValueError("the score is found by pattern or by json_key: set one of the two, the other to null")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest={self.lowest:g} must be below highest={self.highest:g}")
        return self


def names_in(template: str) -> list[str]:
    """Field names in a template, without their attributes and indices.

    Raises:
        ValueError: If a brace is not closed, or a name is missing.
    """
    names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    plain = [re.split(r"[.\[]", name)[0] for name in names]
    strange = [name for name in plain if not name.isidentifier()]
    if strange:
        raise ValueError(f"{{{strange[0]}}} is not the name of a field; write a literal brace twice")
    return plain


class JudgeReward(HttpReward):
    """The judge's score between `lowest` and `highest`, as a reward between 0 and 1.

    If an answer has no score in that range, or was truncated, the question is repeated with the reason. After
    `max_questions` attempts the call fails; it never returns 0. Equal questions are sent once.

    Args:
        config: The judge, its question and its scale.
        context: Limits of a call.
    """

    def __init__(self, config: JudgeConfig, context: RewardContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._cache: LruCache[dict[str, float]] = LruCache(config.cache_entries)
        self._pending: dict[str, asyncio.Task[dict[str, float]]] = {}
        # Before a run, `penstock train` checks the fields of the tasks against this signature.
        names = sorted(set(names_in(config.template)) - {"prompt", "response"})
        fields = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        trajectory, others = Parameter("trajectory", Parameter.POSITIONAL_ONLY), Parameter("_", Parameter.VAR_KEYWORD)
        self.__signature__ = Signature([trajectory, *fields, others])

    @classmethod
    def build(cls, context: RewardContext, **args: Any) -> Self:
        """Build it from `reward.args`, a `JudgeConfig`.

        Raises:
            ConfigError: If the key is not set, or the time-outs do not fit.
            ValueError: If an argument is unknown or wrong.
        """
        return cls(JudgeConfig.model_validate(args), context)

    async def __call__(self, trajectory: Trajectory, /, **fields: Any) -> dict[str, float]:
        """Judge a response: `reward`, the judge's `score`, and the number of answers without a score.

        Raises:
            RewardServiceError: If the judge cannot be reached, or returns no score.
        """
        question = self._question(trajectory, fields)
        if (cached := self._cache.get(question)) is not None:
            return cached
        if question not in self._pending:
            self._pending[question] = asyncio.create_task(self._judge(question))
            self._pending[question].add_done_callback(lambda done: self._remember(question, done))
        return await asyncio.shield(self._pending[question])  # other calls may wait for it too

    def _question(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> str:
        # Of a chat without the template's special tokens, which the judge's own template would take for its own.
        said = "\n".join(f"{message['role']}\n{message.get('content') or ''}" for message in trajectory.messages)
        shown = {**fields, "prompt": said or trajectory.prompt, "response": trajectory.response}
        try:
            return self._config.template.format(**shown)
        except (KeyError, AttributeError, IndexError) as error:
            problem = f"the template does not fit {trajectory.task_id} with the fields {sorted(fields)}: {error!r}"
            raise RewardServiceError(problem) from error

    def _remember(self, question: str, judging: asyncio.Task[dict[str, float]]) -> None:
        """Cache the score, unless the question failed."""
        del self._pending[question]
        if not judging.cancelled() and judging.exception() is None:
            self._cache.put(question, judging.result())

    async def _judge(self, question: str) -> dict[str, float]:
        config, content, answer, problem = self._config, question, "", ""
        for num_unscored in range(config.max_questions):
            messages = [{"role": "user", "content": content}]
            reply = await self._post_json({**config.request, "model": config.model, "messages": messages})
            answer, problem = read_answer(reply)
            score, problem = (None, problem) if problem else find_score(answer, config)
            if score is not None:
                reward = (score - config.lowest) / (config.highest - config.lowest)
                return {"reward": reward, "score": score, "unscored_answers": float(num_unscored)}
            content = f"{question}\n\n(An answer could not be used: {problem}. Keep exactly to the form asked for.)"
        raise RewardServiceError(
            f"{self._url}: the judge gave no score in {config.max_questions} answers: {problem}. The last ended in "
            f"{answer[-_MAX_SHOWN_CHARACTERS:]!r}"
        )


def read_answer(reply: Any) -> tuple[str, str]:
    """The judge's text, and what is wrong with it: truncated, or empty; else an empty string.

    Raises:
        RewardServiceError: If the reply is not one of the chat API.
    """
    try:
        choice = reply["choices"][0]
        content, finish_reason = choice["message"].get("content") or "", choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        shown = json.dumps(reply)[:_MAX_SHOWN_CHARACTERS]
        raise RewardServiceError(f"the judge's server does not speak the OpenAI chat API: {shown}") from error
    if not isinstance(content, str):
        raise RewardServiceError(f"the judge's answer is a {type(content).__name__}, not text")
    if finish_reason == "length":
        return content, "it was cut off at its limit of tokens (reward.args.request.max_tokens)"
    return content, "" if content.strip() else "it is empty"


def find_score(answer: str, config: JudgeConfig) -> tuple[float | None, str]:
    """The score in an answer, after its reasoning if it has any, or None and why there is none."""
    answer = answer.rpartition("</think>")[2]
    if config.json_key is None:
        assert config.pattern is not None
        found: list[Any] = re.findall(config.pattern, answer)
        if not found:
            return None, f"nothing in it matches {config.pattern}"
        value = found[-1]
    else:
        try:
            value = json.loads(answer[answer.find("{") : answer.rfind("}") + 1])[config.json_key]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None, f"it holds no JSON object with {config.json_key!r}"
    try:
        score = float(value)
    except (TypeError, ValueError):
        return None, f"{value!r:.60} is not a number"
    if not config.lowest <= score <= config.highest:
        return None, f"{score:g} is outside {config.lowest:g}..{config.highest:g}"
    return score, ""
