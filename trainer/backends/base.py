"""The port between the training step and the backend, which holds parameters, gradients and optimizer state.

One process per rank. Every method marked *collective* must be called by all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from penstock.kernels.expert_choice import ExpertChoice
from penstock.trainer.batches.collate import ModelInputs
from penstock.trainer.checkpoint import CheckpointReader, Fragment
from penstock.trainer.models.lora import Adapter, Adapters
from penstock.weights.layout.sides import TrainingSharding


class OptimizerResult(NamedTuple):
    """Result of one optimizer step, equal on all ranks."""

    grad_norm: float
    """Global 2-norm of the gradient before clipping; inf when it was not finite."""
    is_skipped: bool
    """Whether the step was skipped because the loss or the gradient was not finite."""


class Backend(Protocol):
    """One rank of the trainer.

    A step is: `forward` and `backward` once per micro-batch, then `optimizer_step`. The gradient is that of the *sum*
    of all losses over micro-batches and ranks: normalisers are global and inside the loss, so no backend divides.
    """

    rank: int
    """This process among all ranks."""
    data_parallel_rank: int
    """Whose sequences this rank computes on, 0 ≤ rank < data_parallel_size. Tensor- and sequence-parallel ranks share
    theirs."""
    data_parallel_size: int
    sequence_parallel_rank: int
    """Which stretch of each of them, 0 ≤ rank < sequence_parallel_size."""
    sequence_parallel_size: int
    context_group: ProcessGroup | None
    """Ranks with the other stretches, whose keys and values attention gathers; None: it needs none."""
    device: torch.device
    adapters: Adapters
    """What is trained, if it is not the weights themselves; empty otherwise."""
    experts: ExpertChoice | None
    """Chooses those of the model; None of a dense one."""

    def forward(self, inputs: ModelInputs, temperature: float) -> tuple[Tensor, Tensor]:
        """`PolicyModel.forward`. Collective under ZeRO-3."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a scalar float32 loss; `is_last` closes the accumulation of this step. Collective."""
        ...

    def optimizer_step(self, normaliser: float = 1.0) -> OptimizerResult:
        """Divide the gradient by `normaliser`, clip, update, clear; skip if anything is not finite. Collective."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        ...

    def evaluation(self) -> AbstractContextManager[None]:
        """Context in which `forward` keeps no graph and returns `is_argmax` instead of entropies."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and full tensor of each parameter, tied ones once. Rank 0 yields; all ranks exhaust it. Collective.

        Adapters are merged into the weights, here and in `local_weights`, unless they are switched off.
        A yielded tensor may alias live weights: use it before the next step.
        """
        ...

    def gathered_adapters(self) -> dict[str, Adapter]:
        """HF name of each adapted weight -> its adapter, copied, on every rank. Collective."""
        ...

    def training_sharding(self) -> TrainingSharding:
        """Tensors by HF name, and their sharding over the ranks."""
        ...

    def local_weights(self) -> dict[str, Tensor]:
        """HF name -> this rank's part of the tensor, flat, aliasing live weights. Collective with adapters."""
        ...

    def held_weights(self) -> dict[str, Tensor]:
        """Name -> this rank's part of each tensor, flat, aliasing live weights; A and B of adapters apart.

        Nothing is merged or gathered, so another thread may call it during a step. Not collective. Empty on a rank all
        of whose parts a lower rank has, too.
        """
        ...

    def save_hf(self, path: str, held: Sequence[Mapping[str, Tensor]]) -> None:
        """Write config and weights in Hugging Face form, adapters merged and by themselves. On rank 0, not collective.

        Args:
            path: Folder to write.
            held: `held_weights` of each rank.
        """
        ...

    def fragments(self) -> list[Fragment]:
        """This rank's share of the trained parameters and their optimizer state, as aliases of the live tensors.

        The shares of all ranks are disjoint, and together they are all elements. Not collective.
        """
        ...

    def restore(self, reader: CheckpointReader, prefix: str) -> None:
        """Continue from saved parameters and optimizer state, of any backend and number of ranks. Collective.

        Raises:
            CheckpointError: If the parameters are those of another model.
        """
        ...

    def all_reduce(self, values: NDArray[np.float64], operation: Literal["sum", "max"]) -> NDArray[np.float64]:
        """Reduce float64 values over the ranks that computed on different tokens. Collective."""
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...


def poison_if_not_finite(loss: Tensor) -> Tensor:
    """Make a non-finite loss give non-finite gradients everywhere: `loss · (1 + 0 · sg(loss))`.

    The global gradient norm then decides whether a step is skipped, so all ranks agree without communication.
    """
    return loss * (1.0 + 0.0 * loss.detach())
