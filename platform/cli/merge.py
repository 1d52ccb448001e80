"""`penstock merge`: one policy from several that were trained from the same model, by their task vectors.

All that can be told from configurations and headers is compared before a weight is read. The formulas are in
`weights/task_vectors.py`.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console

from penstock import __version__
from penstock.dataflow.errors import CheckpointError, ConfigError, boundary
from penstock.platform.cli.export import CARD, USAGE, existing, policy_of
from penstock.platform.metrics.progress import Progress, ProgressLine
from penstock.platform.metrics.run_files import CONFIG_FILE as RUN_CONFIG_FILE
from penstock.platform.metrics.run_files import POLICY_FOLDER, SUMMARY_FILE
from penstock.platform.run.run_dir import read_environment, read_json
from penstock.platform.run.saved_config import read_saved_config
from penstock.trainer.build import copy_tokenizer
from penstock.weights.hf_folder import CONFIG_FILE, is_hub_name, local_path, model_folder
from penstock.weights.layout.checkpoint_names import checkpoint_tensors, module_tensors, text_config
from penstock.weights.task_vectors import Method, dare, linear, ties
from penstock.weights.tensor_files import TensorFiles, raw_bytes, write_like

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes whose values are weights. All others are indices, or codes that mean something only with their scales."""
OF_NO_COMPUTATION = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
"""Keys of config.json that may differ: they do not change what the weights compute."""


class Recipe(NamedTuple):
    """How task vectors are added."""

    method: Method
    """A function of `weights/task_vectors.py`."""
    density: float | None
    """Share of each task vector that is kept; None with `linear`."""
    seed: int | None
    """Of the draw of `dare`; None: 0."""

    def __str__(self) -> str:
        drawn = f", seed {self.seed or 0}" if self.method == "dare" else ""
        return self.method if self.density is None else f"{self.method}, density {self.density:g}{drawn}"


