"""Checks of the models that a run starts from: their files, and whether the trainer and the engines support them.

Missing models are `absent` findings: errors in a run, but warnings in a dry run if the path is that of a preset, since
its policy is made by another command, or downloaded later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.model_probe import Question, ask
from penstock.platform.checks.run_dir import is_unfinished_warm_start
from penstock.platform.cluster import hardware
from penstock.platform.config.checkpoint_shapes import not_here
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, Fit, absent, error, note, warning
from penstock.platform.config.overrides import CONF_DIR
from penstock.platform.config.schema import FROZEN_ROLES, RunConfig
from penstock.rollout.config import VllmEngineConfig
from penstock.trainer.backends.expert_parallel import modules_of_experts
from penstock.trainer.model_support import ModelRole
from penstock.trainer.validation import unmatched_targets
from penstock.weights.hf_folder import (
    CONFIG_FILE,
    local_path,
    model_folder,
    read_json_object,
    shape_of,
    transformers_config,
    weight_files,
)
from penstock.weights.layout.checkpoint_names import expert_weights, linear_layers, model_without_memory
from penstock.weights.model_config import ModelForm

_WARM_START = re.compile(r"^runs/(?P<experiment>\w+_sft)-seed(?P<seed>\d+)/policy$")
"""Path that conf/model/ uses for the policy trained by a configuration of conf/experiment/."""
_REWARD_MODEL = "penstock.envs.rewards.reward_model:RewardModelReward"
_TOKENIZER_FILE = "tokenizer.json"
_EVERY_MODEL = ModelForm(
    "padded", "model", "eager", ("what computes this model could not be asked, and this computes every one",), "current"
)
"""How a model is trained that cannot be asked: by its own code, one sequence per row."""


def check_model_paths(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check every model that `command` loads."""
    if command == "train" and awaits_warm_start(config):
        yield warning(
            f"model.path={config.model.path} does not exist yet: `penstock sft {' '.join(config.warm_start or ())}` "
            "creates it first (warm_start).",
            "warm_start",
        )
    elif config.model.path is not None and not config.model.from_scratch:
        yield from check_policy(config, command, "model.path", config.model.path)
    if command == "train" and config.partner is not None and config.partner.model.path is not None:
        theirs = config.partner.model.path
        yield from check_policy(config.partner_view, command, "partner.model.path", theirs)
        yield from check_tokenizer(config, "partner.model.path", theirs)
    if command == "train":
        for role in FROZEN_ROLES:
            if config.num_frozen(role) and (path := config.frozen(role).path) is not None:
                yield from check_auxiliary(config, f"{role}.path", path, "frozen")
        if config.algorithm.needs_critic and config.critic.path is not None:
            yield from check_auxiliary(config, "critic.path", config.critic.path, "value")
    if command not in WITHOUT_ENGINES:
        rewards = [("reward", config.reward.fn, config.reward.args)]
        rewards += [(f"reward.parts.{name}", part.fn, part.args) for name, part in config.reward.parts.items()]
        for section, function, arguments in rewards:
            if function == _REWARD_MODEL and isinstance(of_reward := arguments.get("path"), str):
                problems = list(_check_files(f"{section}.args.path", of_reward))
                if not problems and (folder := model_folder(of_reward)) is not None:
                    problems += _ask_about(config, f"{section}.args.path={of_reward}", folder, "reward")
                yield from problems


