"""The experts that each token of a mixture of experts was sent to, as an engine recorded them.

A row holds the experts of one token in every layer that has experts, `[layers, k]`, in the smallest unsigned type that
has one more value than there are experts: the largest value says that they are not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.unsignedinteger[Any]]
"""`[tokens, layers, k]`."""


def dtype_for(num_experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The type of routes over so many experts."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def unknown_routes(num_tokens: int, like: Routes) -> Routes:
    """Rows of tokens whose experts are not known."""
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def joined_routes(parts: Iterable[Routes | None]) -> Routes | None:
    """One after the other, without those that are None; None if nothing is left."""
    found = [one for one in parts if one is not None]
    return np.concatenate(found) if found else None


def padded_routes(routes: Routes, num_tokens: int) -> Routes:
    """With unknown rows at the end, for the tokens that no engine has computed."""
    return np.concatenate([routes, unknown_routes(num_tokens - len(routes), routes)])


def signed_routes(routes: Routes) -> NDArray[np.int16]:
    """With −1 for what is not known."""
    return np.where(routes == np.iinfo(routes.dtype).max, -1, routes.astype(np.int16))