class Model:
    """A model that a user has named: a run directory, a Hugging Face folder, or a hub name in the local cache.

    Attributes:
        typed: What the user typed.
        folder: Its Hugging Face folder.
        title: Its name in the model card, without a path of this machine.
        origin: The model that it was trained from: a path, or a hub name; None: nothing says so.
        is_certain: Whether a run says so, and not only a model card.

    Raises:
        ConfigError: If there is no such model, or its newest policy is not in Hugging Face form yet.
    """

    def __init__(self, typed: str) -> None:
        self.typed = typed
        path = local_path(typed)
        if path is not None and (path / RUN_CONFIG_FILE).is_file():
            self.folder = self._of_run(path)
        else:
            found = model_folder(typed)
            if found is None:
                cached = ", or not in the cache of huggingface_hub" if is_hub_name(typed) else ""
                raise ConfigError(f"{typed}: there is no such run directory or Hugging Face folder{cached}.")
            if not (found / CONFIG_FILE).is_file():
                alone = (found / "adapter_config.json").is_file()
                what = "adapters alone; merge them into their base first" if alone else f"no {CONFIG_FILE}"
                raise ConfigError(f"{typed}: it holds {what}. Give a run directory or a Hugging Face folder.")
            self.folder = found
        self.folder = self.folder.resolve() if path is not None else self.folder
        run_dir = self.folder.parent
        self.is_certain = self.folder.name == POLICY_FOLDER and (run_dir / RUN_CONFIG_FILE).is_file()
        self.title = typed if path is None else self.folder.name
        self.origin: str | None = None
        if self.is_certain:
            saved = read_saved_config(run_dir)
            version = read_json(run_dir / SUMMARY_FILE).get("policy_version")
            self.title = saved["name"] if version is None else f"{saved['name']}, step {version}"
            self.origin = saved["model"]["path"]
            began_in = read_environment(run_dir).get("folder")
            if self.origin is not None and began_in is not None and (Path(began_in) / self.origin).exists():
                self.origin = str(Path(began_in) / self.origin)
        elif (card := self.folder / CARD).is_file():
            self.origin = _base_of_card(card.read_text(encoding="utf-8", errors="replace"))

    def _of_run(self, run_dir: Path) -> Path:
        """The policy of a run, if the newest one is written as a model."""
        try:
            version, checkpoint = policy_of(run_dir, None)
        except CheckpointError as error:
            raise ConfigError(f"{self.typed}: the run has no policy yet. {error}") from error
        if checkpoint is not None:
            raise ConfigError(
                f"{self.typed}: its newest policy, of step {version}, is in a checkpoint alone. Write it as a model, "
                f"and merge that: penstock export {self.typed} --to DIR"
            )
        return run_dir / POLICY_FOLDER

    @cached_property
    def tensors(self) -> TensorFiles:
        """Its weights.

        Raises:
            ConfigError: If they cannot be read.
        """
        try:
            return TensorFiles(self.folder)
        except ValueError as error:
            raise ConfigError(f"{self.typed}: {error}") from error

    @cached_property
    def class_names(self) -> frozenset[str]:
        """Names of the tensors that the class of the model has. A trained policy is without others, e.g. `mtp.*`."""
        config = self.tensors.config
        try:
            if text_config(config) is config:  # else the policy of a run has all that its source has
                held = {one.name: torch.empty(one.shape, device="meta") for one in module_tensors(config)}
                return frozenset(checkpoint_tensors(config, held))
        except ValueError:  # transformers has no language model of this kind
            pass
        return self.tensors.names

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer; None if it has none.

        Raises:
            ConfigError: If it cannot be loaded.
        """
        if not any(self.folder.glob("tokenizer*")):
            return None
        from transformers import AutoTokenizer

        with boundary(ConfigError, f"{self.typed}: its tokenizer cannot be loaded"):
            return AutoTokenizer.from_pretrained(str(self.folder))


def run_merge(
    parents: Sequence[str],
    base: str,
    coefficients: str,
    recipe: Recipe,
    target: Path,
    console: Console,
) -> int:
    """Merge policies into a new Hugging Face folder; returns the exit code.

    Args:
        parents: Run directories or Hugging Face folders.
        base: The model that all of them were trained from.
        coefficients: One number per parent, separated by commas.
        recipe: How their task vectors are added.
        target: Folder that does not exist.
        console: Told what was compared and written.

    Raises:
        ConfigError: If the models do not fit together, or a setting is out of its range.
        CheckpointError: If the folder cannot be written.
    """
    weights, problems = _coefficients(coefficients, parents)
    problems += _problems_of_recipe(recipe)
    problems += existing(target)
    models = []
    for typed in [base, *parents]:
        try:
            models.append(Model(typed))
        except ConfigError as error:
            problems += error.violations
    if problems:
        raise ConfigError(problems)
    root, *experts = models
    progress = Progress("comparing the models")
    line = ProgressLine(Console(stderr=True))
    with line.showing(lambda: progress):
        problems = [one for expert in experts for one in _differences_of_form(root, expert)]
        problems += _differences_of_tokenizers(root, experts)
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        warnings = [one for expert in experts for one in _differences_of_config(root, expert)]
        for expert in experts:
            is_wrong, sentence = _question_of_origin(root, expert)
            if sentence is not None:
                (problems if is_wrong else warnings).append(sentence)
        if problems:
            raise ConfigError(problems)
    kept = sorted(name for name in root.tensors.names if any(name not in expert.tensors for expert in experts))
    if kept:
        kind = root.tensors.config.model_type
        warnings.append(
            f"{base}: {len(kept)} tensors that no {kind} of transformers has stay as they are, e.g. {kept[0]}"
        )
    for sentence in warnings:
        console.print(f"warning: {sentence}", markup=False)
    # The sum of floats depends on its order: that of the folders, not of the words.
    pairs = sorted(zip(experts, weights, strict=True), key=lambda pair: str(pair[0].folder))
    experts, weights = [expert for expert, _ in pairs], [weight for _, weight in pairs]
    progress = Progress("merging", 0, len(root.tensors.names), "tensors")

    def merged(name: str) -> torch.Tensor:
        nonlocal progress
        progress = progress._replace(done=(progress.done or 0) + 1)
        if name in kept:
            return root.tensors.read(name)
        return merge_tensor(name, root, experts, weights, recipe)

    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with boundary(CheckpointError, f"--to {target}"), line.showing(lambda: progress):
            unfinished.mkdir(parents=True)
            write_like(root.tensors, unfinished, merged)
            for file in (root.folder / name for name in (CONFIG_FILE, "model.safetensors.index.json")):
                if file.is_file():
                    shutil.copy2(file, unfinished / file.name)
            copy_tokenizer(str(next((one for one in experts if one.tokenizer is not None), root).folder), unfinished)
            card = model_card(target.name, root, pairs, recipe)
            (unfinished / CARD).write_text(card, encoding="utf-8")
            unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    console.print(f"merge of {', '.join(parents)} ({recipe}) written to {target}", markup=False)
    return 0


def merge_tensor(
    name: str,
    base: Model,
    experts: Sequence[Model],
    coefficients: Sequence[float],
    recipe: Recipe,
) -> torch.Tensor:
    """One tensor of the merged model, computed in float32 (float64 if one of the tensors has it), in the base's dtype.

    Raises:
        ConfigError: If a value is not finite, or a tensor that cannot be merged is not the same in all models.
    """
    own = base.tensors.read(name)
    others = [expert.tensors.read(name) for expert in experts]
    if base.tensors.dtype(name) not in FLOATING:
        for expert, other in zip(experts, others, strict=True):
            if not torch.equal(raw_bytes(own), raw_bytes(other)):
                raise ConfigError(
                    f"{expert.typed}: {name} ({base.tensors.dtype(name)}) is not that of the base, and only floats can "
                    "be merged. Give models in which it is the same, or that are not quantised."
                )
        return own
    for model, tensor in zip([base, *experts], [own, *others], strict=True):
        _check_finite(model.typed, name, tensor)
    start = own.to(torch.float64 if torch.float64 in {one.dtype for one in (own, *others)} else torch.float32)
    if recipe.density is None:
        merged = linear(start, others, coefficients)
    elif recipe.method == "ties":
        merged = ties(start, others, coefficients, recipe.density)
    else:
        merged = dare(
            start, others, coefficients, recipe.density, name=base.tensors.first_name(name), seed=recipe.seed or 0
        )
    merged = merged.to(own.dtype)
    _check_finite(f"the merge, in {own.dtype}", name, merged)
    return merged


def _check_finite(whose: str, name: str, tensor: torch.Tensor) -> None:
    """Check that all values of a tensor are finite.

    Raises:
        ConfigError: If not, with their number.
    """
    num_wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
    if num_wrong:
        raise ConfigError(
            f"{whose}: {num_wrong} of the {tensor.numel()} values of {name} are not finite, so the merged model would "
            "answer nothing. Give another checkpoint, or smaller coefficients."
        )


def _coefficients(typed: str, parents: Sequence[str]) -> tuple[list[float], list[str]]:
    """The coefficients, and what is wrong with them."""
    words, weights = typed.split(","), []
    for word in words:
        try:
            weights.append(float(word))
        except ValueError:
            weights.append(math.nan)
    wrong = [word for word, weight in zip(words, weights, strict=True) if not math.isfinite(weight)]
    problems = [f"--coefficients {typed}: {word!r} is not a number. Write e.g. 0.5,0.5." for word in wrong]
    if len(words) != len(parents):
        problems.append(
            f"--coefficients {typed}: {len(words)} for {len(parents)} policies ({', '.join(parents)}). Give one for "
            "each, in their order."
        )
    return weights, problems


def _problems_of_recipe(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each option that is missing, has no effect or is out of its range."""
    method, density, seed = recipe
    if method == "linear" and density is not None:
        yield f"--density {density:g}: it has no effect with --method linear. Leave it out, or use ties or dare."
    if method != "linear" and density is None:
        yield (
            f"--method {method}: give --density, the share of each task vector that is kept, in (0, 1]. The paper of "
            "ties keeps 0.2; that of dare tries 0.1 to 0.9."
        )
    if density is not None and not 0 < density <= 1:
        yield f"--density {density:g}: it is outside (0, 1]. It is the share of each task vector that is kept."
    if method != "dare" and seed is not None:
        yield f"--seed {seed}: it has no effect with --method {method}, which draws nothing. Leave it out."


