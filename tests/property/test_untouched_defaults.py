"""Defaults are never what is refused: models, data and machines are drawn, and all other keys are defaults.

A run starts, or is refused for the model, the data or the machine: no refusal names a key that the user has not set.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import psutil
import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks import model_files, tasks
from penstock.platform.checks.load import load_config
from penstock.platform.checks.model_probe import Answer
from penstock.platform.cluster import hardware
from penstock.platform.config.field_errors import all_paths
from penstock.rollout.tokenization import tokenizers
from penstock.rollout.tokenization.tokenizers import TokenCodec, byte_tokenizer
from tests.model_folder import write_model
from tests.tiers import by_tier

NUM_DRAWS = by_tier(24, 1000)
DRAWS_PER_TEST = by_tier(12, 50)
DRAWS_BEFORE_SOAK = 200
GIB = 1 << 30
EXPERIMENTS = ("text", "arithmetic", "gsm8k_qwen_1gpu", "math_qwen_8gpu")
FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


def drawn_model(rng: random.Random, folder: Path) -> Path:
    """A model whose context, size, heads and RoPE are anything that a config.json may hold."""
    family, head_dim = rng.choice(list(FAMILIES)), rng.choice((32, 64, 128))
    kv_heads, hidden = rng.choice((1, 2, 4, 8)), rng.choice((64, 256, 1024, 4096))
    fields: dict[str, object] = {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "vocab_size": rng.choice((259, 5_000, 150_000)),
        "hidden_size": hidden,
        "intermediate_size": rng.choice((2, 3, 4)) * hidden,
        "num_hidden_layers": rng.choice((1, 4, 32)),
        "num_attention_heads": kv_heads * rng.choice((1, 2, 7)) + (rng.random() < 0.05),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": rng.choice((16, 48, 100, 512, 2048, 32_768, 131_072)),
        "pad_token_id": 0,
    }
    if family == "mistral":
        fields["sliding_window"] = rng.choice((None, 16, 4096))
    if family in ("llama", "qwen2") and rng.random() < 0.3:
        kind = rng.choice(("linear", "dynamic", "yarn"))
        fields["rope_parameters"] = {"rope_type": kind, "factor": rng.choice((2.0, 4.0)), "rope_theta": 1e4}
    return write_model(folder, **fields)


def drawn_rows(rng: random.Random, file: Path) -> Path:
    """1 to 30 rows with prompts of 1 to 3,000 bytes, most of them of the same length, and some of them equal."""
    usual, num_different = int(10 ** rng.uniform(0, 3.5)), rng.randint(1, 30)
    lengths = [int(10 ** rng.uniform(0, 3.5)) if rng.random() < 0.1 else usual for _ in range(rng.randint(1, 30))]
    words = [f"{index % num_different} ".ljust(length, "x") for index, length in enumerate(lengths)]
    file.write_text("".join(json.dumps({"prompt": word, "answer": "1"}) + "\n" for word in words))
    return file


def set_machine(rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Memory, disk, shared memory and GPUs of any size."""
    total = int(GIB * 2 ** rng.uniform(0, 9))
    sizes = {True: int(GIB * 2 ** rng.uniform(-4, 8)), False: int(GIB * 2 ** rng.uniform(0, 12))}
    free = {is_shared: int(size * rng.uniform(0.1, 1)) for is_shared, size in sizes.items()}
    patch.setattr(hardware, "total_memory_bytes", lambda: total)
    patch.setattr(hardware, "available_memory_bytes", lambda: int(total * rng.uniform(0.3, 1)))
    patch.setattr(hardware, "disk_bytes", lambda path: sizes[path == hardware.SHARED_MEMORY])
    patch.setattr(hardware, "free_disk_bytes", lambda path: free[path == hardware.SHARED_MEMORY])
    num_gpus = rng.choice((0, 0, 1, 8))
    patch.setattr(hardware, "has_nvidia_driver", lambda: bool(num_gpus))
    patch.setattr(hardware, "num_nvidia_gpus", lambda: num_gpus or None)
    patch.setattr(hardware, "nvidia_driver_version", lambda: "580.65.06")
    patch.setattr(hardware, "gpu_capabilities", lambda: {"NVIDIA": "9.0"} if num_gpus else {})
    patch.setattr(hardware, "is_cpu_build", lambda: not num_gpus)
    patch.setattr(hardware, "gpu_memory_gib", lambda: rng.choice((8.0, 24.0, 79.6)) if num_gpus else None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A folder of its own, where transformers and vLLM support every model and every model has the byte tokenizer."""
    codec = TokenCodec(byte_tokenizer(), ())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda *_args, **_kwargs: 2)
    monkeypatch.setattr(model_files, "ask", lambda _question: Answer([]))
    monkeypatch.setattr(tokenizers, "load_codec", lambda *_args, **_kwargs: codec)
    # The defaults are here to be checked, and not the reward, which is Penstock's own.
    monkeypatch.setattr(tasks, "check_first_calls", lambda *_args: ())
    return monkeypatch


@pytest.mark.full
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.soak if first >= DRAWS_BEFORE_SOAK else ())
        for first in range(0, NUM_DRAWS, DRAWS_PER_TEST)
    ],
)
def test_no_refusal_names_a_key_that_the_user_has_not_set(
    first: int, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known, num_started = set(all_paths()), 0
    for seed in range(first, first + DRAWS_PER_TEST):
        rng = random.Random(seed)
        set_machine(rng, machine)
        model = drawn_model(rng, tmp_path / f"model{seed}")
        rows = drawn_rows(rng, tmp_path / f"rows{seed}.jsonl")
        typed = [
            f"experiment={rng.choice(EXPERIMENTS)}",
            f"model.path={model}",
            "env=dataset",
            f"env.args.path={rows}",
            "reward=exact_match",
        ]
        try:
            loaded = load_config("train", typed)
        except ConfigError as refused:
            for violation in refused.violations:
                named = {key for key in _DOTTED.findall(violation) if key in known or key.startswith("cluster.pools")}
                assert named <= {"model.path", "env.args"}, f"draw {seed}: {violation}"
            continue
        num_started += 1
        config = loaded.config
        told = [line for line in loaded.warnings if ", not the default " in line]
        assert len({line.partition("=")[0] for line in told}) == len(told), "one line for each key"
        for line in told:
            key, _, rest = line.partition("=")
            value: object = config.model_dump(mode="json")
            for name in key.split("."):
                value = value[name]  # type: ignore[index]
            shown = rest.partition(", not the default ")[0]
            found = shown if isinstance(value, str) else json.loads(shown)
            assert found == value, f"draw {seed}: the configuration has what {line} says"
    assert num_started, "not all of these are refused"
