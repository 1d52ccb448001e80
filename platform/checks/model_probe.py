"""Asks libraries and the torch engine what they support: `python -m penstock.platform.checks.model_probe`.

vLLM takes seconds to import, and must be imported in the environment of an engine, so this is a process of its own.
Answers are kept in the user's cache, by a hash of the question, of the model's config and the names and shapes of its
tensors, of all versions, and of the code that asks. Refusals are not: what was missing may be there the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.dataflow.errors import ConfigError
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.weights.hf_folder import CONFIG_FILE, shape_of, transformers_config, weight_files
from penstock.weights.kept_answers import digest_of, keep, kept
from penstock.weights.model_config import Attention, DType, ModelForm

TIMEOUT_S = 120.0
_MARK = "penstock answer: "
"""Begins the line of the answer; libraries print what they like around it."""
_KIND = "model_answers"


class SettingsQuestion(NamedTuple):
    """What is asked about settings that are passed on."""

    library: Literal["vllm", "deepspeed"]
    """That they are passed on to."""
    settings: dict[str, Any]
    """`rollout.engine.args` or `trainer.deepspeed`."""
    device: Literal["cpu", "cuda"]
    """It is asked for."""


class Question(NamedTuple):
    """What is asked about a checkpoint."""

    folder: str
    """Hugging Face directory."""
    attention: Attention | None
    """`model.attention` if the trainer's code computes with it; None: it is only served."""
    engine_dtype: DType | None
    """`model.dtype` if vLLM serves it; None: it does not."""
    tp_size: int
    """Tensor-parallel ranks of an engine."""
    context: int
    """`model.max_context_tokens`."""
    is_traced: bool
    """Whether the layout in the engine must be known."""
    device: Literal["cpu", "cuda"]
    """Of the engines."""
    device_is_here: bool
    """Whether this machine has such a device."""
    role: Literal["policy", "frozen", "value", "reward"] = "policy"
    """What the run does with it, other than serving it."""
    load: Mapping[str, Any] = {}
    """`model.load`."""
    has_torch_engine: bool = False
    """Whether the torch engine serves it."""


class Answer(NamedTuple):
    """What a library says."""

    problems: Sequence[str]
    """Why the checkpoint cannot be trained, scored with or served, or what is wrong with settings."""
    form: ModelForm | None = None
    """How the trainer's code computes the model; None: it was not asked, or has no answer."""
    dtype: DType | None = None
    """The only one in which the engine computes it, if there are problems; None: any."""


def ask(question: Question | SettingsQuestion) -> Answer:
    """Ask a library; an answer without problems is kept, or one that names the dtype that has none.

    Raises:
        RuntimeError: If there is no answer: the process failed or took longer than `TIMEOUT_S`.
    """
    folder = question.folder if isinstance(question, Question) else None
    digest = _key(question, folder)
    if (stored := kept(_KIND, digest)) is not None:
        found = _answer(stored)
        return found._replace(problems=[one.replace("{folder}", folder or "{folder}") for one in found.problems])
    answer = _asked_once(type(question).__name__, json.dumps(question), digest)
    if isinstance(answer, RuntimeError):
        raise answer
    is_accident = answer.form is not None and answer.form.is_accident
    if not is_accident and (not answer.problems or answer.dtype is not None):
        problems = [one.replace(folder, "{folder}") if folder else one for one in answer.problems]
        keep(_KIND, digest, answer._replace(problems=problems))
    return answer


@cache
def _asked_once(kind: str, asked: str, _digest: str) -> Answer | RuntimeError:
    """The answer of a child, or why there is none: a check is repeated while defaults give way."""
    try:
        return _ask_child(_question(kind, asked))
    except RuntimeError as failure:
        return failure


def _question(kind: str, asked: str) -> Question | SettingsQuestion:
    given = json.loads(asked)
    return SettingsQuestion(*given) if kind == SettingsQuestion.__name__ else Question(*given)


def _answer(stored: Sequence[Any]) -> Answer:
    problems, form, dtype = stored
    if form is not None:
        rows, head, attention, because, *others = form
        form = ModelForm(rows, head, attention, tuple(because), *others)
    return Answer(problems, form, dtype)


