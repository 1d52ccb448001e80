"""Generated tasks: what a `draw` must give."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.tasks.generated_tasks import GeneratedTasks


def test_a_draw_without_a_prompt_is_an_error() -> None:
    class Mine(GeneratedTasks):
        def draw(self, rng: random.Random) -> dict[str, Any]:
            return {"question": "?"}

    with pytest.raises(ValueError, match=r"Mine.draw\(rng\) gave keys \['question'\]; expected a dict with 'prompt'"):
        next(Mine(0).train())


def test_a_field_whose_text_differs_between_processes_is_refused_unless_the_split_leaves_it_out() -> None:
    class Mine(GeneratedTasks):
        def draw(self, rng: random.Random) -> dict[str, Any]:
            return {"prompt": str(rng.random()), "tags": {"a", "b"}}

    class Split(Mine):
        def split_by(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"prompt": row["prompt"]}

    with pytest.raises(ConfigError, match=r"field 'tags' of a task is .* of type set, which is not JSON"):
        next(Mine(0).train())
    assert next(Split(0).train()).fields == {"tags": {"a", "b"}}
