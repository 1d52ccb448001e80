"""Which prompts an engine still has KV for: least recently used goes first."""

from __future__ import annotations

Prefix = tuple[int, int]
"""(salt, task): blocks are shared only among requests of one salt (docs/concepts/weight-updates.md)."""


class PrefixCache:
    """Prompts by (salt, task), up to a capacity in tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._tokens: dict[Prefix, int] = {}
        self._used_tokens = 0

    def take(self, prefix: Prefix, num_tokens: int) -> int:
        """Tokens of the prefix that need no prefill; afterwards the whole prefix is cached."""
        cached = self._tokens.pop(prefix, 0)
        self._tokens[prefix] = num_tokens
        self._used_tokens += num_tokens - cached
        while self._used_tokens > self._capacity_tokens and len(self._tokens) > 1:
            oldest = next(iter(self._tokens))
            self._used_tokens -= self._tokens.pop(oldest)
        return min(cached, num_tokens)

    def clear(self) -> None:
        self._tokens.clear()
        self._used_tokens = 0
