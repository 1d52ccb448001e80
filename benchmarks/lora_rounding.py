"""What bfloat16 keeps of a small LoRA update: in the trainer's own forward, and merged into the weights of an engine.

    python benchmarks/lora_rounding.py            (20 minutes of one core; writes benchmarks/results/lora_rounding.md)

One layer: W [512, 2560] ~ 0.02, B as after so many steps of AdamW whose gradients agree. The share of B·A·x that is
kept is the slope of the output's change over B·A·x.

A model: Qwen3's architecture, 4 layers of 512, random weights, adapters of rank 16 on all linear layers, trained by
sampled tokens with a reward of 1 or -1. Logprobs of sampled tokens are compared with W + B·A in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from penstock.trainer.models.lora import Adapter, Adapters, merged
from penstock.trainer.optimizers.adamw import rounded_up_or_down
from penstock.weights.layout.checkpoint_names import linear_layers

RATE, RANK, ALPHA, VOCAB = 1e-5, 16, 32, 1024
RESULT = Path(__file__).parent / "results" / "lora_rounding.md"


def adapted(model: torch.nn.Module, targets: list[str]) -> torch.nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
    model.requires_grad_(requires_grad=False)
    return inject_adapter_in_model(settings, model)


def kept_by_a_layer(num_steps: int) -> tuple[float, float]:
    """Share of B·A·x in the trainer's output and in that of the merged weight."""
    draw = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(2560, 512, bias=False)
    plain.weight.data = torch.randn(512, 2560, generator=draw) * 0.02
    module = adapted(torch.nn.Sequential(plain), ["0"]).to(torch.bfloat16)
    layer: Any = module.get_submodule("0")
    weight = layer.base_layer.weight.detach()
    signs = torch.randn(512, RANK, generator=draw).sign()
    layer.lora_B["default"].weight.data = (signs * RATE * num_steps).bfloat16()
    x = torch.randn(256, 2560, generator=draw).bfloat16()
    adapter = Adapter(layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float(), ALPHA / RANK)
    with torch.no_grad():
        exact = x.float() @ (adapter.scale * adapter.up @ adapter.down).T
        in_trainer = layer(x).float() - layer.base_layer(x).float()
        in_engine = x.float() @ (merged(weight, adapter).float() - weight.float()).T
    in_both = [float((one * exact).sum() / exact.square().sum()) for one in (in_trainer, in_engine)]
    return in_both[0], in_both[1]


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids).logits.float().log_softmax(-1)
    return found


def sampled(logprobs: torch.Tensor) -> torch.Tensor:
    """One token at each place, `[..., 1]`."""
    flat = logprobs.detach().exp().flatten(0, -2)
    return torch.multinomial(flat, 1, replacement=True).view(*logprobs.shape[:-1], 1)


def with_weights(base: torch.nn.Module, adapters: dict[str, Adapter], rounding: str) -> torch.nn.Module:
    """The base with its adapters merged: exactly, to the nearest bfloat16, or to one of the two that are next to it."""
    model, draw = copy.deepcopy(base), torch.Generator().manual_seed(0)
    for name, adapter in adapters.items():
        weight = model.get_parameter(name)
        exact = merged(weight.detach().float(), adapter)
        if rounding == "nearest":
            weight.data = merged(weight.detach().bfloat16(), adapter).float()
        elif rounding == "stochastic":
            bits = torch.randint(1 << 16, exact.shape, dtype=torch.int32, generator=draw)
            weight.data = rounded_up_or_down(exact, bits)
        else:
            weight.data = exact
    return model


@torch.no_grad()
def compared(
    base: torch.nn.Module, trained: torch.nn.Module, good: torch.Tensor, held: torch.Tensor
) -> Iterator[float | str]:
    adapters = Adapters(torch.nn.ModuleDict({"causal_lm": trained})).copies()  # as in `PolicyModel`
    before = logprobs(base, held)
    tokens = sampled(before)
    exact, nearest, stochastic = (with_weights(base, adapters, one) for one in ("exact", "nearest", "stochastic"))
    whole = logprobs(exact, held)

    def rms(left: torch.Tensor, right: torch.Tensor) -> str:
        return f"{float((left - right).gather(-1, tokens).square().mean().sqrt()):.4f}"

    def gain(found: torch.Tensor) -> float:
        return float((found.exp() - before.exp())[..., good].sum(-1).mean())

    trainer = logprobs(copy.deepcopy(trained).bfloat16(), held)
    yield rms(whole, before)
    for model in (nearest, stochastic):
        in_float32 = logprobs(model, held)
        yield f"{gain(in_float32) / gain(whole):.2f}"
        yield rms(in_float32, whole)
        yield rms(logprobs(copy.deepcopy(model).bfloat16(), held), trainer)
    yield rms(logprobs(copy.deepcopy(base).bfloat16(), held), before)


def rows_of_a_model() -> Iterator[list[str]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    base = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, vocab_size=VOCAB, tie_word_embeddings=False))
    for weight in base.parameters():
        weight.data = weight.data.bfloat16().float()
    base.lm_head.weight.data *= 4  # so that tokens differ in probability
    trained = adapted(copy.deepcopy(base), [name.removesuffix(".weight") for name in linear_layers(base)])
    optimizer = torch.optim.AdamW([one for one in trained.parameters() if one.requires_grad], RATE, weight_decay=0.0)
    good, held = torch.rand(VOCAB) < 0.5, torch.randint(VOCAB, (16, 64))
    for step in range(1, 301):
        found = logprobs(trained, torch.randint(VOCAB, (8, 32)))
        tokens = sampled(found)
        loss = -(found.gather(-1, tokens) * (2.0 * good[tokens] - 1.0)).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step in (1, 10, 30, 100, 300):
            yield [str(step), *map(str, compared(base, trained, good, held))]
            print(step, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    of_layer = [(steps, *kept_by_a_layer(steps)) for steps in (1, 3, 10, 30, 100, 300)]
    lines = [
        "# What bfloat16 keeps of a small LoRA update",
        "",
        f"Rank {RANK}, alpha {ALPHA}, learning rate {RATE:g}. Random weights of 0.02.",
        "",
        *(f"- {line}" for line in provenance()),
        "- by: python benchmarks/lora_rounding.py",
        "",
        "| one layer of 2,560 inputs: steps | kept by the trainer's forward | kept by the merged weight |",
        "| --- | --- | --- |",
        *(f"| {steps} | {trainer:.2f} | {engine:.2f} |" for steps, trainer, engine in of_layer),
        "",
        "Root mean square of logprobs, nats. Error: against exact weights, in float32. To the trainer: both bfloat16.",
        "",
        "| a model: steps | update | nearest: gain kept | error | to the trainer | stochastic: gain kept | error "
        "| to the trainer | bfloat16 arithmetic |",
        "| " + " | ".join(["---"] * 9) + " |",
        *(f"| {' | '.join(row)} |" for row in rows_of_a_model()),
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
