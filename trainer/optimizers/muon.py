"""Muon for the hidden matrices of a model, and AdamW for all its other parameters, as one optimizer.

    B ← μ·B + (1 − μ)·G                      U = (1 − μ)·G + μ·B          (Nesterov)
    O = Newton-Schulz(U)                     about the orthogonal matrix nearest to U, by five steps in bfloat16
    W ← (1 − η·λ)·W − 0.2·√max(rows, columns)·η·O

That is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`: the quadratic mean of a step is about a fifth of η, as
AdamW's is, so both take the same learning rate and weight decay. A weight of stacked experts is a matrix for each.

A matrix is updated as a whole. So every rank has whole matrices and gradients that are reduced (one process, or
ZeRO-0), and all of them compute the same update.

Sources: K. Jordan, kellerjordan.github.io/posts/muon; Muon is scalable for LLM training, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.config import OptimizerConfig
from penstock.trainer.optimizers.adamw import AdamW, Named
from penstock.weights.layout.checkpoint_names import expert_weights

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X: the steepest at 0, so that small singular values grow fast."""
NUM_ITERATIONS = 5
EPS = 1e-7
"""Least norm by which a matrix is divided."""


def hidden_matrices(hf_model: Any) -> set[str]:
    """Names of the weights that Muon updates: of linear layers, routers and experts, between embedding and head.

    What a module multiplies with is its `weight`, of two dimensions; or it has one matrix of each expert. The model
    says which modules are its embedding and its head; other embeddings (of positions) are none either.
    """
    head = hf_model.get_output_embeddings()
    outside = [one for one in hf_model.modules() if isinstance(one, nn.Embedding) or one is head]
    others = {id(parameter) for module in outside for parameter in module.parameters()}
    body = {id(parameter) for parameter in hf_model.base_model.parameters()} - others
    experts = set(expert_weights(hf_model))
    return {
        name
        for name, parameter in hf_model.named_parameters()
        if id(parameter) in body and (name in experts or (parameter.dim() == 2 and name.rpartition(".")[2] == "weight"))
    }


class Muon(torch.optim.Optimizer):
    """`torch.optim.Optimizer` whose first group is the matrices; the others are those of an `AdamW`.

    Both share groups and states. So who replaces the parameters of a group by float32 copies, as DeepSpeed does,
    replaces them in both.

    Attributes:
        states: Name of each parameter -> names of its states.
    """

    def __init__(self, matrices: Named, others: Named, config: OptimizerConfig) -> None:
        """Take the matrices `[rows, columns]`, those of experts `[E, rows, columns]`, and all other parameters."""
        assert config.muon is not None, "Muon is configured"
        self._adamw = AdamW(others, config)
        settings = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.muon.momentum}
        hidden = {"params": [one for _, one in matrices], **settings}
        super().__init__([hidden, *self._adamw.param_groups], {})
        self._adamw.state = self.state
        kept = tuple(config.states(is_matrix=True))
        self.states: Mapping[str, Sequence[str]] = {name: kept for name, _ in matrices} | dict(self._adamw.states)

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The live state of a tensor that it updates; zeros are created before its first update."""
        if not any(tensor is one for one in self.param_groups[0]["params"]):
            return self._adamw.state_of(tensor)
        state: dict[str, Tensor] = self.state[tensor]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(tensor.detach())
        return state

    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        assert closure is None, "nothing here computes the loss again"
        hidden = self.param_groups[0]
        with torch.no_grad():
            for weight in hidden["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, hidden)
        return self._adamw.step()

    def _update(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        rate = group["lr"] * (0.2 * math.sqrt(max(weight.shape[-2:])))
        tensors = weight, gradient, self.state_of(weight)["momentum_buffer"]
        # One expert after the other: those of a layer at once would take several times the memory of all of them.
        of_matrices = [[tensor] if tensor.dim() == 2 else tensor.unbind() for tensor in tensors]
        for matrix, g, mean in zip(*of_matrices, strict=True):
            mean.lerp_(g, 1 - group["momentum"])
            direction = orthogonalised(g.lerp(mean, group["momentum"]))
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(direction, alpha=-rate)


def orthogonalised(matrix: Tensor) -> Tensor:
    """`[rows, columns] bfloat16`: singular vectors as those of a matrix, singular values between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    x = x.div_(x.norm().clamp(min=EPS))  # no singular value is above 1
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
