"""Tensors that an engine holds as a function of a published one, element by element: Mamba's A = -exp(A_log).

Such a tensor is named by the function of its source, `neg(exp(model.layers.0.mixer.A_log))`. It has the shape of its
source, and a training rank has the part of it that it has of the source, so it is planned, sent and verified like any
other tensor. Training ranks compute their part when they send it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from penstock.weights.layout.algebra import Layout

FUNCTIONS = {"exp": torch.exp, "neg": torch.neg}


def derived_name(function: str, name: str) -> str:
    """The name of a function of a tensor."""
    return f"{function}({name})"


def source_name(name: str) -> str:
    """The published tensor that a tensor is derived from; itself, if it is published."""
    return name.rpartition("(")[2].rstrip(")")


def derived_value(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """What is derived from one of these tensors, in float32."""
    *functions, _ = name.split("(")
    value = tensors[source_name(name)].detach().float()
    for function in reversed(functions):
        value = FUNCTIONS[function](value)
    return value


def with_derived(training: Layout, names: Iterable[str]) -> Layout:
    """The layout of training ranks, with those of `names` that are derived from its tensors."""
    derived = {
        name: tuple(shard._replace(view=shard.view._replace(buffer=name)) for shard in training.shards[source])
        for name in names
        if (source := source_name(name)) != name
    }
    return replace(training, shards={**training.shards, **derived}) if derived else training
