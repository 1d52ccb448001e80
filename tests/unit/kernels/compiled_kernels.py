"""Run by test_triton_kernels.py without TRITON_INTERPRET: every kernel compiles to machine code, no GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.kernels.gpu import changed_elements, logprob_backward, logprob_forward, policy_loss
from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.trainer.algorithms.metrics import STALENESS_BUCKETS

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


def other_variants() -> Iterator[Variant]:
    yield from loss_variants()
    for words, size in (("i16", "i32"), ("i32", "i64")):
        types = dict.fromkeys(("current", "previous", "values", "target"), f"*{words}")
        types |= {"bitmap": "*u8", "counts": "*i32", "offsets": "*i64", "positions": "*i64"}
        types |= {"num_elements": size, "num_values": size}
        for kernel in (
            changed_elements.compare_kernel,
            changed_elements.gather_kernel,
        ):
            name = f"{kernel.fn.__name__} {words} {size}"
            yield Variant(name, kernel, types, {"BLOCK": changed_elements.BLOCK})


def loss_variants() -> Iterator[Variant]:
    columns = ("target", "proximal", "behavior", "reference", "advantages", "weights", "start", "teacher", "entropies")
    types = {
        **dict.fromkeys((*columns, "gradient"), "*fp32"),
        "partials": "*fp64",
        "staleness": "*i64",
        "bucket_ends": "*i64",
    }
    types |= dict.fromkeys(("lowest_ratio", "highest_ratio", "cap", "kl_coefficient", "limit", "kl_limit"), "fp32")
    for correction, divergence, is_measured in (
        ("none", "k3", True),
        ("decoupled", "none", False),
        ("decoupled", "k2", True),
        ("tis_token", "k3", True),
    ):
        constants = {
            "CORRECTION": policy_loss.CORRECTIONS[correction],
            "DIVERGENCE": policy_loss.DIVERGENCES[divergence],
            "IS_MEASURED": is_measured,
            "NUM_BUCKETS": len(STALENESS_BUCKETS),
            "BLOCK": policy_loss.BLOCK,
        }
        name = f"loss {correction} {divergence} measured={is_measured}"
        yield Variant(name, policy_loss.clipped_loss_kernel, types, constants)


VARIANTS = [*forward_variants(), *backward_variants(), *other_variants()]


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
