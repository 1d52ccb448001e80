from __future__ import annotations

import pytest
import torch

from penstock.weights.copies import copy_environment, copy_values, is_shortly_behind


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1001,), (7, 13)])
@pytest.mark.parametrize("is_strided", [False, True])
def test_copies_are_those_of_torch(into, dtype, shape, is_strided):
    source = torch.randn(shape).to(dtype)
    held = torch.full((*shape, 2), 9.0, dtype=into)
    target = held[..., 0] if is_strided else held[..., 0].clone()
    copy_values(target, source)
    assert torch.equal(target, source.to(into))
    assert (held[..., 1] == 9).all()


@pytest.mark.parametrize(("behind", "is_slow"), [(0, False), (64, True), (448, True), (512, False), (4032, False)])
def test_copies_between_any_two_offsets_in_a_page_are_correct(behind: int, is_slow: bool) -> None:
    source, held = torch.randn(5000), torch.zeros(5000 + 1024)
    start = (behind - (held.data_ptr() - source.data_ptr())) % 4096 // 4
    target = held[start : start + 5000]
    assert is_shortly_behind(target.data_ptr(), source.data_ptr()) == is_slow
    copy_values(target, source)
    assert torch.equal(target, source)
    assert not held[:start].any()
    assert not held[start + 5000 :].any()


def test_parameters_that_need_a_gradient_are_overwritten_where_they_are():
    parameter = torch.nn.Parameter(torch.zeros(5))
    with torch.no_grad():
        copy_values(parameter, torch.arange(5.0))
    assert parameter.tolist() == [0, 1, 2, 3, 4]


def test_a_variable_that_the_user_has_set_is_kept(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert copy_environment() == {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x400000"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert copy_environment() == {}
