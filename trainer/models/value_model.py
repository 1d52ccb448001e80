"""A model that gives one number per token: a critic, or (read at the last token) a reward model.

It is a Hugging Face sequence classifier with one label, so a saved critic can serve as a reward model, and vice versa.

Shape legend: R rows, L row length, K target tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.dataflow.errors import ConfigError, boundary
from penstock.trainer.models.policy_model import hidden_at, switch_dropout_off
from penstock.trainer.models.varlen_attention import SequenceBoundaries, register_varlen
from penstock.trainer.validation import check_vocabulary
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.model_config import ModelConfig, Rows


class ValueModel(nn.Module):
    """Wraps a `...ForSequenceClassification` of one label; called like a `PolicyModel`.

    Attributes:
        classifier: The Hugging Face model.
        rows: Whether a row has several sequences or one.
    """

    def __init__(self, classifier: Any, rows: Rows = "packed") -> None:
        super().__init__()
        self.classifier = classifier
        self.rows = rows

    @property
    def hf_model(self) -> Any:
        """The Hugging Face model, which is what is saved."""
        return self.classifier

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
        """The value before each target token, which itself is not seen: `[K] float32` twice (there is no entropy).

        Arguments as of `PolicyModel.forward`; the others have no effect. Its routers choose for themselves.
        """
        del target_ids, temperature, alternatives, routes
        body = self.classifier.base_model
        positions = position_ids if self.rows == "packed" else None
        hidden = hidden_at(body, input_ids, positions, attention_mask, target_index, boundaries)
        values = self.classifier.score(hidden)[:, 0].float()
        return values, values.detach()


def load_value_model(path: str, model: ModelConfig, *, gradient_checkpointing: bool) -> ValueModel:
    """Load a classifier, or the body of a policy with a head of zeros: then every value is 0 at first.

    Args:
        path: Hugging Face directory or hub name.
        model: Its dtype and attention implementation are used.
        gradient_checkpointing: Recompute each layer in backward.

    Raises:
        ConfigError: If there is no such model, it cannot be loaded, or it has another number of labels or tokens.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # or it warns about the new head
    register_varlen()
    with boundary(ConfigError, f"critic or reward model: {path} cannot be loaded"):
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=TORCH_DTYPES[model.dtype],
            attn_implementation=model.attention,
            num_labels=1,
            output_loading_info=True,
        )
    text = classifier.config.get_text_config(decoder=True)
    check_vocabulary("critic or reward model", path, text.vocab_size, model.shape.vocab_size)
    if text is not classifier.config:  # towers of other inputs stay as they are
        classifier.base_model.requires_grad_(requires_grad=False)
        classifier.base_model.get_decoder().requires_grad_()
    if "score.weight" in loading["missing_keys"]:
        head = classifier.score.weight
        with torch.no_grad():
            getattr(head, "ds_tensor", head).zero_()  # under ZeRO-3 every rank has its part
    if gradient_checkpointing:
        classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    switch_dropout_off(classifier)
    return ValueModel(classifier, model.rows).train()
