"""What a tensor is to a decoder, by its Hugging Face name: this decides how tensor parallelism splits and fuses it."""

from __future__ import annotations

from enum import Enum

from penstock.dataflow.errors import WeightSyncError


class Role(Enum):
    """Part that a tensor plays in a decoder layer."""

    VOCABULARY = "rows are tokens"
    QUERY = "rows are query heads"
    KEY = "rows are key heads"
    VALUE = "rows are value heads"
    GATE = "rows of the gate projection"
    UP = "rows of the up projection"
    ROW_PARALLEL = "columns are split"
    EXPERTS_IN = "gate and up of all experts, stacked"
    EXPERTS_OUT = "down of all experts, stacked"
    REPLICATED = "whole on every rank"


_BY_OWNER = {
    "embed_tokens": Role.VOCABULARY,
    "lm_head": Role.VOCABULARY,
    "q_proj": Role.QUERY,
    "k_proj": Role.KEY,
    "v_proj": Role.VALUE,
    "gate_proj": Role.GATE,
    "up_proj": Role.UP,
    "o_proj": Role.ROW_PARALLEL,
    "down_proj": Role.ROW_PARALLEL,
}
_WHOLE = ("norm", "layernorm", "q_norm", "k_norm", "gate", "shared_expert_gate")


def role_of(name: str) -> Role:
    """The role of a tensor.

    Raises:
        WeightSyncError: If the name is not one of those we know how to split.
    """
    if name.endswith("mlp.experts.gate_up_proj"):
        return Role.EXPERTS_IN
    if name.endswith("mlp.experts.down_proj"):
        return Role.EXPERTS_OUT
    owner, _, leaf = name.rpartition(".")
    owner = owner.rpartition(".")[2]
    role = _BY_OWNER.get(owner)
    if role is Role.ROW_PARALLEL and leaf == "bias":
        return Role.REPLICATED  # it is added once, after the sum over ranks
    if role is not None and leaf in {"weight", "bias"}:
        return role
    if owner.endswith(_WHOLE) and leaf in {"weight", "bias"}:
        return Role.REPLICATED
    raise WeightSyncError(
        f"weights: {name} is no tensor of a decoder whose layout is known, so it cannot go piece by piece from the "
        "training layout to the engine's tensor-parallel layout. Set weights.transport=gather: it sends whole tensors "
        "through the engine's own loader, at the price of more bytes."
    )