def check_contexts(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check the context of every trained or served policy whose config.json can be read.

    This comes first, since most limits follow from the context.
    """
    models = [("model.path", config)]
    if command == "train" and config.partner is not None:
        models.append(("partner.model.path", config.partner_view))
    for key, view in models:
        path = view.model.path
        folder = None if path is None or view.model.from_scratch else model_folder(path)
        if path is not None and folder is not None and not list(_check_files(key, path)):
            yield from _check_context(view, key, folder)


def awaits_warm_start(config: RunConfig) -> bool:
    """Whether the policy still has to be created by the warm start, or was left by one that has not ended."""
    path, is_named = config.model.path, config.warm_start is not None
    if path is None or not is_named:
        return False
    return local_path(f"{path}/{CONFIG_FILE}") is None or is_unfinished_warm_start(Path(path).parent)


def check_policy(config: RunConfig, command: Command, key: str, path: str) -> Iterator[Finding]:
    """Check a policy that is trained or served: its files, context, tokenizer, and support by trainer and engines."""
    problems = list(_check_files(key, path))
    folder = model_folder(path)
    if problems or folder is None:
        yield from problems
        return
    yield from check_lora_targets(config, key, folder)
    yield from check_expert_plan(config, key, folder)
    problems += _check_rope(config, key, folder)
    problems += _check_vocabulary(config, key, folder)
    has_context = not list(_check_context(config, key, folder))  # `check_contexts` yields them
    if not problems and command == "rm":
        question = _support_question(config, command, folder)._replace(role="value", load={})
        problems += _answers(f"{key}={path} as a reward model", question, config)
    elif not problems and has_context:
        problems += _check_support(config, command, key, folder)
    if not problems and command == "train" and config.algorithm.needs_critic and config.critic.path is None:
        problems += _ask_about(config, f"{key}={path} as a critic (critic.path=null)", folder, "value")
    yield from problems


def check_auxiliary(config: RunConfig, key: str, path: str, role: Literal["frozen", "value"]) -> Iterator[Finding]:
    """Check a model that reads the policy's tokens: its files, vocabulary, tokenizer, and support by the trainer."""
    problems = list(_check_files(key, path))
    folder = model_folder(path)
    if problems or folder is None:
        yield from problems
        return
    file, ours = folder / CONFIG_FILE, config.model.shape.vocab_size
    found = shape_of(transformers_config(file), file)
    if found.vocab_size != ours:
        yield error(
            f"{key}={path}: its vocab_size={found.vocab_size} ({file}) differs from the policy's, {ours}: it would "
            "misread the policy's tokens. Use a model with the policy's tokenizer.",
            "model.shape.vocab_size",
            "model.path",
        )
    if role == "value" and config.trainer.expert_parallel and found.num_experts % (ranks := config.trainer.num_shards):
        yield error(
            f"trainer.expert_parallel=true: the {found.num_experts} experts of {key}={path} cannot be dealt out "
            f"evenly to {ranks} ranks. Use another critic, or expert_parallel=false.",
            key,
        )
    yield from check_tokenizer(config, key, path)
    yield from _check_rope(config, key, folder)
    yield from _ask_about(config, f"{key}={path}", folder, role)


def _check_files(key: str, path: str) -> Iterator[Finding]:
    """Check that a model is on this machine, that its config.json is read, and that its weights are complete."""
    folder = model_folder(path)
    if folder is None or not (folder / CONFIG_FILE).exists():
        yield _missing(key, path)
        return
    try:
        file = folder / CONFIG_FILE
        shape_of(transformers_config(file), file)
        weight_files(folder)
    except ValueError as problem:
        yield error(f"{key}={path}: {problem}")


def _missing(key: str, path: str) -> Finding:
    """Say what would bring a model to this machine."""
    if (maker := _WARM_START.match(path)) and (CONF_DIR / "experiment" / f"{maker['experiment']}.yaml").is_file():
        return absent(
            f"{key}={path} does not exist: there is no policy to start from. Create it with "
            f"`penstock sft experiment={maker['experiment']} seed={maker['seed']}`, or give {key}=DIR of one that you "
            "have.",
            "seed",
        )
    if local_path(path) is not None:
        return error(not_here(key, path))
    return absent(not_here(key, path), "seed")


def num_positions(config: RunConfig) -> int | None:
    """How long the context of the policy can be by its config.json; None if nothing there limits it."""
    path = config.model.path
    folder = None if path is None or config.model.from_scratch else model_folder(path)
    if path is None or folder is None or list(_check_files("model.path", path)):
        return None
    text = transformers_config(folder / CONFIG_FILE).get_text_config(decoder=True)
    has_torch_engines = any(view.rollout.engine.type == "torch" for view in config.rollout_views)
    limits = (
        _reach(text),
        original_positions(text, "longrope"),
        getattr(text, "sliding_window", None) if has_torch_engines else None,
    )
    return min((limit for limit in limits if limit is not None), default=None)


def _reach(text: Any) -> int | None:
    """Positions of a model, as vLLM derives them (`_get_and_verify_max_len` of its ModelConfig); None: no limit."""
    positions, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None)
    if not isinstance(positions, int):
        return None
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    # These have max_position_embeddings scaled already.
    is_counted = kind in (
        None,
        "default",
        "su",
        "longrope",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
    )
    return positions if is_counted or rope is None else int(positions * float(rope.get("factor") or 1))


