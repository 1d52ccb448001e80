"""What every sandbox promises: on this machine with and without isolation, and over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataflow.errors import ConfigError
from penstock.envs.sandbox import local, runner
from penstock.envs.sandbox.bubblewrap import find_bwrap
from penstock.envs.sandbox.config import RemoteConfig, SandboxConfig
from penstock.envs.sandbox.contract import (
    Limits,
    Program,
    Sandbox,
    SandboxResult,
    SandboxUnavailableError,
    decode_job,
    encode_job,
)
from penstock.envs.sandbox.local import IsolatedRunner, Isolation, LocalSandbox, judge_isolation, try_isolation
from penstock.envs.sandbox.open_sandbox import open_sandbox
from penstock.envs.sandbox.remote import RemoteSandbox
from penstock.envs.sandbox.service import make_service
from penstock.envs.workers import process_tree
from penstock.envs.workers.supervisor import how_it_ended

CONFIG = SandboxConfig(allow_unisolated=True, max_concurrency=4)
LIMITS = Limits(wall_s=10.0, memory_mib=256)
SOON_S = 20.0
"""Far below the time limit of a program that is ended by something else, and enough for a busy machine."""


ISOLATION = try_isolation(SandboxConfig())
needs_isolation = pytest.mark.skipif(not ISOLATION.is_isolated, reason=f"this host allows none: {ISOLATION.problem}")


@pytest.fixture(params=[pytest.param("isolated", marks=needs_isolation), "unisolated", "remote"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    local = LocalSandbox(CONFIG, isolate=request.param != "unisolated")
    if request.param != "remote":
        yield local
        await local.close()
        return
    async with TestServer(make_service(local, LIMITS)) as service:
        remote = RemoteSandbox(RemoteConfig(url=str(service.make_url("/"))), max_concurrency=4)
        yield remote
        await remote.close()


async def run(sandbox: Sandbox, code: str, **more: object) -> SandboxResult:
    return await sandbox.run(Program(code, **more), LIMITS)  # type: ignore[arg-type]


async def test_output_and_exit_code_are_those_of_python(sandbox: Sandbox) -> None:
    cases = {
        "print(1 + 1)": (0, "2\n", ""),
        "import sys; sys.exit(3)": (3, "", ""),
        "import sys; sys.exit('sorry')": (1, "", "sorry\n"),
        "import sys; print('é'); sys.stderr.write('warned')": (0, "é\n", "warned"),
        "import atexit; atexit.register(print, 'bye'); print('hello')": (0, "hello\nbye\n", ""),
        "import threading; threading.Thread(target=print, args=('late',)).start()": (0, "late\n", ""),
        "import io, sys; print('early'); sys.stdout = io.StringIO()": (0, "early\n", ""),
        "import sys; print('early'); sys.stderr.close(); sys.stdout = None": (0, "early\n", ""),
        "out = open(1, 'w', closefd=False); out.write('hello')": (0, "hello", ""),
        "class A:\n def __del__(self): print('gone')\na = A(); a.a = a; b = A()": (0, "gone\ngone\n", ""),
        "if __name__ == '__main__': print(__name__)": (0, "__main__\n", ""),
        "print('before'); exit(5)": (5, "before\n", ""),
        "import numpy, sys; print(numpy.arange(3).sum(), 'penstock' in sys.modules)": (0, "3 False\n", ""),
        "class A: pass\nimport pickle; print(type(pickle.loads(pickle.dumps(A()))).__name__)": (0, "A\n", ""),
    }
    results = await asyncio.gather(*(run(sandbox, code) for code in cases))
    for (code, wanted), result in zip(cases.items(), results, strict=True):
        assert (result.exit_code, result.stdout, result.stderr) == wanted, code
        assert result.outcome == "exited"
    failed = await run(sandbox, "x = 1\n1 / 0  # here\n")
    assert failed.exit_code == 1
    assert "1 / 0  # here" in failed.stderr
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "penstock" not in failed.stderr
    shown = await run(
        sandbox, "import traceback\ntry:\n    1 / 0  # there\nexcept Exception:\n    traceback.print_exc()\n"
    )
    assert "1 / 0  # there" in shown.stderr


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (35, "signal 35"), (40, "signal 40"), (63, "signal 63")])
async def test_the_signal_that_killed_a_program_is_named(sandbox: Sandbox, number: int, name: str) -> None:
    result = await run(sandbox, f"import os; os.kill(os.getpid(), {number})")
    assert (result.outcome, result.detail) == ("killed", f"by {name}")
    assert how_it_ended(-number) == f"was killed by {name}"


async def test_commands_standard_input_and_files_work(sandbox: Sandbox) -> None:
    big = bytes(range(256)) * 1000  # more than a pipe holds
    program = Program(argv=("sh", "-c", "wc -c; cat deep/down.txt; exit 4"), stdin=big, files={"deep/down.txt": b"!"})
    result = await sandbox.run(program, LIMITS)
    assert (result.exit_code, result.stdout.split()) == (4, ["256000", "!"])
    reader = await run(sandbox, "import sys; print(len(sys.stdin.buffer.read()), open('a').read())", stdin=big,
                       files={"a": b"x"})  # fmt: skip
    assert reader.stdout == "256000 x\n"
    ignores_input = await run(sandbox, "print('done')", stdin=big)
    assert ignores_input.stdout == "done\n"
    missing = await sandbox.run(Program(argv=("no-such-program",)), LIMITS)
    assert missing.exit_code == 127
    assert "no-such-program" in missing.stderr


async def test_nothing_stays_from_one_program_to_the_next(sandbox: Sandbox) -> None:
    first = await run(sandbox, "import os, math; math.pi = 3; open('left', 'w'); print(os.listdir(), os.getcwd())")
    second = await run(sandbox, "import os, math; print(os.listdir(), math.pi)")
    assert first.stdout.startswith("['left']")
    assert second.stdout == "[] 3.141592653589793\n"


@pytest.mark.some(1)
async def test_programs_of_one_answer_run_in_turn_and_the_first_that_hits_a_limit_is_the_last(sandbox: Sandbox) -> None:
    leaves = "import os, sys; os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); print(sys.stdin.read())"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint(os.listdir())"
    programs = [Program(leaves, stdin=b"1"), Program(daemon), Program("while True: pass"), Program("print(4)")]
    results = await sandbox.run_in_turn(programs, Limits(wall_s=3.0))
    assert [result.stdout for result in results] == ["1\n", "[]\n", ""]
    assert [result.outcome for result in results] == ["exited", "exited", "wall_clock"]


async def test_programs_of_one_answer_have_modules_of_their_own_though_they_are_imported_once(sandbox: Sandbox) -> None:
    draws = "import math, random; print(math.pi, random.random()); math.pi = 3; random.seed = random.random = None"
    results = await sandbox.run_in_turn([Program(draws)] * 3, LIMITS)
    assert {result.stdout.split()[0] for result in results} == {"3.141592653589793"}
    assert len({result.stdout.split()[1] for result in results}) == 3


@needs_isolation
async def test_each_answer_has_its_own_sandbox_worker_which_is_started_ahead() -> None:
    sandbox = LocalSandbox(CONFIG)
    looks = "import os; print(os.readlink('/proc/self/ns/pid'), os.readlink('/proc/self/ns/net'))"
    answers = await asyncio.gather(*(sandbox.run_in_turn([Program(looks)] * 2, LIMITS) for _ in range(3)))
    seen = [{result.stdout for result in results} for results in answers]
    assert [len(one) for one in seen] == [1, 1, 1]
    assert len(set.union(*seen)) == 3
    assert 1 <= len(sandbox._spare) <= 4
    ready = sandbox._spare[0]
    await run(sandbox, "print(1)")
    assert ready not in sandbox._spare
    await sandbox.close()


async def test_a_machine_that_can_start_no_spare_worker_now_runs_the_program_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = LocalSandbox(CONFIG, isolate=False)
    await sandbox.start()
    started: list[IsolatedRunner] = []

    def only_one(*given: Any, **named: Any) -> IsolatedRunner:
        if started:
            raise OSError("no processes left")
        started.append(IsolatedRunner(*given, **named))
        return started[0]

    monkeypatch.setattr(local, "IsolatedRunner", only_one)
    result = await sandbox.run(Program("print(1)"), LIMITS)
    assert result.stdout == "1\n"
    assert (len(sandbox._spare), len(sandbox._busy)) == (0, 0)
    assert started[0]._process.poll() is not None
    await sandbox.close()


@needs_isolation
async def test_files_without_content_are_limited_too() -> None:
    sandbox = LocalSandbox(CONFIG)
    result = await run(sandbox, "for number in range(10**7): open(str(number), 'w').close()")
    assert (result.outcome, result.detail) == ("memory", "more than 4096 files")
    await sandbox.close()


async def test_the_environment_holds_nothing_of_ours(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    result = await run(sandbox, "import os; print(sorted(os.environ)); assert os.environ['HOME'] == os.getcwd()")
    names = "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']\n"
    assert (result.stdout, result.stderr) == (names, "")


@needs_isolation
async def test_programs_can_read_the_paths_of_the_configuration_and_no_others_and_write_to_none(tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        (folder / "words.txt").write_text(folder.name)
    code = f"""
    print(open("{shown}/words.txt").read())
    for name, mode in (("{hidden}/words.txt", "r"), ("{shown}/words.txt", "w"), ("{shown}/more.txt", "w")):
        try:
            open(name, mode)
        except OSError as error:
            print(type(error).__name__)
    """
    sandbox = LocalSandbox(SandboxConfig(max_concurrency=1, read_only_paths=(str(shown),)), isolate=True)
    try:
        result = await run(sandbox, dedent(code))
    finally:
        await sandbox.close()
    assert (result.stdout.split(), result.stderr) == (["shown", "FileNotFoundError", "OSError", "OSError"], "")


async def test_memory_that_no_process_shows_is_refused_and_open_files_are_few(sandbox: Sandbox) -> None:
    code = """
    import ctypes, errno, os, resource
    libc = ctypes.CDLL(None, use_errno=True)
    calls = {"memfd_create": (b"x", 0), "shmget": (0, ctypes.c_size_t(4096), 0o1600), "msgget": (0, 0o1600)}
    for name, arguments in calls.items():
        assert getattr(libc, name)(*arguments) == -1, name
        assert ctypes.get_errno() == errno.ENOSYS, name
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 256)
    print("refused")
    """
    result = await run(sandbox, dedent(code))
    assert (result.stdout, result.stderr) == ("refused\n", "")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", ""])
def test_a_file_that_would_lie_outside_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not below the working directory"):
        Program("", files={name: b""})


@pytest.mark.some(1)
async def test_programs_run_at_the_same_time_and_each_gets_its_own_answer(sandbox: Sandbox) -> None:
    started = time.monotonic()
    results = await asyncio.gather(*(run(sandbox, f"import time; time.sleep(0.5); print({n})") for n in range(8)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]
    assert time.monotonic() - started < 8 * 0.5


async def test_a_cancelled_run_ends_its_program_and_frees_its_slot() -> None:
    sandbox = LocalSandbox(SandboxConfig(allow_unisolated=True, max_concurrency=1))
    nap = "713.25"
    running = asyncio.create_task(sandbox.run(Program(argv=("sleep", nap)), Limits(wall_s=60)))
    await until(lambda: nap in processes())
    running.cancel()
    result = await run(sandbox, "print('next')")
    assert result.stdout == "next\n"
    await until(lambda: nap not in processes())
    await sandbox.close()


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=needs_isolation), False])
async def test_a_runner_that_root_started_is_scheduled_before_the_programs_that_it_watches(isolate: bool) -> None:
    before = os.sched_getscheduler(0)
    if os.geteuid() != 0:
        pytest.skip("not root: the kernel itself counts a user's processes (RLIMIT_NPROC)")
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError as error:
        pytest.skip(f"this root has no CAP_SYS_NICE: {error}")
    os.sched_setscheduler(0, before, os.sched_param(0))
    sandbox = LocalSandbox(CONFIG, isolate=isolate)
    result = await run(sandbox, "import os; print(os.sched_getscheduler(0), os.sched_getparam(0).sched_priority)")
    assert result.stdout == f"{os.SCHED_OTHER} 0\n"
    spare = sandbox._spare[0]
    await asyncio.to_thread(spare.wait_until_ready)
    runners = [spare._process.pid, *process_tree.descendants(spare._process.pid)]
    assert [os.sched_getscheduler(pid) for pid in runners] == [os.SCHED_RR] * len(runners)
    assert os.sched_getscheduler(0) == before
    await sandbox.close()


async def test_closing_ends_what_runs(sandbox: Sandbox) -> None:
    if isinstance(sandbox, RemoteSandbox):
        pytest.skip("a client does not end the service's programs: the closed connection does, as in the test above")
    nap = f"714.{os.getpid()}"
    running = asyncio.create_task(sandbox.run(Program(argv=("sleep", nap)), Limits(wall_s=60)))
    await until(lambda: nap in processes())
    await sandbox.close()
    await until(lambda: nap not in processes())
    with pytest.raises(SandboxUnavailableError):
        await asyncio.wait_for(running, SOON_S)


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=needs_isolation), False])
async def test_a_spare_worker_that_was_killed_is_replaced(isolate: bool) -> None:
    sandbox = LocalSandbox(CONFIG, isolate=isolate)
    await run(sandbox, "print('once')")
    os.kill(sandbox._spare[0]._process.pid, signal.SIGKILL)
    assert (await run(sandbox, "print('again')")).stdout == "again\n"
    await sandbox.close()


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=needs_isolation), False])
async def test_a_worker_that_dies_does_not_affect_the_other_programs(isolate: bool) -> None:
    sandbox = LocalSandbox(CONFIG, isolate=isolate)
    naps = f"716.{os.getpid()}", f"717.{os.getpid()}"
    kept, lost = (asyncio.create_task(sandbox.run(Program(argv=("sleep", nap)), Limits(wall_s=60))) for nap in naps)
    await until(lambda: all(nap in processes() for nap in naps))
    for nap in naps[::-1]:  # the runner of the second is killed, then the first program itself
        (pid,) = (int(line.split()[0]) for line in processes().splitlines() if line.endswith(f" sleep {nap}"))
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent if nap == naps[1] else pid, signal.SIGKILL)
        await until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    assert (await kept).detail == "by SIGKILL"
    await until(lambda: naps[1] in processes())  # its second attempt
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await sandbox.close()


async def test_a_worker_that_no_longer_replies_is_replaced() -> None:
    sandbox = LocalSandbox(CONFIG, isolate=False)
    await run(sandbox, "print('once')")
    os.kill(sandbox._spare[0]._process.pid, signal.SIGSTOP)
    assert (await sandbox.run(Program("print('again')"), Limits(wall_s=1.0))).stdout == "again\n"
    await sandbox.close()


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=os.environ | path_of_ours())
    assert parent.stdout is not None
    nap = parent.stdout.readline().decode().strip()
    assert nap in processes()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while nap in processes():
        assert time.monotonic() < deadline, "a program outlived the process that ran it"
        time.sleep(0.02)


@pytest.mark.parametrize("isolate", [True, False])
async def test_no_working_directory_is_left(isolate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others have theirs in the usual place
    sandbox = LocalSandbox(CONFIG, isolate=isolate)
    for code in ("open('x', 'w')", "import os; os.kill(os.getpid(), 9)"):
        await run(sandbox, code)
    await sandbox.run(Program("open('x', 'w')\nwhile True: pass"), Limits(wall_s=0.1))
    await sandbox.close()
    assert list(tmp_path.iterdir()) == []


async def test_without_isolation_untrusted_code_is_refused_unless_allowed(caplog: pytest.LogCaptureFixture) -> None:
    careful = LocalSandbox(SandboxConfig(), isolate=False)
    with pytest.raises(ConfigError, match=r"sandbox.allow_unisolated=false, but this host allows no isolation"):
        await run(careful, "print(1)")
    await careful.close()
    with caplog.at_level(logging.WARNING):
        sandbox = LocalSandbox(CONFIG, isolate=False)
        assert [(await run(sandbox, "print(1)")).stdout for _ in range(2)] == ["1\n"] * 2
        await sandbox.close()
    assert [record.message for record in caplog.records if "no isolation" in record.message] == [
        "sandbox: this host allows no isolation (it was not asked for): programs run with limits only."
    ]
    judge_isolation(Isolation(), SandboxConfig())


def test_the_bwrap_of_the_system_is_used_if_it_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_used in [("0.8.0", True), ("1.0", True), ("0.7.2", False), ("", False)]:
        find_bwrap.cache_clear()
        system = tmp_path / version / "bwrap"
        system.parent.mkdir(exist_ok=True)
        system.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
        system.chmod(0o755)
        monkeypatch.setenv("PATH", str(system.parent), prepend=os.pathsep)
        assert (find_bwrap() == str(system)) == is_used
    find_bwrap.cache_clear()


@needs_isolation
def test_a_host_without_user_namespaces_is_recognised_and_its_limits_still_work() -> None:
    command = ["unshare", "--user", "--map-root-user", "bash", "-c",
               f"echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c '{REFUSED}'"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | path_of_ours()
    )
    assert "none (bwrap: " in done.stdout.split("|")[0], done.stderr
    assert done.stdout.split("|")[1:] == ["2\n", "wall_clock\n"]


@given(
    st.one_of(
        st.builds(
            Program,
            code=st.text(),
            stdin=st.binary(),
            files=st.dictionaries(st.text("abc/ é", min_size=1).map("x{}".format), st.binary()),
        ),
        st.builds(Program, argv=st.lists(st.text(), min_size=1).map(tuple), stdin=st.binary()),
    ),
    st.builds(Limits),
)
def test_a_job_survives_the_wire(program: Program, limits: Limits) -> None:
    assert decode_job(encode_job(program, limits)) == (program, limits)


def test_a_program_is_source_or_a_command() -> None:
    for wrong in ({}, {"code": "", "argv": ("ls",)}):
        with pytest.raises(ValueError, match="not both"):
            Program(**wrong)


async def test_limits_are_in_the_units_that_they_say(sandbox: Sandbox) -> None:
    limits = Limits(memory_mib=20, max_file_mib=2, max_disk_mib=3, max_output_kib=4)
    code = """
    import os, resource
    file_bytes, reserved_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0], resource.getrlimit(resource.RLIMIT_AS)[0]
    folder = os.statvfs(".")
    print(file_bytes, 20 << 20 < reserved_bytes < 1 << 30, folder.f_blocks * folder.f_frsize)
    """
    said = (await sandbox.run(Program(dedent(code)), limits)).stdout.split()
    assert said[:2] == ["2097152", "True"]
    assert said[2] == "3145728" or not ISOLATION.is_isolated or getattr(sandbox, "_isolate", True) is False
    result = await sandbox.run(Program("print('x' * 4097)"), limits)
    assert (result.outcome, result.detail, len(result.stdout)) == ("output", "more than 4096 bytes of output", 4096)


def test_the_configuration_chooses_the_sandbox() -> None:
    assert isinstance(open_sandbox(SandboxConfig()), LocalSandbox)
    assert isinstance(open_sandbox(SandboxConfig(remote=RemoteConfig(url="http://x"))), RemoteSandbox)


def processes() -> str:
    return subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def path_of_ours() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


PARENT = """
import asyncio, os, subprocess
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program
from penstock.envs.sandbox.local import LocalSandbox

