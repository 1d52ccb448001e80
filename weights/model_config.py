"""Which policy is trained, and its shape: the input of layouts, transfers and memory estimates."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from penstock.dataflow.settings import Settings

DType = Literal["float32", "bfloat16"]
NewTokenizer = Literal["characters", "bytes"]
Attention = Literal["sdpa", "varlen", "eager"]
Rows = Literal["packed", "padded"]
Head = Literal["fused", "model"]
Routing = Literal["none", "current", "replay"]
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


class ModelForm(NamedTuple):
    """How the trainer computes a model (trainer/models/model_form.py)."""

    rows: Rows
    head: Head
    attention: Attention
    because: tuple[str, ...] = ()
    """Why that is not packed, fused and with the configured attention, one clause each."""
    routing: Routing = "none"
    """Whether tokens can be sent to recorded experts; `none` of a dense model."""
    is_accident: bool = False
    """An error of the machine (memory, a file, a missing library) had a part in it, which may pass."""


class ModelShape(Settings):
    """Dimensions of a decoder-only transformer with grouped-query attention and gated MLPs, dense or with experts.

    That of a checkpoint is read from its config.json (platform/config/checkpoint_shapes.py). It is stated only for a
    model that is made from scratch.
    """

    vocab_size: int = Field(gt=0)
    """Tokens."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Rows of the MLP; with experts, the rows that a token uses. Activation memory is estimated from it."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
    num_heads: int = Field(gt=0)
    """Query heads."""
    num_kv_heads: int = Field(gt=0)
    """Key/value heads; divides `num_heads`."""
    head_dim: int = Field(gt=0)
    """Width of one head."""
    tie_word_embeddings: bool = False
    """lm_head shares the embedding matrix."""
    attention_bias: bool = False
    """q, k and v have biases (Qwen2)."""
    qk_norm: bool = False
    """Queries and keys are normalised per head (Qwen3)."""
    num_experts: int = Field(default=0, ge=0)
    """Experts of every layer, which replace the MLP; 0: a dense model."""
    expert_size: int = Field(default=0, ge=0)
    """Rows of one expert (`moe_intermediate_size`)."""
    shared_expert_size: int = Field(default=0, ge=0)
    """Rows of the expert that every token uses (Qwen2-MoE); 0: there is none."""
    num_weights: int = Field(default=0, ge=0)
    """Weights of a model with recurrent layers, as counted; 0: they follow from the dimensions."""
    num_active_weights: int = Field(default=0, ge=0)
    """Of them, those that a token is multiplied with."""
    kv_elements: int = Field(default=0, ge=0)
    """Elements of KV cache per token of such a model; 0: they follow from the dimensions."""
    state_elements: int = Field(default=0, ge=0)
    """Elements of the recurrent state of a sequence, over all layers."""

    @model_validator(mode="after")
    def _experts_have_a_size(self) -> ModelShape:
        if bool(self.num_experts) != bool(self.expert_size) or (self.shared_expert_size and not self.num_experts):
            raise ValueError(
                f"num_experts={self.num_experts}, expert_size={self.expert_size}, "
                f"shared_expert_size={self.shared_expert_size}: experts need a number and a size, otherwise the shape "
                "differs from the checkpoint's. Set all three to 0 for a dense model."
            )
        return self

    @property
    def num_parameters(self) -> int:
        """Weights of embeddings, attention, MLP and norms (biases, below 0.1 %, are left out)."""
        if self.num_weights:
            return self.num_weights
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.num_experts:
            rows = self.num_experts * self.expert_size + self.shared_expert_size
            mlp = self.hidden_size * (3 * rows + self.num_experts + bool(self.shared_expert_size))
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + norms) + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: of the experts those it uses, of the embeddings the head."""
        if self.num_active_weights:
            return self.num_active_weights
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.vocab_size * self.hidden_size + self.num_layers * (
            attention + 3 * self.hidden_size * self.intermediate_size
        )

    def uneven_sizes(self, num_ranks: int) -> list[str]:
        """Names and numbers of what an engine cannot split evenly over its ranks; empty if it can split all."""
        kv_heads = num_ranks if num_ranks % self.num_kv_heads == 0 else self.num_kv_heads  # fewer are replicated
        sizes = {
            "num_heads": self.num_heads,
            "num_kv_heads": kv_heads,
            "intermediate_size": self.expert_size or self.intermediate_size,
            "vocab_size, padded to a multiple of 64,": -(-self.vocab_size // 64) * 64,
        }
        return [f"{name} {size}" for name, size in sizes.items() if size % num_ranks]

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each linear layer except routed experts, by transformers' names."""
        hidden, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp, rows = (
            ("mlp.shared_expert", self.shared_expert_size) if self.num_experts else ("mlp", self.intermediate_size)
        )
        of_layer = {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
        }
        if rows:
            of_layer |= {f"{mlp}.gate_proj": (rows, hidden), f"{mlp}.up_proj": (rows, hidden)}
            of_layer |= {f"{mlp}.down_proj": (hidden, rows)}
        layers = {f"model.layers.{i}.{name}": size for i in range(self.num_layers) for name, size in of_layer.items()}
        return layers if self.tie_word_embeddings else layers | {"lm_head": (self.vocab_size, hidden)}

    @property
    def expert_weights(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices of one expert, by transformers' names of the weights of all of them."""
        if not self.num_experts:
            return {}
        of_layer = {"gate_up_proj": (2 * self.expert_size, self.hidden_size)}
        of_layer |= {"down_proj": (self.hidden_size, self.expert_size)}
        layers = range(self.num_layers)
        return {f"model.layers.{i}.mlp.experts.{name}": size for i in layers for name, size in of_layer.items()}

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return (self.kv_elements or 2 * self.num_layers * self.num_kv_heads * self.head_dim) * dtype_bytes

    def cache_bytes(self, num_tokens: float, dtype_bytes: int) -> float:
        """Bytes that one sequence takes in an engine's cache: keys, values and recurrent state."""
        return num_tokens * self.kv_bytes_per_token(dtype_bytes) + self.state_elements * dtype_bytes

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.num_experts * sum(rows * columns for rows, columns in self.expert_weights.values())

    @property
    def experts_per_token(self) -> int:
        """Routed experts that a token uses in each layer; 0: a dense model."""
        return (self.intermediate_size - self.shared_expert_size) // self.expert_size if self.num_experts else 0


def attention_for(keys: dict[str, Any]) -> Attention:
    """The attention of a model of which only these keys are set: kernels for varlen take 16-bit dtypes."""
    return "varlen" if keys.get("dtype") == "bfloat16" else "sdpa"


class ModelConfig(Settings):
    """The policy: its weights and tokenizer, and the precision in which it is served and trained."""

    path: str | None = None
    """Hugging Face directory or hub name. Its config.json gives the shape."""
    from_scratch: bool = False
    """Build `shape` with random weights and a new tokenizer instead of loading `path` (the tiny policies of the warm
    start)."""
    tokenizer: NewTokenizer = "characters"
    """Of a policy from scratch: characters of arithmetic, or bytes of any text, with a chat template."""
    dtype: DType = "float32"
    """Precision of the forward pass in trainer and engines, and of published weights; master weights are float32."""
    head_dtype: Literal["model", "float32"] = "float32"
    """Precision of the engines' output projection; the trainer's always accumulates in float32."""
    max_context_tokens: int = Field(gt=0)
    """Longest prompt plus answer, tokens."""
    attention: Attention = Field(default_factory=attention_for)
    """Attention of the trainer: `varlen` (no mask, one kernel for all sequences of a row), `sdpa` (masks) or `eager`
    (the model's own code). Unless set, varlen in bfloat16 and sdpa in float32, or what computes this model."""
    rows: Rows = "packed"
    """Sequences of the trainer's rows: `packed`, several in a row, or `padded`, one, which computes every causal model.
    Unless set, a tiny instance of the model is asked whether packed rows compute it."""
    head: Head = "fused"
    """Logprobs of the trainer: `fused`, from the head's weight, or from the logits of the `model`, with its soft caps
    and scales. Unless set, a tiny instance is asked."""
    load: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of transformers' `from_pretrained`, with which the trainer loads the policy and a reference or
    teacher. Values of config.json, which engines read too, are refused."""
    shape: ModelShape
