"""What DeepSpeed does to a model under AutoTP and Ulysses, and what is put right after it."""

from __future__ import annotations

from typing import Any

from penstock.kernels.linear_logprob import VocabularyPart
from penstock.trainer.config import TrainerConfig
from penstock.trainer.policy_model import PolicyModel, hf_name
from penstock.trainer.tensor_parallel import TensorSplit
from penstock.weights.layout.algebra import Shape
from penstock.weights.model_config import ModelConfig


def full_shape(parameter: Any) -> Shape:
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def take_split(policy: PolicyModel, model: ModelConfig, shapes: dict[str, Shape]) -> TensorSplit:
    """Check what AutoTP has done, and let the policy's head know its part of the vocabulary."""
    from deepspeed.utils import groups

    split = TensorSplit(
        groups.get_tensor_model_parallel_rank(),
        groups.get_tensor_model_parallel_world_size(),
        groups.get_tensor_model_parallel_group(),
        model.shape.num_kv_heads,
        shapes,
    )
    split.check((hf_name(name), full_shape(parameter)) for name, parameter in policy.named_parameters())
    if "lm_head.weight" in shapes:
        (start, stop), _ = split.box("lm_head.weight")
        policy.vocabulary = VocabularyPart(start, stop, split.group)
    return split


def register_ulysses(policy: PolicyModel, model: ModelConfig, trainer: TrainerConfig) -> Any:
    """Replace the attention function of transformers, in this process, by one that exchanges stretches for heads.

    Returns:
        DeepSpeed's module of process groups. A second trainer of a process goes on with those and that function.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None:  # noqa: SLF001 - its getter raises while it is None
        return parallel_state_sp
    return UlyssesSPAttentionHF.register_with_transformers(
        policy.causal_lm,
        core_attn_implementation=model.attention,
        sequence_parallel_size=trainer.sequence_parallel_size,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