def _check_context(config: RunConfig, key: str, folder: Path) -> Iterator[Finding]:
    """Check that the model has a position for every token of the context."""
    text = transformers_config(folder / CONFIG_FILE).get_text_config(decoder=True)
    reach, context, section = _reach(text), config.model.max_context_tokens, key.removesuffix(".path")
    if reach is not None and context > reach:
        positions = getattr(text, "max_position_embeddings", None)
        scaled = "" if reach == positions else f", {reach} by its rope_parameters,"
        yield error(
            f"{section}.max_context_tokens={context} is above max_position_embeddings={positions}{scaled} of the "
            f"checkpoint ({key}, {folder / CONFIG_FILE}): it was not trained on such positions, and vLLM refuses them. "
            f"Use at most {reach}.",
            key,
            fits=[Fit(f"{section}.max_context_tokens", reach, "the checkpoint has no more positions")],
        )
    window = getattr(text, "sliding_window", None)
    has_torch_engines = any(view.rollout.engine.type == "torch" for view in config.rollout_views)
    if window is not None and has_torch_engines and context > window:
        yield error(
            f"rollout.engine.type=torch with {section}.max_context_tokens={context} and the checkpoint's "
            f"sliding_window={window} ({key}): this engine attends to the whole context. Use rollout/engine=vllm, or a "
            f"context of at most {window}.",
            key,
            fits=[
                Fit(
                    f"{section}.max_context_tokens",
                    window,
                    "the torch engine attends to all of it, and the checkpoint has this sliding_window",
                )
            ],
        )


def original_positions(hf_config: Any, rope_type: str) -> int | None:
    """Positions from which on rotary embeddings of this type are others; None if the model has none of this type.

    Args:
        hf_config: Of transformers; layers of several kinds each have their own `rope_parameters`.
        rope_type: `longrope` or `dynamic`.
    """
    text = hf_config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    found = []
    for one in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(one, dict) and one.get("rope_type") == rope_type:
            places = (one.get("original_max_position_embeddings"),
                      getattr(text, "original_max_position_embeddings", None),
                      getattr(text, "max_position_embeddings", None))  # fmt: skip
            found += [place for place in places if isinstance(place, int)][:1]
    return min(found, default=None)


def _check_rope(config: RunConfig, key: str, folder: Path) -> Iterator[Finding]:
    """Check that the rotary embeddings are the same for every length: a row of the trainer holds several sequences."""
    hf_config, context = transformers_config(folder / CONFIG_FILE), config.model.max_context_tokens
    setting = f"{'partner.' if key.startswith('partner.') else ''}model.max_context_tokens"
    if (original := original_positions(hf_config, "longrope")) is not None and context > original:
        yield error(
            f"{setting}={context} is above original_max_position_embeddings={original} of the checkpoint ({key}, "
            f"{folder / CONFIG_FILE}), which has LongRoPE: beyond it transformers takes other factors (long_factor) by "
            "the longest sequence of a forward pass, and vLLM by the context that it starts with. So trainer and "
            f"engines would compute different logprobs. Use {setting}={original} or less.",
            key,
            fits=[Fit(setting, original, "beyond it the checkpoint's LongRoPE takes other factors")],
        )
    if (original := original_positions(hf_config, "dynamic")) is not None and context > original:
        yield warning(
            f"{setting}={context} is above {original}, from which on the checkpoint's dynamic rotary embeddings depend "
            f"on the length of a sequence ({key}, {folder / CONFIG_FILE}): logprobs of longer sequences, and those in "
            f"one row with them, differ from the engines'. Use {setting}={original} or less.",
            key,
        )


def _check_vocabulary(config: RunConfig, key: str, folder: Path) -> Iterator[Finding]:
    """Check that every id of the tokenizer has an embedding."""
    try:
        ids = _token_ids(str(folder))
    except ValueError as problem:
        yield error(f"{key}={config.model.path}: {problem}")
        return
    largest = max(ids, key=ids.__getitem__, default=None)
    if largest is not None and ids[largest] >= config.model.shape.vocab_size:
        yield error(
            f"{key}={config.model.path}: token {largest!r} has the id {ids[largest]} in {folder / _TOKENIZER_FILE}, "
            f"but config.json has vocab_size={config.model.shape.vocab_size}: it has no embedding. Use the tokenizer "
            "of this model, or resize its embeddings.",
            key,
        )


