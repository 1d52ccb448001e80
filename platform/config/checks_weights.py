"""Cross-field checks of how engines take a version that has come, or is on its way."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.platform.slots import slots_on


def check_staging(config: RunConfig) -> Iterator[Finding]:
    """Versions can stream through one bucket, where that is asked for."""
    if config.weights.staging != "bucket":
        return
    for key, value, why in _against_bucket(config):
        yield error(
            f"weights.staging=bucket with weights.{key}={value}: {why}. Use weights.staging=shard, or another "
            f"weights.{key}.",
            "weights.staging",
            f"weights.{key}",
        )
    if config.weights.stage_on == "host":
        yield warning(
            "weights.stage_on=host has no effect with weights.staging=bucket: the bucket is where the parameters are.",
            "weights.stage_on",
            "weights.staging",
        )


def _against_bucket(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Why a version cannot stream: key, its value, and the reason."""
    weights = config.weights
    if weights.mode == "gather":
        yield "mode", weights.mode, "the engine's own loader takes whole tensors"
    if weights.codec == "lora":
        yield "codec", weights.codec, "adapters are small, and what they make is put together beside the parameters"
    elif weights.codec != "full":
        yield "codec", weights.codec, "a difference needs the version before, which a broken stream has written over"
    if weights.overlap:
        yield "overlap", "true", "engines stand still while a version comes, and the trainer would no longer have it"
    if weights.update_mode == "multi_version" and slots_on(config) == "device":
        yield (
            "update_mode",
            weights.update_mode,
            "from device to device a version comes to all engines at once, and none would serve meanwhile",
        )
