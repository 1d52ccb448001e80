"""`penstock eval [POLICY]`: which policy is measured, by whose configuration, and where the results go.

A POLICY is the directory of a run, or one of its checkpoints, and the run's own configuration is used; or a Hugging
Face folder, or a name on the Hub, in place of `model.path` of an experiment.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from rich.console import Console

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import LoadedConfig, load_config, settled
from penstock.platform.checks.run_dir import is_run_dir
from penstock.platform.cli.child import process_of
from penstock.platform.cli.export import best_step, existing, export_policy, policy_of
from penstock.platform.config.overrides import quoted
from penstock.platform.metrics.evaluation_results import is_results, refuse_other_rewards, run_comparison
from penstock.platform.metrics.progress import waiting
from penstock.platform.metrics.run_files import POLICY_FOLDER
from penstock.platform.run.checkpoint import Checkpoint
from penstock.platform.run.eval import facts, run_eval
from penstock.platform.run.saved_config import changed_config, enter_folder_of, read_saved_config
from penstock.weights.hf_folder import CONFIG_FILE, is_hub_name

_STEP = re.compile(r"step_(\d+)")
"""Folder of a checkpoint."""
RESULTS_FOLDER = Path("runs/evaluations")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured."""

    loaded: LoadedConfig
    """The checked configuration."""
    policy: str
    """The policy as results name it."""
    step: int | None
    """Its step, if it is that of a run."""
    checkpoint: Checkpoint | None
    """The policy is written from it first; None: `model.path` is the policy."""
    folder: Path
    """Where the results go."""


