"""What the model is fed: packed rows must score like single sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ShapeError
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import MicroBatchPlan, TrainingSequence
from penstock.trainer.models.policy_model import PolicyModel

from .torch_trainer import VOCAB


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2"])
def test_packed_rows_score_like_single_sequences(architecture) -> None:
    import transformers

    torch.manual_seed(0)
    options = {"head_dim": 8} if architecture == "Qwen3" else {}
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = PolicyModel(getattr(transformers, f"{architecture}ForCausalLM")(config)).train()
    rng = np.random.default_rng(0)
    sequences = []
    for length, prompt in [(9, 3), (14, 2), (4, 3), (22, 5), (2, 1)]:
        targets = np.arange(prompt, length)
        sequences.append(TrainingSequence(rng.integers(0, VOCAB, length), targets, np.zeros(len(targets), np.float32)))

    def scores(*rows: tuple[int, ...]) -> torch.Tensor:
        length = max(sum(sequences[index].num_inputs for index in row) for row in rows)
        batch = collate(MicroBatchPlan(rows, length), sequences, device=torch.device("cpu"), needs_mask=True)
        assert (batch.inputs.attention_mask is None) == all(len(row) == 1 for row in rows)
        return batch.inputs.call(model, 1.0)[0].detach()

    single = torch.cat([scores((index,)) for index in range(5)])
    torch.testing.assert_close(scores((0, 1), (2, 3, 4)), single, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores((0,), (1,), (2,), (3,), (4,)), single, rtol=1e-5, atol=1e-5)


def test_a_loss_token_without_context_is_refused() -> None:
    with pytest.raises(ShapeError, match="nothing precedes it"):
        TrainingSequence(np.array([3, 4]), np.array([0, 1]), np.zeros(2, np.float32))
