"""Version spans: the run-length encoded policy versions of sampled tokens.

Invariant I4: along a token sequence, versions never decrease, because an engine only moves to newer weights, and the
span lengths sum to the number of sampled tokens. A trajectory with several threads consists of several sequences, whose
spans are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import StalenessError


class Span(NamedTuple):
    """`num_tokens` consecutive sampled tokens, all sampled by policy `version`."""

    version: int
    num_tokens: int


Spans = tuple[Span, ...]


def join_spans(spans: Sequence[Span]) -> Spans:
    """Merge adjacent spans of equal version and drop empty ones.

    Raises:
        StalenessError: If a version decreases (I4).
    """
    joined = concatenate_spans([spans])
    for before, after in pairwise(joined):
        if after.version < before.version:
            raise StalenessError(
                f"versions: tokens of v{after.version} follow tokens of v{before.version} in one sequence (I4). Its "
                "first token would not be its oldest, and its staleness would be underestimated. An engine went back "
                "to older weights, or labels its tokens with a wrong version."
            )
    return joined


def concatenate_spans(threads: Sequence[Sequence[Span]]) -> Spans:
    """Concatenate the spans of several token sequences; adjacent spans of equal version are merged."""
    joined: list[Span] = []
    for span in chain.from_iterable(threads):
        if joined and span.version == joined[-1].version:
            joined[-1] = Span(span.version, joined[-1].num_tokens + span.num_tokens)
        elif span.num_tokens:
            joined.append(span)
    return tuple(joined)


def num_tokens(spans: Spans) -> int:
    """Total length of the spans, in tokens."""
    return sum(span.num_tokens for span in spans)


def first_tokens(spans: Spans, num_tokens: int) -> Spans:
    """Spans of the first `num_tokens` tokens."""
    kept: list[Span] = []
    for version, length in spans:
        kept.append(Span(version, min(length, num_tokens)))
        num_tokens -= kept[-1].num_tokens
    return tuple(span for span in kept if span.num_tokens)


def last_tokens(spans: Spans, num_tokens: int) -> Spans:
    """Spans of the last `num_tokens` tokens."""
    return first_tokens(spans[::-1], num_tokens)[::-1]


def versions_per_token(spans: Spans) -> NDArray[np.int32]:
    """Expand spans to one version per sampled token, `[num_tokens] int32`."""
    return np.repeat(
        np.array([span.version for span in spans], dtype=np.int32),
        [span.num_tokens for span in spans],
    )
