"""The kernels on a GPU compared with plain torch, torch.compile and liger-kernel.

Two ceilings are measured in the same run: the rate of a bf16 product of the forward pass's own shape (a slice of the
head), and the bandwidth of a device copy. A share is the time that the contained work takes at the ceiling over the
time taken: products for logprobs (1 forward; 4 forward and backward, 3 where logits are kept), bytes that must be read
and written for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.linear_logprob import linear_logprobs
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.kl import KlConfig
from penstock.trainer.algorithms.losses.clipped import ClippedConfig
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import LossFunction, Objective
from penstock.trainer.batches.collate import MicroBatch, ModelInputs
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.optimizer_steps import OpenOptimizerStep

GIB = float(1 << 30)
WARMUP, ROUNDS = 2, 10
LOSS = AlgorithmConfig(loss=ClippedConfig(clip_high=0.28), proximal="recompute", kl=KlConfig(coefficient=0.01))


@dataclass(frozen=True)
class GpuWork:
    """Sizes; bf16 for logprobs and weights, float32 for losses."""

    num_tokens: int = 16_384
    vocab_size: int = 151_936
    hidden_size: int = 4096
    packed_tokens: int = 262_144
    num_sequences: int = 64


@dataclass(frozen=True)
class Contender:
    """One way to do a piece of work.

    Attributes:
        kernel: What is done.
        name: Who does it.
        run: One repetition.
        flops: Of the products in it.
        num_bytes: That must be read and written.
    """

    kernel: str
    name: str
    run: Callable[[], object]
    flops: float = 0.0
    num_bytes: float = 0.0


def seconds(run: Callable[[], object]) -> list[float]:
    """Of each repetition, by device events."""
    for _ in range(WARMUP):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUNDS)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def plain_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def logprob_contenders(work: GpuWork, device: torch.device) -> Iterator[Contender]:
    options: Any = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(work.num_tokens, work.hidden_size, **options).requires_grad_()
    weight = torch.randn(work.vocab_size, work.hidden_size, **options).mul_(0.02).requires_grad_()
    targets = torch.randint(0, work.vocab_size, (work.num_tokens,), device=device)
    upstream = torch.randn(work.num_tokens, device=device)
    product = 2.0 * work.num_tokens * work.vocab_size * work.hidden_size

    def both(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            function(hidden, weight, targets).backward(upstream)

        return run

    def forward(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: function(hidden, weight, targets))

    def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, targets).logprobs

    for name, function, products in (
        ("penstock", tiled, 4),
        ("torch", plain_logprob, 3),
        ("torch.compile", torch.compile(plain_logprob), 3),
    ):
        yield Contender("logprobs, forward", name, forward(function), product)
        hidden.grad = weight.grad = None
        yield Contender("logprobs, forward and backward", name, both(function), products * product)
    if find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden.grad = weight.grad = None
        mean_loss = LigerFusedLinearCrossEntropyLoss(reduction="mean")

        def liger() -> None:
            hidden.grad = weight.grad = None
            mean_loss(weight, hidden, targets).backward()

        # One gradient for all tokens, known in forward: three products, and no entropy.
        yield Contender("logprobs, forward and backward", "liger-kernel (mean of −logprob)", liger, 3 * product)


def loss_contenders(work: GpuWork, device: torch.device) -> Iterator[Contender]:
    """Loss, gradient and everything that a step reports of its tokens."""
    num_tokens = work.packed_tokens
    columns = torch.randn(6, num_tokens, device=device) * 0.1
    target, entropies, behavior, proximal, reference, advantages = columns.unbind()
    target.requires_grad_()
    index = torch.arange(num_tokens, device=device)
    places = np.arange(num_tokens)
    batch = MicroBatch(
        inputs=ModelInputs(index, index, None, index, index),
        behavior_logprobs=behavior,
        advantages=advantages,
        token_weights=torch.full_like(behavior, 1.0 / num_tokens),
        reference_logprobs=reference,
        staleness=index % 5,
        segments=index * work.num_sequences // num_tokens,
        pairs=torch.zeros(0, 2, dtype=torch.int64, device=device),
        sequence_index=places,
        token_index=places,
        num_segments=work.num_sequences,
        num_tokens=num_tokens,
        proximal_logprobs=proximal,
    )
    update = OpenOptimizerStep(TokenMetrics(device), is_first=False)

    def loss_of(function: LossFunction) -> Callable[[], None]:
        def run() -> None:
            target.grad = None
            function(target, entropies, batch, update).backward()

        return run

    objective = Objective(Algorithm(LOSS))
    # Read are 7 float32 columns and the staleness, written is the gradient; backward reads and writes it once more.
    num_bytes = (7 * 4 + 8 + 4 + 8.0) * num_tokens
    for name, function in (("penstock", objective), ("torch.compile", torch.compile(objective))):
        yield Contender("policy loss and its metrics", name, loss_of(function), num_bytes=num_bytes)


def ceilings(work: GpuWork, device: torch.device) -> tuple[float, float]:
    """FLOP/s of a bf16 product of a slice of the head, and bytes/s of a copy (read and write)."""
    words = min(work.vocab_size, 16_384)
    left = torch.randn(work.num_tokens, work.hidden_size, device=device, dtype=torch.bfloat16)
    right = torch.randn(words, work.hidden_size, device=device, dtype=torch.bfloat16)
    source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product_s = median(seconds(lambda: left @ right.T))
    copy_s = median(seconds(lambda: target.copy_(source)))
    return 2.0 * work.num_tokens * words * work.hidden_size / product_s, 2.0 * source.numel() / copy_s


def run_gpu(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every contender; one that runs out of memory is recorded as such."""
    device, work = torch.device("cuda"), GpuWork()
    flops_rate, bytes_rate = ceilings(work, device)
    rows = []
    for contenders in (logprob_contenders, loss_contenders):
        for contender in contenders(work, device):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            row: dict[str, Any] = {"kernel": contender.kernel, "name": contender.name}
            try:
                row["seconds"] = seconds(contender.run)
                at_ceiling = contender.flops / flops_rate + contender.num_bytes / bytes_rate
                row["share"] = at_ceiling / median(row["seconds"])
                row["peak_bytes"] = torch.cuda.max_memory_allocated() - held
            except torch.OutOfMemoryError:
                row["seconds"] = None
            rows.append(row)
            say(str(row))
    return {"work": asdict(work), "flops_per_s": flops_rate, "bytes_per_s": bytes_rate, "rows": rows}


