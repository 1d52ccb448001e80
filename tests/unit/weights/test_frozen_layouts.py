"""The layouts of vLLM engines are those of tests/data/layouts."""

from __future__ import annotations

import pytest

from penstock.weights.layout.vllm import vllm_layout
from tests.contract.test_vllm_layout import CASES
from tests.layouts import NAMES, read
from tests.unit.weights.models import tensors_of


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_is_the_frozen_one(name: str) -> None:
    frozen = read(name)
    loaded = name.removeprefix("loaded_")
    model, tensors = (CASES[loaded].shape, CASES[loaded].tensors) if loaded != name else tensors_of(name)
    assert tensors == frozen.tensors
    assert set(frozen.layouts) - {7, 14} >= ({1, 2, 4} if "heads" not in name else {1})
    for tp, layout in frozen.layouts.items():
        assert vllm_layout(tensors, model, tp) == layout
