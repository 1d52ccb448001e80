"""Hydra composes a choice of config groups once per process; values are set on a copy, by Hydra's own function.

Composing takes 0.2 s and hundreds of tests compose the demo with one more value. `make test-full` composes every time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from penstock.platform.config import compose as shipping

compose_every_time = shipping._compose


def compose_choices_once(choices: Sequence[str], values: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """What `_compose` of platform/config/compose.py gives."""
    if config_dir is not None:  # its files may change
        return compose_every_time(choices, values, config_dir)
    composed = copy.deepcopy(_composed(tuple(choices)))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(list(values)), composed)
    raw = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


@lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("penstock.conf", version_base=None):
        return compose("config", list(choices))
