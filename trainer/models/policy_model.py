"""The policy as one module: Hugging Face backbone and head, from tokens to logprobs in a single forward.

Backbone and head are both called inside the wrapped forward, so that ZeRO-3 hooks see them. Logits exist only inside
`kernels.linear_logprob`, tile by tile, at the positions whose next token carries loss.

Shape legend: R rows, L row length, K loss tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.dataflow.errors import ConfigError, boundary
from penstock.kernels.expert_choice import ExpertChoice
from penstock.kernels.float32_head import Float32Head
from penstock.kernels.linear_logprob import VocabularyShard, linear_logprobs
from penstock.trainer.models.varlen_attention import SequenceBoundaries, register_varlen
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.checkpoint_names import body_of, loading_arguments
from penstock.weights.model_config import Head, ModelConfig, Rows


class PolicyModel(nn.Module):
    """Wraps a `...ForCausalLM`.

    Attributes:
        causal_lm: The Hugging Face model; its parameter names are the published names.
        rows: Whether a row has several sequences or one.
        vocabulary: Which rows of the head this rank has; None: all of them.
        experts: Chooses them, if it has any.
    """

    def __init__(self, causal_lm: Any, rows: Rows = "packed", head: Head = "fused") -> None:
        super().__init__()
        self.causal_lm = causal_lm
        # Of a class that does not name it; in a tuple, as a module in a module its parameters would have two names.
        self._body = (body_of(causal_lm)[1],) if causal_lm.base_model is causal_lm else None
        self.rows = rows
        self.vocabulary: VocabularyShard | None = None
        self.experts = ExpertChoice(causal_lm)
        self._own_logits = OwnLogits(causal_lm) if head == "model" else None

    @property
    def hf_model(self) -> Any:
        """The Hugging Face model, which is what is saved."""
        return self.causal_lm

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        target_index: Tensor,
        target_ids: Tensor,
        temperature: float,
        boundaries: SequenceBoundaries | None = None,
        alternatives: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score target tokens.

        Args:
            input_ids: `[R, L] int64`.
            position_ids: `[R, L] int64`, restarting with every sequence.
            attention_mask: `[R, 1, L, L] bool` (True = attend), or None.
            target_index: `[K] int64` into the flattened `[R·L]` positions.
            target_ids: `[K] int64`, the token that follows each of them.
            temperature: The sampling temperature; divides the logits.
            boundaries: Of the sequences, if attention takes them instead of a mask.
            alternatives: `[K, A] int64`, the other ids that each target was sampled from, then −1: logprobs and
                entropies are those of the distribution renormalised over them. None: over the whole vocabulary.
            routes: `[R·L, layers, k] int`, the experts to which tokens are sent, −1: as the routers choose. None: all
                of them so.

        Returns:
            In training mode `[K] float32` logprobs and `[K] float32` entropies. In eval mode `[K] float32` logprobs
            at that temperature and `[K] bool`: no token is likelier than the target.
        """
        if self.experts.routers:
            self.experts.replay(routes)
        body = self.causal_lm.base_model if self._body is None else self._body[0]
        positions = position_ids if self.rows == "packed" else None
        hidden = hidden_at(body, input_ids, positions, attention_mask, target_index, boundaries)
        head, part = self._own_logits or self.causal_lm.get_output_embeddings(), self.vocabulary
        scored = linear_logprobs(
            hidden, head, target_ids, temperature=temperature, alternatives=alternatives, part=part
        )
        return scored.logprobs, scored.entropies if self.training else scored.is_most_likely


def experts_of(model: nn.Module) -> ExpertChoice | None:
    """What chooses the experts of a policy; None if it has none, or is a critic, whose routers are let alone."""
    return model.experts if isinstance(model, PolicyModel) and model.experts.routers else None


class OwnLogits(nn.Module):
    """What a `...ForCausalLM` makes of last hidden states: its head, and all that it does before and after it.

    It is a head for `linear_logprobs`, which calls it for some tokens at a time. The model's own forward pass runs,
    with its body replaced by hidden states that are there.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self._owner = (causal_lm,)  # as a module in a module, its parameters would have two names

    @property
    def out_features(self) -> int:
        """Tokens of the vocabulary."""
        (owner,) = self._owner
        return int(owner.config.get_text_config(decoder=True).vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, V]` logits of hidden states `[T, H]`; a plain head computes in float32, as everywhere."""
        (owner,) = self._owner
        num_calls = 0

        def given(*_args: object, **_settings: object) -> _Output:
            nonlocal num_calls
            num_calls += 1
            return _Output(hidden[None])

        head = owner.get_output_embeddings()
        plain = partial(Float32Head.forward, cast("Float32Head", head)) if type(head) is nn.Linear else None
        with replaced_forward(body_of(owner)[1], given), replaced_forward(head, plain):
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: Tensor = owner(input_ids=ids, use_cache=False).logits[0]
        if num_calls != 1:
            raise ConfigError(
                [f"model.head=model: {type(owner).__name__} calls its body {num_calls} times, so its logits cannot be "
                 "computed from hidden states. Use another model."]
            )  # fmt: skip
        return logits


