"""Run by test_triton_kernels.py without TRITON_INTERPRET: every kernel compiles to machine code, no GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.kernels.gpu import logprob_backward, logprob_forward
from penstock.kernels.gpu.dispatch import is_interpreted

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory a program may have, by compute capability: A100, and H100 or H200."""


@dataclass
class Variant:
    """One way a kernel is launched: types of its arguments, constants, warps and stages."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: set[str] = field(default_factory=set)


def forward_variants() -> Iterator[Variant]:
    kernel = logprob_forward.statistics_kernel.fn
    results = dict.fromkeys(("maxima", "totals", "weighted_sums", "target_logits"), "*fp32")
    types = {"targets": "*i64", **results, "scale": "fp32", "lowest": "fp32"}
    wide, narrow = logprob_forward.FLOAT32_CONFIGS, logprob_forward.CONFIGS
    for dtype, configs in (("bf16", narrow), ("fp32", wide)):
        for config in configs:
            for precision in ("tf32", "ieee") if dtype == "fp32" else ("ieee",):
                yield Variant(
                    f"forward {dtype} {precision} {config.kwargs}",
                    kernel,
                    {**types, "hidden": f"*{dtype}", "weight": f"*{dtype}"},
                    {**config.kwargs, "PRECISION": precision},
                    config.num_warps,
                    config.num_stages,
                    aligned={"hidden_size", "split_size"},
                )


def backward_variants() -> Iterator[Variant]:
    floats = ("logits", "upstream_logprob", "upstream_entropy", "maxima", "log_totals", "entropies")
    types = {**dict.fromkeys(floats, "*fp32"), "columns": "*i64", "scale": "fp32"}
    first = logprob_backward.CONFIGS[0]
    launched = [("bf16", config, True) for config in logprob_backward.CONFIGS]
    for dtype, config, has_entropy in [*launched, ("bf16", first, False), ("fp32", first, True)]:
        yield Variant(
            f"backward {dtype} {config.kwargs} entropy={has_entropy}",
            logprob_backward.logits_gradient_kernel.fn,
            {**types, "gradient": f"*{dtype}"},
            {**config.kwargs, "HAS_ENTROPY": has_entropy},
            config.num_warps,
        )


VARIANTS = [*forward_variants(), *backward_variants()]


def compiled(variant: Variant, capability: int) -> Any:
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "i32") for name in names}
    signature |= dict.fromkeys(variant.constants, "constexpr")
    is_aligned = [signature[name].startswith("*") or name in variant.aligned for name in names]
    attributes = {(place,): [["tt.divisibility", 16]] for place, aligned in enumerate(is_aligned) if aligned}
    source = ASTSource(variant.kernel, signature, variant.constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def test_this_process_compiles() -> None:
    assert not is_interpreted()


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_kernel_compiles_to_machine_code_and_fits(variant: Variant, capability: int) -> None:
    result = compiled(variant, capability)
    assert len(result.asm["cubin"]) > 1000
    assert result.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("variant", [each for each in forward_variants() if "bf16" in each.name], ids=lambda v: v.name)
def test_the_forward_kernel_uses_hoppers_matrix_and_copy_engines(variant: Variant) -> None:
    ptx = compiled(variant, 90).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
