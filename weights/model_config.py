"""Which policy is trained, and its shape: what layouts, transfers and memory estimates start from."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["float32", "bfloat16"]
NewTokenizer = Literal["characters", "bytes"]
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


class ModelShape(BaseModel):
    """Dimensions of a dense decoder-only transformer with grouped-query attention and a gated MLP.

    Stands in the YAML, so that a dry run can estimate memory and plan transfers without the checkpoint.

    Attributes:
        attention_bias: q, k and v have biases (Qwen2).
        qk_norm: Queries and keys are normalised per head (Qwen3).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False

    @property
    def num_parameters(self) -> int:
        """Weights of embeddings, attention, MLP and norms (biases, below 0.1 %, are left out)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + norms) + self.hidden_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


class ModelConfig(BaseModel):
    """The policy: where its weights and tokenizer are, and in which precision it is served and trained.

    Attributes:
        path: Hugging Face directory or hub name.
        from_scratch: Build `shape` with random weights and a new tokenizer instead of loading `path`
            (the tiny policies of the warm start).
        tokenizer: Of a policy from scratch: characters of arithmetic, or bytes of any text, with a chat template.
        dtype: Precision of the forward pass on both sides and of published weights; masters stay float32.
        head_dtype: Precision of the engines' output projection; the trainer's always accumulates in float32.
        max_context_tokens: Longest prompt plus answer, tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    from_scratch: bool = False
    tokenizer: NewTokenizer = "characters"
    dtype: DType = "float32"
    head_dtype: Literal["model", "float32"] = "float32"
    max_context_tokens: int = Field(gt=0)
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    shape: ModelShape
