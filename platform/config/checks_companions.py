"""Models beside the policy that read its tokens: each must mean the same by every one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.platform.config.findings import Finding, error
from penstock.platform.config.schema import FROZEN_ROLES, RunConfig


def companions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and path of every model that the algorithm asks and that is not the policy itself."""
    paths = [(f"{role}.path", config.frozen(role).path) for role in FROZEN_ROLES if config.num_frozen(role)]
    if config.algorithm.needs_critic:
        paths.append(("critic.path", config.critic.path))
    return ((key, path) for key, path in paths if path is not None)


def check_tokenizer(config: RunConfig, key: str, path: str) -> Iterator[Finding]:
    """Where both are directories with a tokenizer, every token has the same id in both."""
    ours, theirs = _token_ids(config.model.path), _token_ids(path)
    if not ours or not theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        example = differing[0]
        yield error(
            f"{key}={path}: {len(differing)} of {len(ours | theirs)} tokens have another id than in the policy's "
            f"tokenizer, e.g. {example!r} {theirs.get(example, 'none')} instead of {ours.get(example, 'none')}: it "
            "would take the policy's tokens for others. Use a model with the policy's tokenizer.",
            key,
            "model.path",
        )


def _token_ids(path: str | None) -> dict[str, int]:
    """Token -> id of the `tokenizer.json` of a model directory; empty if there is none, or of another form."""
    file = Path(path or "").expanduser() / "tokenizer.json"
    if path is None or not file.is_file():
        return {}
    tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens", [])}
    return (dict(vocabulary) if isinstance(vocabulary, dict) else {}) | added
