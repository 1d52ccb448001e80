"""The first hour of a stranger: own model, rows and reward; train, look, kill, resume, export, serve. By commands only.

Each command is one that the documents show, with keys that they name, and what it prints is checked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.chat_tokenizers import chat_tokenizer
from tests.command_line import ENVIRONMENT, PENSTOCK, read_summary, run_cli
from tests.tiny_policy import tiny_shape

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
AFTER_TRAINING = ROOT / "docs" / "guides" / "after-training.md"
DOCUMENTS = "\n".join(
    path.read_text()
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
)
STEPS, KILLED_AFTER = 40, 6
REWARD = '''
def score(trajectory, answer, **_):
    """Right if it names the next number; a little for every digit, so that a policy that knows nothing can begin."""
    said = trajectory.response
    return {"right": float(answer in said.split()), "digits": 0.2 * sum(map(str.isdigit, said)) / max(1, len(said))}
'''
OWN_TASKS = [
    "experiment=text",
    "model.path=my-model",
    "env=dataset",
    "env.args.path=train.jsonl",
    "env.args.held_out=validation.jsonl",
    "env.args.chat=true",
    "reward.fn=my_reward:score",
    "evaluation.num_tasks=20",
]
RUN = [*OWN_TASKS, "name=walk", f"total_steps={STEPS}", "checkpoint.every_steps=2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the stranger has: a model folder with a BPE tokenizer and a chat template, rows, and a reward."""
    tokenizer = chat_tokenizer("chatml")
    shape = tiny_shape(vocab_size=len(tokenizer), hidden_size=64, head_dim=32)
    create_policy(ModelConfig(max_context_tokens=1024, shape=shape), tokenizer, str(tmp_path / "my-model"), seed=0)
    for name, numbers in {"train": range(200), "validation": range(200, 240)}.items():
        rows = [{"prompt": f"Which number follows {n}?", "answer": f"{n + 1}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


def undocumented(words: list[str]) -> list[str]:
    """What of a command no document shows: the command itself, its options, its keys."""
    command = " ".join(words[:2] if words[0] == "env" else words[:1])
    options = [word for word in words if word.startswith("--")]
    keys = [word.partition("=")[0] for word in words if "=" in word]
    return [
        *(shown for shown in (f"penstock {command}", *options) if shown not in DOCUMENTS),
        *(key for key in keys if not re.search(rf"(?<![\w.]){re.escape(key)}[=`]", DOCUMENTS)),
    ]


def penstock(folder: Path, *words: str, timeout_s: float = 300) -> str:
    """What a command prints, on both streams; it is one of the documents, and succeeds without a traceback."""
    assert undocumented(list(words)) == []
    done = run_cli(*words, cwd=folder, timeout_s=timeout_s)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "Traceback" not in printed
    return printed


def wait_until(happened: Callable[[], object], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what()}"
        time.sleep(0.2)


@contextmanager
def started(
    words: list[str], folder: Path, log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, whose output goes to `log`; it and its children are gone afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        children = family(process)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        for child in psutil.wait_procs(children, timeout=30)[1]:
            child.kill()


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_a_command_that_no_document_shows_is_found() -> None:
    assert undocumented(["train", *RUN, "--dry-run"]) == []
    assert undocumented(["train", "trainer.no_such_key=1"]) == ["trainer.no_such_key"]
    assert undocumented(["env", "chek", "--rewad"]) == ["penstock env chek", "--rewad"]


def test_a_stranger_gets_from_own_rows_to_a_served_policy_by_the_documents_alone(folder: Path) -> None:
    check_rows_and_reward(folder)
    train_kill_look_and_resume(folder)
    export_measure_and_generate(folder)
    serve(folder)


def check_rows_and_reward(folder: Path) -> None:
    rows = ["path=train.jsonl", "held_out=validation.jsonl", "chat=true"]
    checked = penstock(folder, "env", "check", "dataset", *rows, "--reward", "my_reward:score")
    assert "no check failed" in checked
    assert "garbage for task 8 of 8" in checked, "it says what it is doing"

    planned = penstock(folder, "train", *RUN, "--dry-run")
    assert "dry run: nothing was started." in planned
    assert "vocab_size: 322" in planned, "read from config.json of the model"
    assert (
        len(re.findall(r"reward\.fn=my_reward:score: rows/\d+ answered with 'I do not know\.': reward 0", planned)) == 2
    )
    assert not (folder / "runs").exists()


def train_kill_look_and_resume(folder: Path) -> None:
    run_dir, log = folder / "runs" / "walk", folder / "train.log"
    with started([PENSTOCK, "train", *RUN], folder, log, ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}) as driver:
        wait_until(
            lambda: f" {KILLED_AFTER}/{STEPS} " in log.read_text() or driver.poll() is not None, 240, log.read_text
        )
        assert driver.poll() is None, log.read_text()
        children = family(driver)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(30)
    printed = log.read_text()
    assert "Traceback" not in printed
    assert "penstock · walk" in printed
    assert re.search(r"eval at v0: .*mean reward 0\.\d+.* on 20 held-out tasks", printed)

    # The transcripts of a run that has died: the files, and the page.
    tables = sorted((run_dir / "trajectories").glob("step_*.parquet"))
    rows = [row for table in tables for row in pq.read_table(table).to_pylist()]
    assert {row["step"] for row in rows} >= set(range(1, KILLED_AFTER))
    assert all("Which number follows" in str(row) for row in rows)
    assert len({row["reward"] for row in rows}) > 1
    assert "runs/walk/report.html" in penstock(folder, "report", "runs/walk")
    assert (run_dir / "report.html").stat().st_size > 10_000

    saved = penstock(folder, "checkpoints", "runs/walk")
    steps = [int(step) for step in re.findall(r"step +(\d+) .*  complete$", saved, re.MULTILINE)]
    assert steps, saved

    resumed = penstock(folder, "resume", "runs/walk", timeout_s=400)
    assert re.search(rf"continuing \S+/runs/walk from the checkpoint of step {steps[-1]}\b", resumed)
    assert f"completed · {STEPS} steps in " in resumed
    balance = re.search(r"admitted (\d+) = trained (\d+) \+ dropped 0 \+ filtered 0 \+ failed 0 \+ live 0", resumed)
    assert balance is not None, resumed
    assert balance[1] == balance[2] == str(4 * STEPS)
    assert read_summary(run_dir)["status"] == "completed"
    tables = sorted((run_dir / "trajectories").glob("step_*.parquet"))
    assert [int(table.stem.removeprefix("step_")) for table in tables] == list(range(1, STEPS + 1))
    assert "runs/walk/report.html" in resumed
    # Two agents of Ray take more than a minute to notice that the node they served is gone.
    assert psutil.wait_procs(children, timeout=180)[1] == [], "nothing of the killed run stays behind"


def export_measure_and_generate(folder: Path) -> None:
    exported = penstock(folder, "export", "runs/walk", "--to", "exported")
    assert f"policy of step {STEPS} written to exported" in exported
    assert f"| steps | {STEPS} of {STEPS} |" in (folder / "exported" / "README.md").read_text()
    tasks = [word for word in OWN_TASKS if not word.startswith("model.path=")]
    measured = penstock(folder, "eval", *tasks, "model.path=exported")
    found = json.loads(next(line for line in reversed(measured.splitlines()) if line.startswith("{")))
    assert 0.0 <= found["accuracy"] <= 1.0

    # With transformers: the code of the guide, as it is.
    (code,) = re.findall(r"^```python\n(.*?)^```", AFTER_TRAINING.read_text(), re.MULTILINE | re.DOTALL)
    generated = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert generated.returncode == 0, generated.stderr
    assert len(generated.stdout) > len("1+2=\n")


def serve(folder: Path) -> None:
    """By the command of the guide for vLLM's CPU build."""
    line = r"^VLLM_CPU_KVCACHE_SPACE=1 python (-m vllm\.entrypoints\.openai\.api_server .*)$"
    (arguments,) = re.findall(line, AFTER_TRAINING.read_text(), re.MULTILINE)
    port, log = free_port(), folder / "serve.log"
    address = f"http://127.0.0.1:{port}"
    words = [sys.executable, *arguments.split(), "--host", "127.0.0.1", "--port", str(port)]
    environment = ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with started(words, folder, log, environment) as server:
        wait_until(lambda: answers(f"{address}/health") or server.poll() is not None, 400, log.read_text)
        assert server.poll() is None, log.read_text()
        question = {"model": "my-model", "messages": [{"role": "user", "content": "Which number follows 7?"}]}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(question | {"max_tokens": 16, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.loads(response.read())
    assert answer["model"] == "my-model"
    assert answer["usage"]["completion_tokens"] > 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