def _differences_of_form(base: Model, expert: Model) -> Iterator[str]:
    """Yield a sentence for each kind of difference between the tensors of two models, by their headers."""
    for model in (base, expert):
        if getattr(model.tensors.config, "quantization_config", None) is not None:
            yield f"{model.typed}: it is quantised ({CONFIG_FILE}), and codes cannot be added. Give its weights."
            return
    kinds = base.tensors.config.model_type, expert.tensors.config.model_type
    if kinds[0] != kinds[1]:
        yield f"{expert.typed}: it is a {kinds[1]}, and the base {base.typed} a {kinds[0]}. Give policies of one model."
        return
    are_tied = [bool(getattr(model.tensors.config, "tie_word_embeddings", False)) for model in (base, expert)]
    if are_tied[0] != are_tied[1]:
        yield (
            f"{expert.typed}: tie_word_embeddings={are_tied[1]}, and {are_tied[0]} in the base {base.typed}: one has a "
            "head of its own, and the other's is its embedding. Only like models can be merged."
        )
        return
    names = base.tensors.names, expert.tensors.names
    missing = sorted(name for name in names[0] if name not in expert.tensors)
    if missing:
        missing = [name for name in missing if name in base.class_names]
    unknown = sorted(name for name in names[1] if name not in base.tensors)
    for these, which in ((missing, "are missing"), (unknown, f"are not in the base {base.typed}")):
        if these:
            yield f"{expert.typed}: {len(these)} tensors {which}, e.g. {these[0]}. Only like models can be merged."
    for name in sorted(names[0]):
        if name not in expert.tensors:
            continue
        (shape, dtype), (other, stored) = (
            (model.tensors.shape(name), model.tensors.dtype(name)) for model in (base, expert)
        )
        if shape != other:
            yield f"{expert.typed}: {name} is {list(other)}, and in the base {base.typed} {list(shape)}."
            return
        if dtype != stored and not {dtype, stored} <= FLOATING.keys():
            yield f"{expert.typed}: {name} is stored as {stored}, and in the base as {dtype}, which cannot be merged."
            return


