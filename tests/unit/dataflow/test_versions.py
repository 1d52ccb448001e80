"""Version spans: merged, never decreasing, summing to the sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.dataflow.errors import StalenessError
from penstock.dataflow.versions import Span, join_spans, num_tokens, versions_per_token


def test_neighbours_of_one_version_merge_and_empty_spans_vanish() -> None:
    assert join_spans([Span(1, 2), Span(1, 3), Span(2, 0), Span(4, 1)]) == (Span(1, 5), Span(4, 1))


def test_versions_never_decrease() -> None:
    with pytest.raises(StalenessError, match=r"v3 follow tokens of v4 .*\(I4\)"):
        join_spans([Span(4, 1), Span(3, 1)])


def test_spans_expand_to_one_version_per_token() -> None:
    spans = join_spans([Span(1, 2), Span(3, 1)])
    assert num_tokens(spans) == 3
    np.testing.assert_array_equal(versions_per_token(spans), [1, 1, 3])
