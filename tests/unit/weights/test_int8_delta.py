"""The error of `int8_delta` stays within half a step of the last publish; golden values from float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.codec.codec import Encoded, words
from penstock.weights.codec.int8_delta import Int8DeltaCodec
from tests.tiers import examples
from tests.unit.weights.codec_pair import DTYPES, Pair, from_bits, walk


@pytest.mark.parametrize("num_elements", [128_000, 128_001])
def test_int8_delta_takes_a_quarter_of_float32(num_elements: int) -> None:
    for dtype in DTYPES:
        pair = Pair("int8_delta", torch.zeros(num_elements, dtype=dtype))
        encoded = pair.publish(torch.randn(num_elements).to(dtype))
        assert encoded.form == "int8"
        assert encoded.num_bytes == num_elements + 4 * -(-num_elements // 128)
        assert encoded.num_bytes <= 0.27 * 4 * num_elements


def test_int8_delta_sends_whole_if_that_is_smaller() -> None:
    forms = {}
    for size in (1, 4, 5):
        pair = Pair("int8_delta", torch.zeros(size, dtype=torch.bfloat16))
        forms[size] = pair.publish(torch.ones(size, dtype=torch.bfloat16)).form
    assert forms == {1: "whole", 4: "whole", 5: "int8"}


def test_quantisation_equals_an_independent_float64_computation() -> None:
    generator = np.random.default_rng(0)
    before, after = (generator.normal(size=300).astype(np.float32) for _ in range(2))
    pair = Pair("int8_delta", torch.from_numpy(before))
    encoded = pair.publish(torch.from_numpy(after))
    difference = np.zeros(384)
    difference[:300] = after.astype(np.float64) - before
    scales = np.abs(difference.reshape(3, 128)).max(1) / 127
    steps = np.rint(difference.reshape(3, 128) / scales[:, None])
    np.testing.assert_allclose(encoded.parts["scales"].numpy(), scales, rtol=1e-6)
    np.testing.assert_array_equal(encoded.parts["steps"].numpy(), steps.ravel()[:300])
    expected = before + (steps * scales[:, None]).ravel()[:300]
    np.testing.assert_allclose(pair.live.numpy(), expected, rtol=1e-6, atol=1e-6)


def half_steps(encoded: Encoded, num_elements: int) -> torch.Tensor:
    """s / 2 of every element, float64."""
    if encoded.form == "whole":
        return torch.zeros(num_elements, dtype=torch.float64)
    return encoded.parts["scales"].double().repeat_interleave(128)[:num_elements] / 2


def error_and_bound(pair: Pair, encoded: Encoded, current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|x − r|, and s / 2 + u / 2 with the rounding error of computing it in float32; float64."""
    error = (pair.live.double() - current.double()).abs()
    greater = torch.maximum(current.abs(), pair.live.abs())
    spacing = (words(greater) + 1).view(greater.dtype).double() - greater.double()  # to the next number
    return error, half_steps(encoded, current.numel()) * (1 + 1e-4) + spacing / 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_feedback_the_error_stays_within_half_a_step_of_the_last_publish(dtype: torch.dtype) -> None:
    first, *versions = walk(dtype, 100)
    pair = Pair("int8_delta", first)
    for current in versions:
        encoded = pair.publish(current)
        assert encoded.form == "int8"
        error, bound = error_and_bound(pair, encoded, current)
        assert (error <= bound).all()


def test_without_feedback_the_error_grows_beyond_every_step() -> None:
    first, *versions = walk(torch.float32, 100)
    fed, open_loop = Pair("int8_delta", first), Pair("int8_delta", first)
    errors = []
    codec = Int8DeltaCodec()
    for version, current in enumerate(versions, 2):
        fed.publish(current)
        encoded = codec.encode(current, open_loop.sender, version)
        codec.decode(encoded, open_loop.receiver, open_loop.live)
        assert open_loop.sender.values is not None
        open_loop.sender.values.copy_(current)  # as if the receiver had it exactly
        errors.append([float((pair.live - current).square().mean().sqrt()) for pair in (fed, open_loop)])
    with_feedback, without = np.array(errors).T
    assert with_feedback[-1] < 1.5 * with_feedback[:10].mean()
    assert without[-1] > 5 * without[0]
    assert without[-1] > 5 * with_feedback[-1]
    error, bound = error_and_bound(open_loop, encoded, versions[-1])
    assert (error > bound).float().mean() > 0.5


@settings(max_examples=examples(100), deadline=None)
@given(values=hnp.arrays(np.uint32, st.integers(8, 200)))
def test_the_bound_holds_for_any_finite_change_denormals_included(values: np.ndarray) -> None:
    current = from_bits(values, torch.float32)
    current = torch.where(current.abs() < 1e38, current, 0.0)
    pair = Pair("int8_delta", torch.zeros_like(current))
    encoded = pair.publish(current)
    assert encoded.form == "int8"
    error, bound = error_and_bound(pair, encoded, current)
    assert (error <= bound).all()


@pytest.mark.parametrize("peak", [1, 60, 64, 126, 127, 128, 190, 191, 254, 255, 1000])
def test_steps_among_denormals_reach_the_peak(peak: int) -> None:
    current = from_bits([peak] * 3 + [0] * 200, torch.float32)
    pair = Pair("int8_delta", torch.zeros_like(current))
    encoded = pair.publish(current)
    assert encoded.form == "int8"
    assert ((pair.live.double() - current.double()).abs() <= half_steps(encoded, 203)).all()


def test_two_block_sizes_do_not_mix() -> None:
    pair = Pair("int8_delta", torch.zeros(1000))
    encoded = Int8DeltaCodec(block_elements=64).encode(torch.ones(1000), pair.sender, 2)
    with pytest.raises(
        WeightSyncError, match=r"publish v2: w: part 'scales' .* \(16,\), but 8 elements were expected.* differ"
    ):
        pair.codec.decode(encoded, pair.receiver, pair.live)
    assert pair.receiver.version == 1


def test_weights_that_stop_changing_are_exact_after_few_publishes() -> None:
    pair = Pair("int8_delta", torch.zeros(1000))
    current = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    num_publishes = next(count for count in range(1, 10) if pair.publish(current) and torch.equal(pair.live, current))
    assert num_publishes <= 5  # each divides the error by 254
