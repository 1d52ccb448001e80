"""Checks against this machine: GPU driver, free memory and disk space. Nothing is started.

Missing resources are `absent` findings: errors in a run, but warnings in a dry run, which may use another machine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.platform.checks.cluster import MEMORY_SETTINGS, or_change, smaller_micro_batch
from penstock.platform.checks.model_files import check_model_paths, engine_device
from penstock.platform.checks.model_probe import SettingsQuestion, ask
from penstock.platform.checks.run_dir import is_finished, occupied
from penstock.platform.cluster import hardware
from penstock.platform.cluster.memory import GIB, published_gib, shared_gib, trained_state_gib
from penstock.platform.cluster.placement import host_load_gib, plan_placement
from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, weight_route
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, Fit, absent, error, note, warning
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import CONFIG_FILE
from penstock.weights.transport.allocator import expandable_segments
from penstock.weights.transport.shared_memory import remove_abandoned_directories

_SYSTEM_FOLDERS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys")
_USABLE_SHARE = 0.9
"""Share of the main memory that a run may be planned with, if other programs are small."""
_LOG_GIB = 0.5
"""Metrics, sampled trajectories, reports and Ray's logs of one run, GiB."""


def check_machine(config: RunConfig, command: Command, *, is_resumed: bool = False) -> Iterator[Finding]:
    """Check all resources of this machine that `command` needs. The pools of the configuration must exist.

    Args:
        config: The configuration.
        command: The command that uses it.
        is_resumed: Whether the run continues in its own directory.
    """
    yield from check_model_paths(config, command)
    yield from check_passed_on(config, command)
    if command != "eval":
        if not is_resumed and not (config.resume == "auto" and (Path(config.run_dir) / CONFIG_FILE).exists()):
            yield from check_run_dir(config)
        yield from check_disk(config, command)
        yield from check_upload(config)
    if config.cluster.address == "local":
        yield from check_threads(config)
        yield from check_driver(config, command)
        yield from check_free_memory(config, command)
        if command not in WITHOUT_ENGINES:
            yield from check_shared_memory(config)


