"""Agent programs as they are, unpatched, against the recording endpoint: what is answered, recorded and trained.

    python benchmarks/agent_programs.py [PROGRAM ...]     # all: 10 minutes, the first time more; npm has to be there

Each is installed in an environment of its own (.bench/agents/NAME). The policy is a script that looks at the tools that
a request offers: a call, another call, then the end; a request without tools gets a title. So this shows requests,
answers and recorded tokens, not learning. Checked for every program: it ends by itself with exit code 0, no request was
refused, and every sampled token of a trained thread carries loss exactly once, after exactly the tokens that the engine
was given for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alone import BENCH, ROOT, make_environment
from openai import AsyncOpenAI
from provenance import provenance

sys.path.insert(0, str(ROOT))
from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.trajectory import Trajectory
from tests.agents import ReplyingEngine, run_agent

SCRIPTS = Path(__file__).with_name("agent_scripts")
TASK = "Make a file that says hello, then show it. And what is 17+25?"
CALLS: dict[str, list[dict[str, Any]]] = {
    "add": [{"a": 17, "b": 25}, {"a": 42, "b": 1}],
    "bash": [{"command": "echo hello > a.txt", "description": "make"}, {"command": "cat a.txt", "description": "show"}],
    "Bash": [{"command": "echo hello > a.txt", "description": "make"}, {"command": "cat a.txt", "description": "show"}],
    "run_shell_command": [
        {"command": "echo hello > a.txt", "is_background": False, "description": "make"},
        {"command": "cat a.txt", "is_background": False, "description": "show"},
    ],
    "exec_command": [{"cmd": "echo hello > a.txt"}, {"cmd": "cat a.txt"}],
    "shell": [{"command": ["bash", "-lc", "echo hello > a.txt"]}, {"command": ["bash", "-lc", "cat a.txt"]}],
    "transfer_to_calculator": [{}, {}],
}
"""Tool -> arguments of the first and the second call."""
SUBMIT = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}


@dataclass(frozen=True)
class Program:
    """How a program is installed and started.

    Attributes:
        packages: Of PyPI, or of npm where `npm` is set.
        words: Its command; `{bin}` is the folder of its programs, `{task}` the task.
        files: Files in its home folder.
        last: The script's last answer.
        ignore: `env.endpoint.ignore`.
    """

    packages: tuple[str, ...]
    words: tuple[str, ...]
    npm: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    last: str = "All done: 42."
    ignore: tuple[str, ...] = ()


def script(file: str, *words: str) -> tuple[str, ...]:
    return "{bin}/python", str(SCRIPTS / file), "{task}", *words


CODEX = {"name": '"penstock"', "env_key": '"OPENAI_API_KEY"', "wire_api": '"responses"', "base_url": '"{base_url}"'}
OPENCODE = {
    "provider": {
        "penstock": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base_url}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {"limit": {"context": 200_000, "output": 8000}}},
        }
    }
}
PROGRAMS = {
    "openai chat": Program(("openai",), script("openai_chat.py")),
    "openai responses": Program(("openai",), script("openai_responses.py")),
    "anthropic": Program(("anthropic",), script("anthropic_messages.py")),
    "openai-agents responses": Program(("openai-agents",), script("openai_agents.py", "responses")),
    "openai-agents chat": Program(("openai-agents",), script("openai_agents.py", "chat_completions")),
    "mini-swe-agent": Program(
        ("mini-swe-agent",),
        ("{bin}/mini", "-t", "{task}", "-m", "openai/policy", "-y", "--exit-immediately", "-o", "out.json"),
        variables={"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true"},
        last=f"STEP-3.\n<tool_call>\n{json.dumps({'name': 'bash', 'arguments': SUBMIT})}\n</tool_call>",
    ),
    "smolagents code": Program(
        ("smolagents[openai]",),
        script("smolagents_code.py", "code"),
        last="Thought: STEP-3.\n<code>\nfinal_answer(42)\n</code>",
    ),
    "smolagents tools": Program(
        ("smolagents[openai]",),
        script("smolagents_code.py", "tools"),
        last='STEP-3.\n<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>',
        ignore=("tool_choice",),
    ),
    "qwen-agent": Program(("qwen-agent", "python-dateutil", "soundfile", "tqdm"), script("qwen_agent_chat.py")),
    "qwen-code": Program(
        ("@qwen-code/qwen-code",),
        ("{bin}/qwen", "--auth-type", "openai", "-m", "policy", "--yolo", "-p", "{task}"),
        npm=True,
    ),
    "opencode": Program(
        ("opencode-ai",),
        ("{bin}/opencode", "run", "-m", "penstock/policy", "{task}"),
        npm=True,
        files={"opencode.json": json.dumps(OPENCODE)},
    ),
    "codex": Program(
        ("@openai/codex",),
        (
            "{bin}/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            "-c", 'model="policy"', "-c", 'model_provider="penstock"',
            *(word for key, value in CODEX.items() for word in ("-c", f"model_providers.penstock.{key}={value}")),
            "{task}",
        ),
        npm=True,
    ),
    "claude-code": Program(
        ("@anthropic-ai/claude-code",),
        ("{bin}/claude", "-p", "{task}", "--dangerously-skip-permissions"),
        npm=True,
        variables={"IS_SANDBOX": "1"},
        ignore=("response_format",),  # of its title
    ),
}  # fmt: skip


def installed(program: Program) -> tuple[Path, str]:
    """The folder of its programs, and its version."""
    folder = BENCH / "agents" / program.packages[0].strip("@").replace("/", "-").partition("[")[0]
    if not program.npm:
        python = make_environment(folder, list(program.packages))
        listed = subprocess.run(
            [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True, timeout=60
        )
        versions = {one["name"].lower(): one["version"] for one in json.loads(listed.stdout)}
        return python.parent, versions[program.packages[0].partition("[")[0]]
    if not folder.exists():
        subprocess.run(["npm", "install", "--prefix", folder, *program.packages], check=True, timeout=600)
    manifest = folder / "node_modules" / program.packages[0] / "package.json"
    return folder / "node_modules" / ".bin", json.loads(manifest.read_text())["version"]


def scripted(program: Program) -> ReplyingEngine:
    """The policy. It knows how far it is by the marks of its own answers in the history."""

    def reply(context: str) -> str:
        stage = len(set(re.findall(r"STEP-(\d)", context)))
        offered = [name for name in CALLS if re.search(rf'"name": ?"{name}"', context)]
        if "<code>" in context and not offered and stage < 2:  # an agent that writes code
            return f"Thought: STEP-{stage + 1}.\n<code>\nr = add(17, 25)\nprint(r)\n</code>"
        if not offered and "<code>" not in context:
            return "A title"
        if stage >= 2:
            return program.last
        call = {"name": offered[0], "arguments": CALLS[offered[0]][stage]}
        return f"STEP-{stage + 1}. I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return ReplyingEngine(reply)


async def run_program(program: Program, folder: Path, client: AsyncOpenAI, home: Path) -> str:
    """Run it to its end.

    Raises:
        TrajectoryError: If it fails or takes too long.
    """
    base_url, work = str(client.base_url).rstrip("/"), home / "work"
    for name, text in program.files.items():
        (work / name).write_text(text.replace("{base_url}", base_url))
    words = [one.replace("{bin}", str(folder)).replace("{task}", TASK) for one in program.words]
    process = await asyncio.create_subprocess_exec(
        *(one.replace("{base_url}", base_url) for one in words),
        cwd=work,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "HOME": str(home),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": client.api_key,
            "ANTHROPIC_MODEL": "policy",
            **program.variables,
        },
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    except TimeoutError:
        raise TrajectoryError("env", "took longer than 120 s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    said = out.decode(errors="replace").strip()
    if process.returncode:
        raise TrajectoryError("env", f"exit code {process.returncode}: {said[-1500:]}")
    return said


def check_tokens(engine: ReplyingEngine, trajectory: Trajectory) -> None:
    """Every sampled token with loss is in exactly one place, after the tokens of its request."""
    parts, num_with_loss = trajectory.split_threads(), 0
    # A program that asks the same twice gets the same answer from a script.
    served = Counter((prompt, tuple(sampled)) for _, prompt, sampled in engine.served)
    for (prompt, sampled), count in served.items():
        whole = [*prompt, *sampled]
        found = [one for one in parts if one.token_ids[: len(whole)].tolist() == whole]
        with_loss = [one for one in found if one.loss_mask[len(prompt) : len(whole)].all()]
        assert len(with_loss) in (0, count)
        num_with_loss += len(sampled) * len(with_loss)
    assert num_with_loss == int(trajectory.loss_mask.sum()), "and no other token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", help=", ".join(PROGRAMS))
    chosen = parser.parse_args().programs or list(PROGRAMS)
    BENCH.mkdir(exist_ok=True)
    rows, failed = [], []
    for name in chosen:
        program = PROGRAMS[name]
        if program.npm and shutil.which("npm") is None:
            print(f"{name}: there is no npm", file=sys.stderr)
            continue
        folder, version = installed(program)
        engine, said, started = scripted(program), "", time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            (Path(home) / "work").mkdir()
            subprocess.run(["git", "init", "-q", Path(home) / "work"], check=True, timeout=20)

            async def play(client: AsyncOpenAI) -> Any:
                nonlocal said
                said = await run_program(program, folder, client, Path(home))  # noqa: B023
                return {"done": True, "reward": 1.0}

            try:
                limits = {"max_turns": 40, "max_tokens": 400_000, "max_new_tokens": 4000, "timeout_s": 130.0}
                trajectory = asyncio.run(run_agent(play, engine, ignore=program.ignore, **limits))
            except TrajectoryError as error:
                failed.append(name)
                print(f"{name} {version}: {error}", file=sys.stderr)
                continue
        check_tokens(engine, trajectory)
        episode = trajectory.episode
        assert episode is not None
        counts = episode.counts
        refused = int(counts.get("refused", 0))
        failed += [name] * bool(refused)
        rows.append(
            f"| {name} | {version} | {int(counts['requests'])} | {refused} | {len(episode.turns)} in "
            f"{len(trajectory.split_threads())} | {len(episode.side_turns)} | {trajectory.num_sampled_tokens} | "
            f"{time.monotonic() - started:.1f} |"
        )
        print(rows[-1], repr(said[-60:]), flush=True)
    print(*provenance(), sep="\n")
    print("| program | version | requests | refused | trained turns in threads | other turns | tokens with loss | s |")
    print("|---|---|---|---|---|---|---|---|", *rows, sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
