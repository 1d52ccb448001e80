"""Penstock: asynchronous reinforcement-learning post-training of language models on Ray."""

from penstock.kernels.torch_companions import mend_imports

__version__ = "0.2.0"

mend_imports()