class _Output:
    """The output of a body: its last hidden state, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """A context in which calls of this module, with its hooks, compute something else; None: what they always do."""
    own = vars(module).get("forward")
    if forward is not None:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        if forward is not None and own is None:
            del vars(module)["forward"]
        elif forward is not None:
            vars(module)["forward"] = own


def hidden_at(
    body: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    target_index: Tensor,
    boundaries: SequenceBoundaries | None,
) -> Tensor:
    """`[K, H]`: last hidden states of a Hugging Face body where the target tokens are predicted.

    Without positions every row is one sequence, which begins at its first token.
    """
    given: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if position_ids is not None:
        mask = None if attention_mask is None else layer_masks(body.config, attention_mask, position_ids)
        given |= {"position_ids": position_ids, "attention_mask": mask}
        # The body hands what it does not know on to every layer's attention.
        given |= {} if boundaries is None else {"boundaries": boundaries}
    return body(**given).last_hidden_state.flatten(0, 1).index_select(0, target_index)


def layer_masks(hf_config: Any, attention_mask: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
    """Restrict the mask of layers with a sliding window to it: transformers uses a four-dimensional mask as it is.

    Args:
        hf_config: Configuration of the body.
        attention_mask: `[R, 1, L, L] bool`, True where full attention attends.
        position_ids: `[R, L] int64`, within each sequence.

    Returns:
        One mask if all layers attend alike, else one per type of layer.
    """
    window = getattr(hf_config, "sliding_window", None)
    if window is None:
        return attention_mask
    distance = position_ids[:, :, None] - position_ids[:, None, :]
    sliding = attention_mask & (distance < window)[:, None]
    kinds = set(getattr(hf_config, "layer_types", None) or ["sliding_attention"])
    masks = {"full_attention": attention_mask, "sliding_attention": sliding}
    return masks[kinds.pop()] if len(kinds) == 1 else masks


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of a `PolicyModel` or `ValueModel` at its first call, in place; names of parameters stay.

    Layers of a kind share their graphs, but not those whose experts are replayed or balanced. A graph serves all row
    lengths. One row or several, a mask or none, training or evaluation have separate graphs. Recomputation in backward
    is around the compiled layer.

    Raises:
        ConfigError: If the model has no layers that transformers could recompute, which are what is compiled.
    """
    layers = layers_of(model)
    if not layers:
        kind = type(getattr(model, "hf_model", model)).__name__
        raise ConfigError([f"trainer.compile=true: {kind} has no layers of transformers' kind. Use compile=false."])
    for layer in layers:
        # The default limit of 8 graphs is less than those combinations with a critic's and two kinds of layers, and
        # than the layers of a mixture.
        layer.compile(dynamic=True, recompile_limit=max(64, 8 * len(layers)))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a `PolicyModel` or `ValueModel`, by what transformers marks them with."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def hf_name(parameter_name: str) -> str:
    """Name of a parameter of a wrapped model (`PolicyModel`, `ValueModel`) in the Hugging Face checkpoint."""
    return parameter_name.partition(".")[2].replace(".base_layer.", ".")


def hf_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name in the Hugging Face checkpoint and parameter, tied ones once; adapters (trainer/models/lora.py) are left
    out.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield hf_name(name), parameter


def load_policy(path: str, model: ModelConfig, *, gradient_checkpointing: bool) -> PolicyModel:
    """Load a policy in `model.dtype`, since DeepSpeed would cast more precise weights before it copies its masters.

    Args:
        path: Hugging Face directory or hub name.
        model: Its dtype, form and arguments of loading are used.
        gradient_checkpointing: Recompute each layer in backward.

    Raises:
        ConfigError: If there is no such model, or it cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_exists(path)
    register_varlen()
    with boundary(ConfigError, f"model.path={path} cannot be loaded"):
        causal_lm = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=TORCH_DTYPES[model.dtype],
            attn_implementation=model.attention,
            **loading_arguments(AutoConfig.from_pretrained(path)),
            **model.load,
        )
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    switch_dropout_off(causal_lm)
    return PolicyModel(causal_lm, model.rows, model.head).train()


def switch_dropout_off(model: nn.Module) -> None:
    """Let a model compute in training what the engines compute: dropout would change the logprobs of every token."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_exists(path: str) -> None:
    """Check that a path that can be no name on the Hub is a folder.

    Raises:
        ConfigError: If it is none.
    """
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise ConfigError([f"model.path={path} does not exist. Give a Hugging Face directory or a hub name."])


def restore_rotary_buffers(model: nn.Module) -> None:
    """Recompute rotary frequencies in float32 wherever a cast of the whole module has rounded them.

    DeepSpeed casts buffers with the weights (ZeRO-3 while loading). In bfloat16 a frequency is off by up to 0.4 %, so
    angles are wrong by more than a radian from position 300 on. A rotary module can be rebuilt from its config.
    """
    for module in list(model.modules()):
        rounded = [name for name, buffer in module.named_buffers(recurse=False) if "inv_freq" in name]
        if not rounded:
            continue
        fresh = type(module)(config=module.config)
        for name in rounded:
            device = module.get_buffer(name).device
            module.register_buffer(name, fresh.get_buffer(name).to(device), persistent=False)
