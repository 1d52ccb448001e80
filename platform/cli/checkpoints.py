"""`penstock checkpoints`: what a run has on disk to continue from, and the policy of a checkpoint as a model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.checkpoint import UNFINISHED, CheckpointFolder, choose_checkpoint
from penstock.platform.run.resume import changed_config, enter_folder_of, read_saved_config


def run_checkpoints(run_dir: Path, console: Console, step: int | None, to_hf: Path | None) -> int:
    """List the checkpoints, or write the policy of one to `to_hf`; returns the exit code.

    Raises:
        ConfigError: If the directory holds no run, or `to_hf` exists.
        CheckpointError: If there is no complete checkpoint to export.
    """
    run_dir = run_dir.resolve()
    saved = read_saved_config(run_dir)
    if to_hf is not None:
        if to_hf.exists():
            raise ConfigError([f"--to-hf {to_hf}: it exists. Give a folder that does not, so that nothing is lost."])
        checkpoint, target = choose_checkpoint(run_dir, step), to_hf.absolute()
        enter_folder_of(run_dir)
        export_policy(changed_config(saved, [], run_dir), checkpoint.path, target)
        console.print(f"policy of step {checkpoint.version} written to {to_hf}")
        return 0
    folder = CheckpointFolder(run_dir)
    lines = 0
    for name in sorted(path.name for path in folder.folder.iterdir()) if folder.folder.is_dir() else []:
        if name.endswith(UNFINISHED):
            console.print(f"  {name}  incomplete: it was being written when the run ended")
            lines += 1
    for version in folder.versions():
        try:
            checkpoint = folder.read(version)
        except CheckpointError as error:
            console.print(f"  step {version:>8}  damaged: {error}")
        else:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.manifest["time"]))
            state = folder.damage(checkpoint)
            console.print(
                f"  step {version:>8}  {checkpoint.num_bytes / 2**20:10.1f} MiB  {written}  "
                + ("complete" if state is None else f"damaged: {state}")
            )
        lines += 1
    if not lines:
        console.print(f"{run_dir} has no checkpoints: a run writes one every checkpoint.every_minutes.")
    return 0


def export_policy(config: RunConfig, checkpoint: Path, target: Path) -> None:
    """Write the policy of a checkpoint in Hugging Face form, on the CPU of this process, whatever trained it.

    Args:
        config: Configuration of the run.
        checkpoint: Folder of the checkpoint.
        target: Folder to write.
    """
    from penstock.platform.cluster.actor_factory import trainer_spec
    from penstock.trainer.build import build_trainer, save_policy

    spec = trainer_spec(config)
    one_rank = spec.trainer.model_copy(
        update={"backend": "torch", "num_ranks": 1, "tensor_parallel_size": 1, "sequence_parallel_size": 1}
        | {"zero_stage": 0, "compile": False, "offload_optimizer": False}
    )
    spec = replace(spec, trainer=one_rank, device="cpu", restore_from=str(checkpoint))
    trainer = build_trainer(spec)
    try:
        trainer.restore(str(checkpoint))
        save_policy(trainer, str(target), spec.model_path)
    finally:
        trainer.close()