def check_passed_on(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check what is passed on to vLLM and DeepSpeed, by their own parsers."""
    questions: list[SettingsQuestion] = []
    for view in () if command in WITHOUT_ENGINES else config.rollout_views:
        args = getattr(view.rollout.engine, "args", {})
        if command == "train" and _is_recorded_by_vllm(view) and args.get("enable_prefix_caching") is False:
            why = "vLLM records experts with its prefix cache only"
            said = "rollout.engine.args.enable_prefix_caching=false with algorithm.routing=replay"
            fit = Fit("algorithm.routing", "current", f"{why}, which is off")
            yield error(f"{said}: {why}. Leave it on, or use algorithm.routing=current.", fits=[fit])
        question = SettingsQuestion("vllm", args, engine_device(view))
        questions += [] if question in questions else [question]
    if command not in ("eval", "sample"):
        questions.append(SettingsQuestion("deepspeed", config.trainer.deepspeed, "cpu"))
    for question in questions:
        try:
            yield from map(error, ask(question).problems if question.settings else ())
        except RuntimeError as failure:
            yield warning(
                f"what is passed on to {question.library} could not be checked: {failure}.", "rollout", "trainer"
            )


def _is_recorded_by_vllm(config: RunConfig) -> bool:
    """Whether experts are recorded, and by vLLM itself, as on a GPU."""
    is_gpu = config.cluster.pools[config.cluster.rollout_pool].device == "gpu"
    return is_gpu and config.algorithm.routing == "replay" and config.model.shape.num_experts > 0


def check_run_dir(config: RunConfig) -> Iterator[Finding]:
    """Check that the run directory is new, empty or may be overwritten, and that it is writable."""
    path = Path(config.run_dir)
    if reason := unusable_path(config.run_dir):
        yield error(f"run_dir={config.run_dir!r:.100} {reason}", "name")
        return
    if path.resolve() in (Path.cwd(), *Path.cwd().parents):
        yield error(
            f"run_dir={path} is the working directory or contains it: a run owns its directory, and overwrite=true "
            "would delete it. Use e.g. runs/${name}."
        )
        return
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        yield error(f"run_dir={path}: {existing} is a file. Use a new name=... or another run_dir.")
    elif not os.access(existing, os.W_OK):
        yield error(f"run_dir={path} cannot be written: no permission in {existing}. Use another run_dir.")
    elif config.sft is not None and config.sft.reuse and is_finished(config):
        return
    elif refusal := occupied(config):
        yield error(refusal, "run_dir", "name", "overwrite")


def unusable_path(path: str) -> str:
    """Return why no run can be written to a path, whatever the machine has there; empty if nothing speaks against it.

    Files that exist are not looked at.
    """
    if path.startswith("~"):
        return (
            "begins with ~, which only a shell replaces by your home directory: a folder of the name ~ would be made "
            'here. Write run_dir="$HOME/...".'
        )
    folder = next((one for one in _SYSTEM_FOLDERS if Path(path).absolute().is_relative_to(one)), None)
    if folder is not None and not Path(path).absolute().is_relative_to("/dev/shm"):  # noqa: S108 - a disk in memory
        return f"is in {folder}, which belongs to the operating system. Use a folder of your own."
    return ""


def check_threads(config: RunConfig) -> Iterator[Finding]:
    """Warn of more threads in one process on a CPU pool than there are CPUs for it."""
    cluster, num_cpus = config.cluster, hardware.num_cpus()
    has_cpu_pool = any(cluster.pools[name].device == "cpu" for name in (cluster.trainer_pool, cluster.rollout_pool))
    if has_cpu_pool and cluster.threads_per_process > num_cpus:
        yield warning(
            f"cluster.threads_per_process={cluster.threads_per_process}, but this process may use {num_cpus} CPUs: the "
            f"threads of each process wait for one another. Use at most {num_cpus}."
        )


def check_driver(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that GPU pools have a driver, the CUDA build of torch and enough devices."""
    on_gpus = (placement.pool for placement in plan_placement(config, command) if placement.device == "gpu")
    used = {name: config.cluster.pools[name] for name in on_gpus if name is not None}
    if not used:
        return
    if not hardware.has_nvidia_driver():
        yield absent(
            f"GPU: the pool {next(iter(used))} is one of GPUs, but this machine has no NVIDIA driver (neither "
            "nvidia-smi nor /proc/driver/nvidia answers). Install the driver, use a machine that has one, or "
            "cluster=local_cpu.",
            "cluster.pools",
        )
        return
    if hardware.is_cpu_build():
        yield absent(
            "cluster: the pools are GPU, but the installed torch is the CPU build and would not see them. Run "
            "`make setup FLAVOR=cuda` in a fresh environment."
        )
    if problem := hardware.driver_problem(hardware.nvidia_driver_version()):
        yield absent(
            f"cluster: the NVIDIA driver of this machine is {problem}. Install a newer driver, use another machine, or "
            "cluster=local_cpu."
        )
    problems = hardware.gpu_problems(capabilities := hardware.gpu_capabilities())
    if problems and len(problems) == len(capabilities):
        yield absent(f"cluster: {'; '.join(problems)}. Use an Ampere or newer GPU, e.g. A10, A100, L4 or H100.")
    wanted, found = sum(pool.count for pool in used.values()), hardware.num_nvidia_gpus()
    if found is not None and found < wanted:
        hidden = hardware.hidden_gpus()
        yield absent(
            f"GPU: the run uses {wanted}, but {hidden or f'nvidia-smi lists {found}'}. "
            f"{'Name more there, use' if hidden else 'Use'} another machine, or a choice of cluster with fewer.",
            "cluster",
        )


def check_gpu_memory(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Plan with the memory that the GPUs of this machine have, where nobody has said how much that is."""
    found = hardware.gpu_memory_gib()
    on_gpus = {placement.pool for placement in plan_placement(config, command) if placement.device == "gpu"}
    for name in sorted(name for name in on_gpus if name is not None):
        limit = config.cluster.pools[name].limit_gib
        # A card sold as 80 GB has 79.6 GiB.
        if found is not None and abs(found - limit) > 0.1 * limit:
            key = f"cluster.pools.{name}.memory_gib"
            yield note(
                f"{key}={limit:g}, and a GPU of this machine has {found:.1f} GiB",
                fits=[Fit(key, int(found), "the GPUs of this machine have that")],
            )


def check_free_memory(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check the estimated memory of all processes against the free memory."""
    needed, free = host_load_gib(plan_placement(config, command)), hardware.available_memory_bytes() / GIB
    if needed > free:
        total = hardware.total_memory_bytes() / GIB
        yield absent(
            f"memory: the run needs about {needed:.1f} GiB of main memory, but {free:.1f} of {total:.1f} GiB are free: "
            "the kernel would kill processes. Stop other programs, use a machine with more memory, a smaller model or "
            f"trainer=lora{or_change([key for key in MEMORY_SETTINGS if config.is_typed(key)])}.",
            *("model", "trainer", "rollout", "cluster", "reward.num_workers"),
            # By what the machine has, not by what is free now: the same command gives the same run.
            fits=smaller_micro_batch(
                config, lambda one: host_load_gib(plan_placement(one, command)), _USABLE_SHARE * total
            )
            if needed > _USABLE_SHARE * total
            else (),
        )


def check_upload(config: RunConfig) -> Iterator[Finding]:
    """Check that a package knows the place of `checkpoint.upload`, and that there are checkpoints to copy."""
    url, checkpoint = config.checkpoint.upload, config.checkpoint
    if url is None:
        return
    import fsspec

    protocol = fsspec.utils.get_protocol(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as problem:
        yield absent(f"checkpoint.upload={url}: {problem}, so nothing could be copied there. Install that package.")
    if protocol == "file" and Path(fsspec.core.strip_protocol(url)).absolute() == Path(config.run_dir).absolute():
        yield error(f"checkpoint.upload={url} is run_dir itself. Give another place, or leave it out.")
    if not (checkpoint.every_steps or checkpoint.every_minutes):
        yield error(
            f"checkpoint.upload={url} with checkpoint.every_minutes=0 and every_steps=0: there are no checkpoints to "
            "copy. Set one of them."
        )


def check_disk(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that checkpoints, the policy and logs fit on the disk of the run directory."""
    checkpoint = config.checkpoint
    takes_any = command == "train" and (checkpoint.every_steps or checkpoint.every_minutes)
    for_good = 0 if checkpoint.keep_every is None else config.total_steps // checkpoint.keep_every
    for_good += checkpoint.keep_best if config.evaluation.keep_best else 0
    count = checkpoint.keep + for_good + 1 if takes_any else 0  # a new one is complete before an old one is removed
    one, others = trained_state_gib(config), published_gib(config) + _LOG_GIB
    needed = others + count * one
    free = hardware.free_disk_bytes(Path(config.run_dir)) / GIB
    if needed > free:
        keys = [key for key in ("run_dir", "checkpoint.keep") if config.is_typed(key)]
        yield absent(
            f"disk: the policy, {count} checkpoints and logs need about {needed:.1f} GiB below "
            f"{Path(config.run_dir).absolute()}, {free:.1f} GiB are free: the run could not save its work. Free some, "
            f"or start it on a larger disk{or_change(keys)}.",
            *("run_dir", "name", "checkpoint", "model", "total_steps"),
            fits=[Fit("checkpoint.keep", 1, f"more checkpoints do not fit into the {free:.1f} GiB that are free")]
            if takes_any and others + (2 + for_good) * one <= free
            else (),
        )


def check_shared_memory(config: RunConfig) -> Iterator[Finding]:
    """Check that two published versions fit in shared memory, the new one and the one that is still being read."""
    route, has_gpus = weight_route(config), config.cluster.pools[config.cluster.rollout_pool].device == "gpu"
    if route in DEVICE_BUFFER_ROUTES and has_gpus and (refusal := expandable_segments(os.environ)):
        yield error(refusal, "weights.transport")
    if route in (*DEVICE_BUFFER_ROUTES, "live_parameters"):
        return
    folder = Path(config.weights.directory or hardware.SHARED_MEMORY)
    if not folder.is_dir():
        if config.weights.directory:
            yield error(f"weights.directory={folder} is not a folder. Create it on every node.")
        return
    needed = shared_gib(config) if route == "adapters" else 2 * published_gib(config)
    remove_abandoned_directories(folder)  # runs that were killed may have left versions there
    free = hardware.free_disk_bytes(folder) / GIB
    if needed > free:
        where = "weights.directory" if config.is_typed("weights.directory") else "shared memory"
        total, disk = hardware.disk_bytes(folder) / GIB, Path(tempfile.gettempdir())
        # By what it has, not by what is free now: the same command gives the same run.
        is_on_disk = total < needed < hardware.free_disk_bytes(disk) / GIB
        yield absent(
            f"{where}: two versions of the policy need {needed:.2f} GiB in {folder}, but {free:.2f} GiB are free. "
            "Enlarge it (containers: --shm-size), or end the programs that fill it.",
            *("model", "weights.directory"),
            fits=[
                Fit(
                    "weights.directory",
                    str(disk),
                    f"{folder} has {total:.2f} GiB, and two versions of the policy need {needed:.2f}",
                )
            ]
            if is_on_disk
            else (),
        )
