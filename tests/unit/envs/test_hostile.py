"""The hostile table: after any act of a reward or a sandboxed program the run continues and the cause is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program
from penstock.envs.sandbox.hostile import HostileCase, Trap, Verdict, lay_trap, survives, try_all
from penstock.envs.sandbox.local import Isolation, LocalSandbox
from penstock.envs.workers.process_tree import descendants
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import pair
from tests.hostile_acts import ACTS, FINE, HostileAct, says
from tests.hostile_play import EPISODES, REWARDS, STRICT, Played, no_process_left, play_steps_and_tools
from tests.hostile_programs import PROGRAMS
from tests.hostile_reaches import REACHES, lay_outside

CONFIG = SandboxConfig(allow_unisolated=True, max_concurrency=2)
NOT_CONTAINED_WITHOUT_ISOLATION = {
    "fills the disk", "signals the sandbox's user", "reads the host's files", "writes outside",
    "opens a socket to the host", "opens a socket to the outside", "makes a user namespace",
    "looks into its supervisor", "reads the host's environment",
}  # fmt: skip
"""These may succeed there: it depends on the permissions of the user who runs the tests."""


@pytest.fixture(scope="module")
def trap() -> Iterator[Trap]:
    with lay_trap() as laid:
        yield laid


@pytest.fixture(scope="module")
def outside() -> Iterator[dict[str, Any]]:
    """It says at the end of all acts whether one reached something."""
    with lay_outside() as laid:
        yield laid


@pytest_asyncio.fixture(
    params=["isolated", pytest.param("unisolated", marks=pytest.mark.full)], loop_scope="module", scope="module"
)
async def verdicts(request: pytest.FixtureRequest) -> tuple[Isolation, dict[HostileCase, Verdict]]:
    isolation, found = await try_all(CONFIG, PROGRAMS, isolate=request.param == "isolated")
    if request.param == "isolated" and not isolation.is_isolated:
        pytest.skip(f"this host allows no isolation: {isolation.problem}")
    return isolation, found


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_a_hostile_program_is_contained(
    verdicts: tuple[Isolation, dict[HostileCase, Verdict]], case: HostileCase
) -> None:
    isolation, verdict = verdicts[0], verdicts[1][case]
    assert len(verdict.found) < 400
    if isolation.is_isolated:
        assert verdict.is_contained, verdict.found
    elif verdict.is_contained is None:
        assert case.needs_isolation
    elif not verdict.is_contained:
        assert case.name in NOT_CONTAINED_WITHOUT_ISOLATION, verdict.found


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root has run the test above as a user")
def test_a_hostile_program_is_contained_that_a_user_runs() -> None:
    """As the user nobody, with a Python that every user can read; this one may be in root's home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pythons = [sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"]
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    may_run = "import os, sys; sys.exit(not os.access(os.path.realpath(sys.executable), os.X_OK))"
    tried = {path: subprocess.run([*as_nobody, path, "-c", may_run], check=False).returncode for path in pythons}
    usable = [path for path, exit_code in tried.items() if exit_code == 0]
    if not usable:
        pytest.skip(f"no other user may run one of {pythons}")
    paths = os.pathsep.join([*filter(None, sys.path), *site.getsitepackages()])
    done = subprocess.run(
        [*as_nobody, usable[0], "-c", AS_USER], cwd="/", capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": paths, "HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["isolation"] == "namespaces"
    assert {name: found for name, (is_contained, found) in said["verdicts"].items() if not is_contained} == {}
    assert len(said["verdicts"]) == len(PROGRAMS) == 28


@pytest_asyncio.fixture(params=["isolated", pytest.param("unisolated", marks=pytest.mark.full)], loop_scope="module")
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    made = LocalSandbox(CONFIG, isolate=request.param == "isolated")
    yield made
    await made.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_processor_time_is_limited_over_all_processes_and_waiting_costs_none(sandbox: LocalSandbox) -> None:
    limits = Limits(wall_s=60.0, cpu_s=0.3)
    spins = ["while True: pass", "import os\nos.fork()\nos.fork()\nwhile True: pass"]
    codes = [*spins, "import time; time.sleep(0.5)"]
    *spun, waited = await asyncio.gather(*(sandbox.run(Program(code), limits) for code in codes))
    for result in spun:
        assert (result.outcome, result.detail) == ("cpu_time", "more than 0.3 s of processor time")
    assert waited.outcome == "exited"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where processes leave temporary files; and a secret is in the environment."""
    made = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(made))
        patch.setenv("WANDB_API_KEY", "secret")
        yield made


ISOLATIONS = [pytest.param(STRICT, id="strict"), pytest.param(None, id="process", marks=pytest.mark.full)]
"""Without a sandbox user code has the user's permissions, so acts that reach outside are not tried."""


@pytest_asyncio.fixture(params=ISOLATIONS, loop_scope="module", scope="module")
async def runner(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[RewardRunner]:
    """One worker for all cases: it has to survive them."""
    assert folder.is_dir()
    if request.param and why_no_namespaces():
        pytest.skip(f"this host allows no user namespaces: {why_no_namespaces()}")
    made = RewardRunner(REWARDS.model_copy(update={"isolation": request.param}))
    yield made
    await made.shutdown()


@pytest.mark.some(3)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
async def test_a_hostile_reward_costs_its_own_trajectory_at_most(
    act: HostileAct, runner: RewardRunner, trap: Trap, outside: dict[str, Any]
) -> None:
    if runner._config.isolation is None and act.name in REACHES:
        pytest.skip("it has the user's permissions")
    hostile = pair(act.name, nap=trap.nap_s, host=outside)
    fine, result, after = await runner.score_many([pair(FINE), hostile, pair(FINE)])
    assert fine == after == Score(0.5, {})
    if not act.reward:
        assert isinstance(result, Score)
        assert result.reward == 0.5
    else:
        assert isinstance(result, TrajectoryError)
        assert result.kind == "reward"
        assert says(result.detail, act.reward), result.detail
        assert len(result.detail) < 5000
        assert len(result.summary) <= 510
    assert not await survives(trap)
    assert len(descendants(os.getpid())) < 10


@pytest_asyncio.fixture(params=ISOLATIONS, loop_scope="module", scope="module")
async def played(
    request: pytest.FixtureRequest, folder: Path, trap: Trap, outside: dict[str, Any]
) -> dict[tuple[str, str], Played]:
    """Every act in a step and in a tool, several episode hosts at a time; no process and no file is left."""
    before = set(folder.iterdir())
    with no_process_left():
        episodes = EPISODES.model_copy(update={"isolation": request.param})
        records = await play_steps_and_tools(trap, outside, episodes=episodes)
    assert set(folder.iterdir()) == before
    return records


@pytest.mark.full  # the same acts as of rewards, in the other process that runs code of users
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("entry_point", ["step", "tool"])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
async def test_a_hostile_environment_or_tool_costs_its_own_episode_at_most(
    act: HostileAct, entry_point: str, played: dict[tuple[str, str], Played]
) -> None:
    expected = act.step if entry_point == "step" else act.tool
    if expected is None:
        pytest.skip("a tool has no way to the running call")
    if (entry_point, act.name) not in played:
        pytest.skip("it has the user's permissions, or this host allows no user namespaces")
    found = played[entry_point, act.name]
    assert says(found.record, expected), found.record
    assert entry_point == "tool" or found.record[:5] == ("env: " if expected else "")
    assert len(found.record) < 5000
    assert found.after == 0.5
    assert not found.leaves_process


@pytest.mark.full
async def test_temporary_files_of_a_reward_go_with_its_process(folder: Path) -> None:
    before = set(folder.iterdir())
    runner = RewardRunner(REWARDS)
    await runner.score_many([pair("leaves temporary files"), pair("kills itself"), pair("leaves temporary files")])
    assert len(list(folder.rglob("left-behind-*"))) >= 1
    await runner.shutdown()
    assert set(folder.iterdir()) == before


def test_a_worker_that_is_killed_takes_its_processes_and_files_with_it(trap: Trap, tmp_path: Path) -> None:
    """The worker gets no chance to clean up: its supervisor does."""
    program = WORKER.format(config=REWARDS.model_dump_json(), nap=trap.nap_s)
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        wait_until(lambda: _naps(trap, worker.pid))
        assert list(tmp_path.iterdir()) != []
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: list(tmp_path.iterdir()) == [])
    assert not asyncio.run(survives(trap))


@pytest.mark.full
async def test_a_reward_that_ends_again_and_again_costs_as_many_processes_as_it_may() -> None:
    once = RewardRunner(REWARDS.model_copy(update={"max_attempts": 1}))
    thrice = RewardRunner(REWARDS.model_copy(update={"max_attempts": 3}))
    results = await asyncio.gather(*(runner.score_many([pair("os._exit")]) for runner in (once, thrice)))
    details = [result.detail for (result,) in results if isinstance(result, TrajectoryError)]
    assert details[0].endswith("its process ended with exit code 7")
    assert details[1].endswith("its process ended with exit code 7, 3 times in a row")
    for runner in (once, thrice):
        await runner.shutdown()


async def test_a_worker_that_is_shut_down_leaves_no_process(trap: Trap) -> None:
    runner = RewardRunner(REWARDS)
    await runner.start()
    scoring = asyncio.create_task(runner.score_many([pair("leaves a daemon and hangs", nap=trap.nap_s)]))
    await asyncio.to_thread(wait_until, lambda: _naps(trap, os.getpid()))
    await runner.shutdown()
    await scoring
    assert not await survives(trap)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _naps(trap: Trap, ancestor: int) -> bool:
    """Whether a descendant sleeps like the daemon of the hostile reward."""
    for pid in descendants(ancestor):
        with contextlib.suppress(OSError):
            if trap.nap_s.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return True
    return False


AS_USER = """
import asyncio, json
from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.hostile import try_all
from tests.hostile_programs import PROGRAMS

isolation, verdicts = asyncio.run(try_all(SandboxConfig(), PROGRAMS, isolate=True))
found = {case.name: (verdict.is_contained, verdict.found) for case, verdict in verdicts.items()}
print(json.dumps({"isolation": str(isolation), "verdicts": found}))
"""
WORKER = """
import asyncio
from tests.answers import pair
from penstock.envs.config import RewardConfig
from penstock.envs.workers.scoring import RewardRunner

async def main():
    config = RewardConfig.model_validate_json({config!r}).model_copy(update={{"timeout_s": 60.0}})
    await RewardRunner(config).score_many([pair("leaves a daemon and hangs", nap={nap!r})])

asyncio.run(main())
"""
