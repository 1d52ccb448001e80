"""Which optimizer trains a model, the same in every backend, and its state by tensor. No other file chooses one.

An optimizer is a file of this folder. It names its states twice: `OptimizerConfig.states` gives their dtypes to the
estimate of memory, and its attribute `states` their names by parameter to a checkpoint, which refuses others.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from penstock.trainer.config import OptimizerConfig
from penstock.trainer.models.policy_model import PolicyModel, hf_name
from penstock.trainer.models.value_model import ValueModel
from penstock.trainer.optimizers.adamw import AdamW
from penstock.trainer.optimizers.muon import Muon, hidden_matrices

Optimizer: TypeAlias = AdamW | Muon


def build_optimizer(model: PolicyModel | ValueModel, config: OptimizerConfig) -> Optimizer:
    """Create the optimizer of all trained parameters, tied ones once, without compilation."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if config.muon is None:
        return AdamW(trained, config)
    hidden = hidden_matrices(model.hf_model)
    matrices = [(name, one) for name, one in trained if hf_name(name) in hidden]
    return Muon(matrices, [(name, one) for name, one in trained if hf_name(name) not in hidden], config)


def flat_state(optimizer: Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """The live state of a tensor that the optimizer updates, flat; zeros before its first update."""
    return {name: one.view(-1) for name, one in optimizer.state_of(tensor).items()}


def set_num_updates(optimizer: Optimizer, tensor: Tensor, num_updates: int) -> None:
    """Set the step counter of a tensor, if its optimizer has one, and create its states if there was no update yet."""
    state = optimizer.state_of(tensor)
    if "step" in state:
        state["step"].fill_(num_updates)
