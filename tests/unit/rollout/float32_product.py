"""PTX for compute capability 9.0 of a product of float32 matrices, as attention kernels write it: prints it.

In a process of its own, because Triton reads its settings once and other tests interpret kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZE = 32


@triton.jit
def multiply(left, right, out, size: tl.constexpr):
    rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    places = rows * size + columns
    tl.store(out + places, tl.dot(tl.load(left + places), tl.load(right + places)))


if __name__ == "__main__":
    signature = {"left": "*fp32", "right": "*fp32", "out": "*fp32", "size": "constexpr"}
    source = ASTSource(multiply, signature, {"size": SIZE})
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
