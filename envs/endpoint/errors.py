"""What the endpoint refuses, in the form of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

INVALID = "invalid_request_error"


class ApiError(Exception):
    """One refused request.

    Attributes:
        status: HTTP status.
        kind: `type` in the body.
        param: The parameter it is about.
        code: Machine-readable reason.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None, param: str | None = None, kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def wrong_key() -> ApiError:
    """401: no session has this key, or its session has ended."""
    return ApiError(401, "Incorrect API key provided, or its session has ended.", code="invalid_api_key")


def unknown_model(name: str, served: str) -> ApiError:
    """404: there is one model."""
    message = f"The model {name[:100]!r} does not exist or you do not have access to it; this endpoint has {served!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def history_changed(param: str, what: str) -> ApiError:
    """400: the request does not go on from the dialogue of its session."""
    return bad_request(
        f"{what} A session is one dialogue, whose tokens are recorded as they were sampled: each request has to repeat "
        "all that was said, unchanged, and add to it.",
        param,
        "history_changed",
    )


def context_too_long(num_tokens: int, max_tokens: int, param: str) -> ApiError:
    """400: nothing could be sampled behind what was sent."""
    return bad_request(
        f"This model's maximum context length is {max_tokens} tokens. However, your messages resulted in {num_tokens} "
        "tokens, which leaves none for an answer. Please reduce their length.",
        param,
        "context_length_exceeded",
    )


def too_many_turns(max_turns: int) -> ApiError:
    """429: the episode has had all its turns."""
    message = f"This session has had its {max_turns} answers (env.episode.max_turns)."
    return ApiError(429, message, kind="insufficient_quota", code="max_turns")


def too_many_questions(most: int) -> ApiError:
    """429: try again later."""
    message = f"{most} questions are being answered. Ask again when some are."
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")


def run_failed() -> ApiError:
    """500: the session ended under the request."""
    message = "The session ended before the request was answered."
    return ApiError(500, message, kind="server_error", code="session_ended")