def _differences_of_config(base: Model, expert: Model) -> Iterator[str]:
    """Yield a sentence if the configurations say that the same weights compute something else."""
    own, other = base.tensors.config.to_dict(), expert.tensors.config.to_dict()
    keys = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
    told = [f"{key}={other.get(key)} ({own.get(key)})" for key in keys if key not in OF_NO_COMPUTATION]
    if told:
        yield f"{expert.typed}: its {CONFIG_FILE} differs from the base's, which is written: {', '.join(told)}"


def _differences_of_tokenizers(base: Model, experts: Sequence[Model]) -> Iterator[str]:
    """Yield a sentence for each model whose ids stand for other texts, or whose chats are rendered differently.

    The content is compared, since a tokenizer that is loaded and saved again has other bytes. Models without a
    tokenizer are passed over.
    """
    first, *others = [model for model in (base, *experts) if model.tokenizer is not None] or [base]
    for model in others:
        own, other = _content(first.tokenizer), _content(model.tokenizer)
        parts = sorted(part for part in own.keys() | other.keys() if own.get(part) != other.get(part))
        if parts:
            yield (
                f"{model.typed}: its tokenizer is not that of {first.typed}: they differ in {', '.join(parts)}. The "
                "same ids would stand for other texts."
            )
    # The base may be without a template, or have another one: its own is not used.
    first, *others = [model for model in experts if model.tokenizer is not None] or [base]
    for model in others:
        for what in ("chat_template", "eos_token"):
            if getattr(model.tokenizer, what, None) != getattr(first.tokenizer, what, None):
                yield (
                    f"{model.typed}: its tokenizer has another {what} than {first.typed}, and a merged policy has one. "
                    "Give policies that were trained with the same."
                )