def gpu_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes."""
    rows = []
    for row in results["rows"]:
        if row["seconds"] is None:
            rows.append([row["kernel"], row["name"], "out of memory", "", ""])
            continue
        times = [1e3 * each for each in row["seconds"]]
        took = f"{median(times):.3f} ({min(times):.3f} … {max(times):.3f}) ms"
        rows.append([row["kernel"], row["name"], took, f"{row['share']:.0%}", f"{row['peak_bytes'] / GIB:.2f} GiB"])
    work = results["work"]
    notes = [
        f"ceilings of this run: {results['flops_per_s'] / 1e12:.0f} TFLOP/s (bf16 product of a slice of the head), "
        f"{results['bytes_per_s'] / 1e12:.2f} TB/s (device copy)",
        f"logprobs: T={work['num_tokens']}, V={work['vocab_size']}, H={work['hidden_size']}, bf16; loss: "
        f"{work['packed_tokens']} tokens",
        f"{ROUNDS} repetitions after {WARMUP}: median (least … greatest); share of the ceiling, for the contained work",
        "liger-kernel computes the gradient in forward and only for a mean: three products, no entropies"
        if find_spec("liger_kernel")
        else "liger-kernel is not installed: not compared",
    ]
    return ["work", "by", "time", "share of the ceiling", "peak extra memory"], rows, notes
