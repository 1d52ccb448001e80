"""64 agent programs at a time, of which one in ten hangs, crashes, floods or vanishes: a real run of the command."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.chat_tokenizers import chat_tokenizer
from tests.command_line import read_metric, read_summary
from tests.small_run import small_run_overrides, train_by_command

pytestmark = [pytest.mark.integration, pytest.mark.full]
MARK = "86398.25"
"""Seconds that processes of this test sleep: their command lines tell them from all others."""
NUM_FAULTY_IN_TEN = 1
AGENT = f"""
import http.client, json, os, random, signal, subprocess, sys, time

def ask(messages, is_stream=False):
    address = os.environ["OPENAI_BASE_URL"].split("/")[2]
    # A limit of its own, so that no answer counts as cut off by ours, after which an error would not be a fault.
    body = {{"model": "policy", "messages": messages, "stream": is_stream, "max_tokens": 8}}
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body),
                       {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
    response = connection.getresponse()
    if is_stream:
        response.read(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return json.load(response)["choices"][0]["message"]

messages = [{{"role": "user", "content": sys.argv[1]}}]
fault = random.choice(["hangs", "crashes", "floods", "vanishes"]) if random.random() < {NUM_FAULTY_IN_TEN} / 10 else ""
if fault:
    with open("faults.txt", "a") as file: file.write(fault + "\\n")
    subprocess.Popen(["sleep", "{MARK}"], start_new_session=True)
messages += [ask(messages, fault == "vanishes"), {{"role": "user", "content": "And again?"}}]
if fault == "hangs": time.sleep({MARK})
if fault == "crashes": raise SystemExit(3)
while fault == "floods": sys.stdout.write("x" * 65536)
ask(messages)
print(0.5)
"""


def sleeping() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if MARK.encode() in words:
            found.append(path.parent.name)
    return found


def test_a_run_of_64_agents_with_faults_ends_balanced_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    overrides = [
        "env=agent",
        "reward=episode",
        "env.args.tasks=arithmetic",
        f'env.args.agent=[{sys.executable},-S,-E,agent.py,"{{prompt}}"]',
        "env.episode.timeout_s=8",
        "dataflow.batch_groups=8",
        "dataflow.group_size=8",
        "total_steps=4",
    ]
    train_by_command(tmp_path, small_run_overrides(tmp_path, "faulty", chat_tokenizer("chatml"), *overrides))
    run_dir = tmp_path / "runs" / "faulty"
    ledger = read_summary(run_dir)["ledger"]
    assert {**ledger, "admitted": 0} == {**dict.fromkeys(ledger, 0), "trained": 4 * 8}, "failed attempts are repeated"
    assert len((tmp_path / "faults.txt").read_text().split()) > 4
    assert read_metric(run_dir, "reward/mean") == [0.5] * 4
    until = time.monotonic() + 20
    while sleeping() and time.monotonic() < until:
        time.sleep(0.1)
    assert not sleeping()