def _content(tokenizer: Any) -> dict[str, Any]:
    """What maps texts to ids, by its parts."""
    if not tokenizer.is_fast:
        return {"vocabulary": tokenizer.get_vocab(), "special tokens": tokenizer.all_special_tokens}
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {part: value for part, value in content.items() if part not in ("version", "truncation", "padding")}


def _question_of_origin(base: Model, expert: Model) -> tuple[bool, str | None]:
    """Whether it is certain that a policy was not trained from the base, and what to tell; None: it was."""
    if expert.origin is None:
        if expert.is_certain:
            return True, f"{expert.typed}: the run began with random weights, so it has no task vector. Leave it out."
        return False, f"{expert.typed}: nothing in it says which model it was trained from. Is it {base.typed}?"
    if expert.origin == base.typed:
        return False, None
    found = model_folder(expert.origin)
    if found is None:
        return False, f"{expert.typed}: it was trained from {expert.origin}, which is not here. Is it {base.typed}?"
    if found.resolve() == base.folder.resolve() or not (found / CONFIG_FILE).is_file():
        return False, None
    name = _first_difference(base.tensors, Model(str(found)).tensors)
    if name is None:
        return False, None
    return expert.is_certain, (
        f"{expert.typed}: it was trained from {expert.origin}, whose {name} is not that of {base.typed}. A task vector "
        "is the difference to the model that was trained: give that one as --base."
    )


def _first_difference(one: TensorFiles, other: TensorFiles) -> str | None:
    """A tensor of two models that certainly differs. Values in another precision are not compared."""
    for name in sorted(one.names):
        if name not in other or one.shape(name) != other.shape(name):
            return name
        if one.dtype(name) != other.dtype(name):
            continue
        if not torch.equal(raw_bytes(one.read(name)), raw_bytes(other.read(name))):
            return name
    return None


def _base_of_card(card: str) -> str | None:
    """The one model that a model card names as its base."""
    if not card.startswith("---\n"):
        return None
    try:
        facts = yaml.safe_load(card.split("---\n")[1])
    except yaml.YAMLError:
        return None
    base = facts.get("base_model") if isinstance(facts, dict) else None
    return base if isinstance(base, str) else None


def model_card(
    name: str,
    base: Model,
    parents: Sequence[tuple[Model, float]],
    recipe: Recipe,
) -> str:
    """What was merged, and how to use the model, as a model card in Markdown."""
    front = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [penstock, merge]"]
    if local_path(base.typed) is None:
        front.insert(0, f"base_model: {base.typed}")
    rows = [("base model", base.title), ("method", str(recipe))]
    rows += [(parent.title, f"coefficient {weight:g}") for parent, weight in parents]
    table = "\n".join(f"| {what} | {told} |" for what, told in rows)
    return (
        "---\n" + "\n".join(front) + f"\n---\n\n# {name}\n\n"
        f"Merged with Penstock {__version__} by the task vectors of policies that were trained from the base model.\n\n"
        f"| | |\n|---|---|\n{table}\n\n{USAGE}\n"
        "Nothing was measured. The licenses of the base model and of the data hold for it.\n"
    )
