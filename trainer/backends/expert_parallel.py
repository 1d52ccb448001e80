"""Experts on ranks of their own: tokens travel to weights, not weights to tokens (`trainer.expert_parallel`).

    router     each rank chooses the experts of its tokens, or takes those that are recorded (routing replay)
    dispatch   all-to-all: each pair of token and expert goes to the rank that has the expert
    experts    a rank computes its E / W experts, for the tokens of all W ranks
    combine    all-to-all back: the token's rank weighs and sums what returns

By the model's own plan and with transformers' own exchange. The experts of a rank are the rows that FSDP2 would give
it, so nothing changes for what is published and saved. They see the tokens of all ranks of a copy, so their gradients
are complete there, and only summed over copies.

n tokens a rank, k experts a token, H hidden, P parameters of an expert, bytes of a layer that a rank sends in one
forward and backward pass, of elements of w bytes: 4·n·k·H·w·(W − 1)/W, if tokens are spread evenly over experts, and
2·n·k·H·w·(W − 1)/W more with gradient checkpointing. Without it, E·P·(2·w + 4)·(W − 1)/W.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from penstock.dataflow.errors import ConfigError
from penstock.weights.layout.checkpoint_names import expert_weights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DISPATCH = "ep_dispatch_experts"
"""What transformers calls all-to-all of tokens in the plan of a model, beside the name of a module of experts."""


def modules_of_experts(causal_lm: Any) -> list[tuple[str, nn.Module]]:
    """The modules that hold all experts of a layer, by the plan of a model of transformers.

    Raises:
        ConfigError: If it has no such plan.
    """
    plan = getattr(causal_lm, "ep_plan", None) or {}
    planned = {name for name, style in plan.items() if style == _DISPATCH}
    found = [(name, one) for name, one in causal_lm.named_modules() if re.sub(r"\d+", "*", name) in planned]
    if not found:
        kind = type(causal_lm).__name__
        raise ConfigError(
            [f"trainer.expert_parallel=true: transformers has no plan for {kind} that sends tokens to experts "
             f"({_DISPATCH}); what it has: {', '.join(sorted(set(plan.values()))) or 'none'}. Use "
             "trainer.expert_parallel=false."]
        )  # fmt: skip
    return found


def place_experts(causal_lm: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave a rank its own experts of each layer, as float32 if they are trained, and let tokens travel to them.

    Args:
        causal_lm: A whole model of transformers; changed in place.
        mesh: Of one dimension: the ranks that share the experts, whose number divides that of the experts.

    Returns:
        The modules that hold them; none of a dense critic beside a mixture.

    Raises:
        ConfigError: As `modules_of_experts`.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    if not (causal_lm.ep_plan or expert_weights(causal_lm)):
        return []
    modules = [one for _, one in modules_of_experts(causal_lm)]
    apply_expert_parallelism(causal_lm, mesh, None, causal_lm.ep_plan)
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.requires_grad:
                setattr(module, name, nn.Parameter(weight.detach().float()))
    return modules