def policies_in(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The policies among the words of the command, which come first, and the overrides.

    A folder that exists is a policy, also if its name has a `=`.
    """
    named = [word for word in words if os.path.isdir(word)]  # noqa: PTH112 - any text, which may be too long for a path
    overrides = [word for word in words if word not in named and ("=" in word or word.startswith("~"))]
    return [word for word in words if word not in overrides], overrides


def load_measurement(
    policy: str | None,
    overrides: Sequence[str],
    *,
    step: int | None = None,
    best: bool = False,
    to: Path | None = None,
    config_dir: Path | None = None,
    dry_run: bool = False,
) -> Measurement:
    """Load and check the configuration of an evaluation without starting anything.

    Args:
        policy: Run directory, checkpoint in it, Hugging Face folder or name on the Hub; None is `model.path` of the
            configuration.
        overrides: Hydra overrides; with a run directory, `KEY=VALUE` words.
        step: Step of the policy of a run; None is the newest that was saved.
        best: Take that of the best evaluation.
        to: New folder of the results; None is one in `runs/evaluations`.
        config_dir: Folder with the user's own YAML.
        dry_run: Whether missing resources of this machine are warnings.

    Raises:
        ConfigError: Listing all violations.
    """
    folder = _new_folder(to)
    path = None if policy is None else Path(policy).expanduser()
    if policy is not None and _typed("model.path", overrides):
        raise ConfigError([f"{policy} and model.path= name two policies. Give one of them."])
    if path is not None and is_run_dir(path.parent.parent) and (found := _STEP.fullmatch(path.name)):
        if step is not None or best:
            raise ConfigError([f"{policy} and {'--best' if best else '--step'} both say which step. Give one of them."])
        path, step = path.parent.parent, int(found[1])
    if path is not None and is_run_dir(path):
        return _of_run(path, overrides, step, folder, best=best, dry_run=dry_run)
    if step is not None or best:
        raise ConfigError([f"{'--best' if best else '--step'}: only a run has steps, and {policy} is none."])
    if policy is not None and path is not None and not (path / CONFIG_FILE).is_file() and not is_hub_name(policy):
        what = (
            "holds neither a run (config.yaml) nor a model (config.json)" if path.exists() else "there is no such path"
        )
        raise ConfigError(
            [f"{policy}: {what}. Give the directory of a run, a Hugging Face folder, or a name on the Hub."]
        )
    words = [*overrides, *([] if policy is None else [quoted(f"model.path={policy}")])]
    loaded = load_config("eval", words, config_dir=config_dir, dry_run=dry_run)
    own_name = loaded.config.name if policy is None or _typed("name", overrides) else _short_name(policy)
    folder = folder or _free_folder(own_name)
    loaded.warnings += _without_effect(overrides, folder)
    return Measurement(loaded, policy or str(loaded.config.model.path), None, None, folder)


def _of_run(
    run: Path, overrides: Sequence[str], step: int | None, folder: Path | None, *, best: bool, dry_run: bool
) -> Measurement:
    """The policy of a run, with the run's own configuration and overrides; the run's directory stays as it is."""
    run_dir = run.resolve()
    saved_config = read_saved_config(run_dir)
    if best:
        step = best_step(run_dir, step)
    version, checkpoint = policy_of(run_dir, step)
    here = Path.cwd()
    enter_folder_of(run_dir)
    # Until it is written, the checks read the model that the run has started from: it has the same form.
    own = {} if checkpoint is not None else {"path": str(run_dir / POLICY_FOLDER)}
    config = changed_config(saved_config, overrides, run_dir)
    own_name = run_dir.name if version is None else f"{run_dir.name}-step_{version}"
    folder = folder or _free_folder(config.name if _typed("name", overrides) else own_name, here)
    model = config.model.model_copy(update={**own, "from_scratch": False})
    config = config.model_copy(update={"model": model, "run_dir": str(folder)})
    config, derived, findings = settled(config, "eval")
    if problems := [finding.message for finding in findings if finding.refuses(dry_run=dry_run)]:
        raise ConfigError(list(dict.fromkeys(problems)))
    told = [finding.message for finding in findings if finding.severity != "note"] + _without_effect(overrides, folder)
    notes = [finding.message for finding in findings if finding.severity == "note"]
    loaded = LoadedConfig(config, [*derived, *told], notes)
    name = str(run) if version is None else f"{run}, step {version}"
    return Measurement(loaded, name, version, checkpoint, folder)


def _without_effect(overrides: Sequence[str], folder: Path) -> list[str]:
    """A sentence for each `run_dir=` among the overrides, which no run has here."""
    why = f"has no effect with `penstock eval`, whose results are in {folder}"
    return [f"run_dir {why}. Use --to {path}." for path in _typed("run_dir", overrides)]


def _typed(key: str, overrides: Sequence[str]) -> list[str]:
    """The values that the overrides give a key."""
    return [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith(f"{key}=")]


def _new_folder(to: Path | None) -> Path | None:
    """The folder that `--to` names.

    Raises:
        ConfigError: If it exists.
    """
    if to is not None and (problems := existing(to)):
        raise ConfigError(problems)
    return None if to is None else to.absolute()


def _short_name(policy: str) -> str:
    """As part of the name of a folder."""
    named = "-".join(part for part in Path(policy).parts if part not in ("/", "..", "~", "runs", "checkpoints"))
    return named or Path(policy).expanduser().resolve().name


def _free_folder(name: str, within: Path = Path()) -> Path:
    """A folder for results that does not exist."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for one in names if not (path := (within / RESULTS_FOLDER / one).absolute()).exists())


def measure(measurement: Measurement) -> int:
    """Evaluate; returns the exit code. The folder of the results is left out if there are none."""
    config, folder = measurement.loaded.config, measurement.folder
    folder.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            if measurement.checkpoint is not None:
                # Engines on other nodes read it, and see the folder of the results rather than this machine's /tmp.
                temporary = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="policy-"))
                policy = Path(temporary) / POLICY_FOLDER
                with waiting(f"writing the policy of step {measurement.step}"):
                    export_policy(config, measurement.checkpoint.path, policy)
                config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(policy)})})
            return run_eval(config, measurement.policy, measurement.step, folder)
    finally:
        if not is_results(folder):
            with suppress(OSError):  # it has the error
                folder.rmdir()


def measure_two(
    policies: Sequence[str], overrides: Sequence[str], to: Path | None, config_dir: Path | None, console: Console
) -> int:
    """Evaluate two policies, each by a command of its own, since Ray cannot be started twice; then compare them.

    Args:
        policies: The two.
        overrides: Of both.
        to: New folder, with a folder of results for each; None puts them into `runs/evaluations`.
        config_dir: Folder with the user's own YAML.
        console: Told the comparison.

    Returns:
        The exit code.

    Raises:
        ConfigError: If one of them cannot be measured, before the other one is.
        PenstockError: If they cannot be compared.
    """
    options = [] if config_dir is None else ["--config-dir", str(config_dir)]
    within, planned = _new_folder(to), []
    for policy in policies:
        with chdir("."):  # a run is measured in the folder in which it was started
            planned.append(load_measurement(policy, overrides, config_dir=config_dir))
    refuse_other_rewards(*(facts(one.loaded.config) for one in planned))
    folders: list[Path] = []
    for name, policy, one in zip("ab", policies, planned, strict=True):
        folder = _free_folder(one.folder.name) if within is None else within / name
        words = ["eval", policy, *overrides, *options, "--to", str(folder)]
        with process_of(words, one.loaded.config.stop_grace_s) as process:
            if code := process.wait():
                return code
        folders.append(folder)
    return run_comparison(folders, console)