def _ask_child(question: Question | SettingsQuestion) -> Answer:
    environment = os.environ | vllm_environment(question.device, threads=1) | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", __name__, type(question).__name__]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(question),
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no answer within {TIMEOUT_S:g} s") from error
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return _answer(json.loads(line.removeprefix(_MARK)))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise RuntimeError(f"exit code {done.returncode}: {last:.300}")


def _key(question: Question | SettingsQuestion, where: str | None) -> str:
    """Hash of everything that the answer depends on, but not of where the folder is."""
    digest = hashlib.sha256(digest_of([one for one in question if one is not where]).encode())
    if where is None:
        return digest.hexdigest()
    folder = Path(where)
    digest.update((folder / CONFIG_FILE).read_bytes())
    for file in weight_files(folder):
        with file.open("rb") as stream:
            digest.update(file.name.encode())
            digest.update(stream.read(int.from_bytes(stream.read(8), "little")))
    return digest.hexdigest()


def main() -> None:
    """Answer the question on stdin with a line on stdout."""
    asked = _question(sys.argv[1], sys.stdin.read())
    answer = Answer(_of_settings(asked)) if isinstance(asked, SettingsQuestion) else answer_about(asked)
    print(_MARK + json.dumps(answer), flush=True)


def _of_settings(question: SettingsQuestion) -> list[str]:
    if question.library == "vllm":
        from penstock.rollout.engines.vllm import arguments

        return arguments.problems(question.settings)
    from penstock.trainer.backends import deepspeed_settings

    return deepspeed_settings.problems(question.settings)


def answer_about(question: Question) -> Answer:
    """What the libraries and the torch engine say about a checkpoint, asked in this process."""
    folder = Path(question.folder)
    problems: list[str] = []
    form, dtype = None, None
    if question.attention is not None:
        from penstock.trainer import model_support

        problems += model_support.unsupported(folder, question.role, question.load)
        if question.role != "reward" and not problems:
            try:
                form = model_support.form_of(folder, question.attention)
            except ConfigError as error:
                problems += error.violations
    if question.has_torch_engine and not problems:
        problems += _of_torch_engine(folder, question.context)
    if question.engine_dtype is not None and not problems:
        from penstock.rollout.engines.vllm import support as engine_support

        served = (folder, question.engine_dtype, question.tp_size, question.context)
        problems += engine_support.unsupported(
            *served, is_traced=question.is_traced, device_is_here=question.device_is_here
        )
        dtype = engine_support.only_dtype(*served) if problems and question.device_is_here else None
    return Answer(problems, form, dtype)


def _of_torch_engine(folder: Path, context: int) -> list[str]:
    """Why the torch engine cannot serve the class of a checkpoint, asked of a tiny instance; empty if it can."""
    from penstock.rollout.engines.torch import support
    from penstock.trainer.models.tiny_instance import tiny_config, tiny_model

    hf_config = transformers_config(folder / CONFIG_FILE)
    where, instead = "rollout.engine.type=torch does not compute this model", "Use rollout/engine=vllm"
    for is_narrow in (True, False):
        try:
            config = tiny_config(hf_config, is_narrow=is_narrow, context=context)
            shape, whole = shape_of(config, folder / CONFIG_FILE), tiny_model(config, "eager", "cpu")
        except Exception as error:  # noqa: BLE001 - every class refuses other sizes in its own way
            reason = f"no tiny instance of it can be built to ask ({type(error).__name__}: {error!s:.200})"
            continue
        try:
            served = tiny_model(config, support.ATTENTION, "cpu")
        except Exception as error:  # noqa: BLE001 - a class refuses an attention in its own way
            return [f"{where}: it refuses {support.ATTENTION} attention ({error!s:.200}). {instead}"]
        return [f"{where}: {reason}. {instead}" for reason in support.unsupported(served, whole, shape)]
    return [f"{where}: {reason}. {instead}"]


if __name__ == "__main__":
    main()