async def main():
    sandbox = LocalSandbox(SandboxConfig(allow_unisolated=True))
    nap = f"715.{os.getpid()}"
    running = asyncio.create_task(sandbox.run(Program(argv=("sleep", nap)), Limits(wall_s=60)))
    while nap not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout:
        await asyncio.sleep(0.02)
    print(nap, flush=True)
    await running

asyncio.run(main())
"""
REFUSED = """
import asyncio
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program
from penstock.envs.sandbox.local import LocalSandbox

async def main():
    sandbox = LocalSandbox(SandboxConfig(allow_unisolated=True))
    print(await sandbox.start(), end="|")
    print((await sandbox.run(Program("print(1 + 1)"), Limits())).stdout, end="|")
    print((await sandbox.run(Program("while True: pass"), Limits(wall_s=0.2))).outcome)
    await sandbox.close()

asyncio.run(main())
"""


def test_too_many_processes_are_found_before_their_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the thousands which a fork bomb has soon takes longer than the bomb needs to fill the machine."""
    limits = Limits().model_dump()
    job = {"limits": limits, "stdin": b""}
    monkeypatch.setattr(process_tree, "measure", lambda members: (1 + limits["max_processes"], 0.0, 1 << 60))
    monkeypatch.setattr(process_tree, "proportional_memory_bytes", lambda members: pytest.fail("it was measured"))
    run = runner._Run(job, "/", is_isolated=False)
    found = run._over_a_limit()
    assert found is not None
    assert found[0] == "processes"