def _check_support(config: RunConfig, command: Command, key: str, folder: Path) -> Iterator[Finding]:
    """Ask transformers whether the trainer can train the model, and vLLM whether the engines can serve it."""
    asked: list[Question] = []
    for view in config.rollout_views:
        question = _support_question(view, command, folder)
        is_served = question.engine_dtype is not None or question.has_torch_engine
        if question not in asked and (question.attention is not None or is_served):
            asked.append(question)
            yield from _answers(f"{key}={config.model.path}", question, config, key.removesuffix(".path"))


def _ask_about(
    config: RunConfig, what: str, folder: Path, role: Literal["frozen", "value", "reward"]
) -> Iterator[Finding]:
    """Ask transformers whether a model that no engine serves can have its role; `what` names it in the answers.

    The trainer asks for the form of a model beside the policy itself.
    """
    question = _support_question(config, "rm", folder)._replace(role=role)
    yield from _answers(what, question if role == "frozen" else question._replace(load={}))


def _answers(
    what: str, question: Question, config: RunConfig | None = None, section: str = "model"
) -> Iterator[Finding]:
    """What the libraries say; of a trained model also its form, for the keys of `section`.

    Without an answer a model is trained in the form that computes every causal model, and no torch engine serves it:
    faster forms, and that engine, would compute some models wrongly, and say nothing.
    """
    is_trained = config is not None and question.attention is not None
    try:
        problems, form, dtype = ask(question)
    except RuntimeError as failure:
        said = f"{what}: whether it is supported could not be checked: {failure}."
        if question.has_torch_engine:
            yield error(
                f"{said} rollout.engine.type=torch computes some models wrongly. Run it again, or use "
                "rollout/engine=vllm.",
                *("rollout", "weights", "cluster"),
            )
            return
        yield warning(said, "rollout")
        if config is not None and is_trained:
            yield from _form_findings(what, _EVERY_MODEL, config, section, question.role, is_asked=False)
        return
    needs_another = dtype is not None and dtype != question.engine_dtype
    fits = [Fit(f"{section}.dtype", dtype, "the engine computes this model in no other")] if needs_another else []
    for problem in problems:
        yield error(f"{what}: {problem.rstrip('.')}.", *("rollout", "weights", "cluster"), fits=fits)
    if form is not None and config is not None:
        yield from _form_findings(what, form, config, section, question.role)


def _form_findings(
    what: str, form: ModelForm, config: RunConfig, section: str, role: ModelRole, *, is_asked: bool = True
) -> Iterator[Finding]:
    """Take the form that a tiny instance has asked for, or that computes every model, where the user has not chosen.

    Args:
        what: The model, in the findings.
        form: It is to be computed in.
        config: Of the run.
        section: `model` or `partner.model`.
        role: Of the model; only policies have the head that is chosen.
        is_asked: Whether a tiny instance was asked.
    """
    model, why = config.model, "; ".join(form.because) or "of what computes it, this is the fastest"
    source = f"a tiny instance was asked: {why}" if is_asked else why
    chosen = {"rows": form.rows, "head": form.head, "attention": form.attention}
    if role == "value":
        del chosen["head"]
    slow = {"rows": "padded", "head": "model", "attention": "eager"}
    for name, value in chosen.items():
        key, now = f"{section}.{name}", getattr(model, name)
        if now == value or (now == slow[name] and name != "attention"):
            continue  # the slower one computes it too
        if not is_asked and config.is_typed(key):
            yield warning(f"{key}={now} was chosen; {key}={value} computes every model, but {why}.")
            continue
        said = f"{key}={now} {'does' if is_asked else 'may'} not compute {what}: {why}"
        if config.is_typed(key) and name != "attention":
            yield warning(f"{said}. It was chosen, so logprobs will be wrong. Leave it unset for {key}={value}.")
        else:
            yield error(f"{said}. Use {key}={value}.", fits=[Fit(key, value, source)])
    routing = ""
    if config.model.shape.num_experts:
        if form.routing != "replay" and config.algorithm.routing == "replay":
            of_routers = "its routers do not choose by a plain top-k" if is_asked else why
            said = f"algorithm.routing=replay: the experts of {what} cannot be replayed, since {of_routers}"
            fit = Fit("algorithm.routing", "current", f"a tiny instance was asked: {of_routers}" if is_asked else why)
            yield error(f"{said}. Use algorithm.routing=current.", fits=[fit])
        routing = f", {'replayed' if form.routing == config.algorithm.routing == 'replay' else 'current'} experts"
    if is_asked:
        path = f"{form.rows} rows, {form.head} head, {form.attention} attention{routing}"
        yield note(f"{what}: {path}, asked of a tiny instance.")


