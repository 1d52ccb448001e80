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


def test_the_padding_of_a_row_does_not_change_the_factors_of_longrope() -> None:
    """No sequence has more than 22 positions, but a row of three has 43, and the one beside it is padded to that."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 5.0, 7.0], "original_max_position_embeddings": 22}
    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", max_position_embeddings=64, pad_token_id=0,
        original_max_position_embeddings=22, initializer_range=0.3,
        rope_parameters={"rope_type": "longrope", "rope_theta": 100.0, **factors},
    )  # fmt: skip
    model, rng = PolicyModel(Phi3ForCausalLM(config)).train(), np.random.default_rng(0)
    lengths = [(9, 3), (14, 2), (22, 5), (10, 1)]
    sequences = [
        TrainingSequence(rng.integers(0, VOCAB, n), np.arange(m, n), np.zeros(n - m, np.float32)) for n, m in lengths
    ]

    def scores(*rows: tuple[int, ...]) -> torch.Tensor:
        length = max(sum(sequences[index].num_inputs for index in row) for row in rows)
        batch = collate(MicroBatchPlan(rows, length), sequences, device=torch.device("cpu"), needs_mask=True)
        assert int(batch.inputs.position_ids.max()) < 22
        return batch.inputs.call(model, 1.0)[0].detach()

    single = torch.cat([scores((index,)) for index in range(4)])
    torch.testing.assert_close(scores((0, 1, 2), (3,)), single, rtol=1e-5, atol=1e-5)


def test_a_loss_token_without_context_is_refused() -> None:
    with pytest.raises(ShapeError, match="nothing precedes it"):
        TrainingSequence(np.array([3, 4]), np.array([0, 1]), np.zeros(2, np.float32))
