"""Counts the computation of a trainer: model FLOPs, tokens per second, utilization of the device (MFU), its speed.

Symbols: n tokens of a sequence, m of them loss tokens, W weights of the layers that a token is multiplied with (of the
experts those it uses), V vocabulary, H hidden, L layers, A query heads times their size.

    forward   2·W·n + 2·V·H·m + 2·L·A·n²        (causal attention: QKᵀ and AV over half of n × n)
    forward and backward are three times that; recomputed activations are no model FLOPs and do not count

With adapters no gradient of W and of the head is computed: those two terms count twice instead of three times. The
products with A and B themselves, one or two percent of these terms, are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from penstock.trainer.batches.packing import TrainingSequence
from penstock.weights.model_config import DType, ModelShape

FORWARD_AND_BACKWARD = 3
"""Cost of a training pass relative to a forward pass."""
BF16_FLOPS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}
"""Dense bfloat16 peak of a device by its name, FLOP/s, from the makers' data sheets. The first that fits counts.

Most sheets give it with sparsity, twice as much; nvidia.com/data-center/{h100, h200, gb200-nvl72} list 1,671 TFLOP/s of
both NVL cards, and 10,000 of the two GPUs of a GB200 superchip.
"""


def peak_flops(device_name: str | None, dtype: DType) -> float | None:
    """Peak of a device, FLOP/s; None where it is not known: on a CPU, for other names, in float32."""
    if device_name is None or dtype != "bfloat16":
        return None
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in BF16_FLOPS.items() if set(name.split()) <= set(words)), None)


def product_tflops(device: torch.device) -> float:
    """How fast this device multiplies matrices now, in 10^12 FLOP/s: a product of fixed size, timed.

    A step tells nothing about one rank, since each waits for the slowest in every collective. This product waits for
    no other rank, so one whose device is throttled has a lower rate than its peers. On a CPU the fastest of four
    products counts: the engines of the run may use the same cores.
    """
    is_cuda = device.type == "cuda"
    size, repeats, tries = (4096, 64, 1) if is_cuda else (384, 1, 4)  # 10 ms on an H200 or a CPU core
    numbers = torch.arange(size * size, device=device).remainder(251).div(251).reshape(size, size)
    factor = numbers.to(torch.bfloat16 if is_cuda else torch.float32)
    product = factor @ factor
    least_s = math.inf
    for _ in range(tries):
        if is_cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(factor, factor, out=product)
        if is_cuda:
            torch.cuda.synchronize(device)
        least_s = min(least_s, time.perf_counter() - start)
    return 2.0 * size**3 * repeats / least_s / 1e12


def forward_flops(shape: ModelShape, num_tokens: int, num_targets: int) -> float:
    """Model FLOPs of one sequence through one forward."""
    attention = shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    return _weight_flops(shape, num_tokens, num_targets) + 2.0 * attention


def attention_share(shape: ModelShape) -> float:
    """a = 2·L·A / W: attention products per token and token of context, relative to those with weights.

    QKᵀ and AV over one multiply-add per weight; of all n × n, as an attention with a mask computes them.
    """
    return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim / _layer_weights(shape)


def _weight_flops(shape: ModelShape, num_tokens: int, num_targets: int) -> float:
    """Those of the products with weights."""
    return 2.0 * (_layer_weights(shape) * num_tokens + shape.vocab_size * shape.hidden_size * num_targets)


@cache
def _layer_weights(shape: ModelShape) -> int:
    """W."""
    return shape.active_parameters - shape.vocab_size * shape.hidden_size


@dataclass(slots=True)
class FlopCounter:
    """Computation of all ranks since the last `take`."""

    shape: ModelShape
    num_devices: int
    """Number of devices of the trainer."""
    peak_flops: float | None
    """Peak of one device, FLOP/s; None if unknown."""
    is_adapted: bool = False
    """Whether the policy's weights are frozen under adapters."""
    num_tokens: int = 0
    """Tokens that the policy was trained on, prompts included."""
    flops: float = 0.0

    def trained(self, sequences: Sequence[TrainingSequence], shared_lengths: Sequence[int]) -> None:
        """Count a forward and backward pass of the policy over these sequences."""
        self.computed(sequences, shared_lengths, num_forwards=FORWARD_AND_BACKWARD)
        if self.is_adapted:
            self.flops -= self._sum(_weight_flops, sequences, shared_lengths)
        self.num_tokens += sum(one.num_inputs for one in sequences)

    def computed(
        self, sequences: Sequence[TrainingSequence], shared_lengths: Sequence[int], *, num_forwards: int
    ) -> None:
        """Count additional passes: those of a critic or without gradient. `BatchPlan.shared_lengths` do not count."""
        self.flops += num_forwards * self._sum(forward_flops, sequences, shared_lengths)

    def _sum(
        self,
        flops: Callable[[ModelShape, int, int], float],
        sequences: Sequence[TrainingSequence],
        shared_lengths: Sequence[int],
    ) -> float:
        total = sum(flops(self.shape, one.num_inputs, len(one.targets)) for one in sequences)
        return total - sum(flops(self.shape, length, 0) for length in shared_lengths)

    def take(self, busy_s: float) -> dict[str, float]:
        """Return the rates over `busy_s` seconds of computation and reset the counters."""
        device_s = max(busy_s, 1e-9) * self.num_devices
        rates = {
            "trainer/tokens_per_s_per_device": self.num_tokens / device_s,
            "trainer/tflops_per_device": self.flops / device_s / 1e12,
        }
        if self.peak_flops is not None:
            rates["trainer/mfu"] = self.flops / device_s / self.peak_flops
        self.num_tokens, self.flops = 0, 0.0
        return rates