def _support_question(config: RunConfig, command: Command, folder: Path) -> Question:
    has_engines, engine = command not in WITHOUT_ENGINES, config.rollout.engine
    is_gpu = config.cluster.pools[config.cluster.rollout_pool].device == "gpu"
    is_vllm = has_engines and isinstance(engine, VllmEngineConfig)
    return Question(
        folder=str(folder),
        attention=config.model.attention if command in ("train", *WITHOUT_ENGINES) else None,
        engine_dtype=config.model.dtype if is_vllm else None,
        tp_size=engine.tensor_parallel_size,
        context=config.model.max_context_tokens,
        is_traced=config.weights.transport != "gather",
        device=engine_device(config),
        load=config.model.load,
        device_is_here=is_gpu == (hardware.has_nvidia_driver() and not hardware.is_cpu_build()),
        has_torch_engine=has_engines and not is_vllm,
    )


def engine_device(config: RunConfig) -> Literal["cpu", "cuda"]:
    """That of the engines, where this machine has it: what vLLM can be asked about here."""
    is_gpu = config.cluster.pools[config.cluster.rollout_pool].device == "gpu"
    return "cuda" if is_gpu and hardware.has_nvidia_driver() else "cpu"


def check_tokenizer(config: RunConfig, key: str, path: str) -> Iterator[Finding]:
    """Check that every token has the same id in both tokenizers, if both models are here and have one."""
    try:
        ours, theirs = _token_ids(config.model.path), _token_ids(path)
    except ValueError as problem:
        yield error(f"{key}={path}: {problem}", "model.path")
        return
    if not ours or not theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        example = differing[0]
        yield error(
            f"{key}={path}: {len(differing)} of {len(ours | theirs)} tokens have a different id than in the policy's "
            f"tokenizer, e.g. {example!r} {theirs.get(example, 'none')} instead of {ours.get(example, 'none')}: it "
            "would misread the policy's tokens. Use a model with the policy's tokenizer.",
            "model.path",
        )


def _token_ids(path: str | None) -> dict[str, int]:
    """Token -> id from the `tokenizer.json` of a model; empty if it is missing or has another form.

    Raises:
        ValueError: If the file cannot be read.
    """
    folder = None if path is None else model_folder(path)
    file = Path() if folder is None else folder / _TOKENIZER_FILE
    if folder is None or not file.exists():
        return {}
    tokenizer = read_json_object(file)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    words: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, list):  # Unigram: pairs of token and score
        words = {str(pair[0]): index for index, pair in enumerate(words) if isinstance(pair, list) and pair}
    ids = {token: index for token, index in (words or {}).items() if isinstance(index, int)}
    for one in added if isinstance(added, list) else ():
        if isinstance(one, dict) and isinstance(one.get("id"), int):
            ids[str(one.get("content"))] = one["id"]
    return ids


def check_expert_plan(config: RunConfig, key: str, folder: Path) -> Iterator[Finding]:
    """Check that transformers has a plan by which the experts of this model stay on their ranks."""
    if not (config.trainer.expert_parallel and config.model.shape.num_experts):
        return
    try:
        model = model_without_memory(transformers_config(folder / CONFIG_FILE))
    except Exception:  # noqa: BLE001 - each model refuses in its own way, and the trainer is asked for the reason
        return
    try:
        modules_of_experts(model)
    except ConfigError as refused:
        for message in refused.violations:
            yield error(message, key)


def check_lora_targets(config: RunConfig, key: str, folder: Path) -> Iterator[Finding]:
    """Check that LoRA targets are linear layers, or weights of experts, of the model that transformers builds."""
    if config.trainer.lora is None:
        return
    try:
        model = model_without_memory(transformers_config(folder / CONFIG_FILE))
        linear, experts = linear_layers(model), expert_weights(model)
    except Exception:  # noqa: BLE001 - each model refuses in its own way, and the trainer is asked for the reason
        return
    kinds = sorted({layer.rpartition(".")[2] for layer in linear})
    layers = [*linear, *(name for name in experts if config.trainer.lora.adapts_experts(name))]
    for message in unmatched_targets(layers, config.trainer.lora.targets) if linear else ():
        fits = [Fit("trainer.lora.targets", kinds, "the linear layers of this model")] if key == "model.path" else []
        yield error(message, key, fits=fits)
