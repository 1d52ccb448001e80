"""Command-line agents that work in a repository, as episodes: `env=repository`.

A task is a folder of files, a prompt, and a command that tests what the agent has made of the files.

    files ─▶ sandbox 1: git, setup, the agent ─▶ files ─▶ sandbox 2: hidden files over them, tests ─▶ reward
                          │ the only address that it reaches
                          └─▶ relay ─▶ recording endpoint

The agent sees its files, the system, this Python and what `read` lists: neither the hidden files, nor other fields of
the task, nor other processes. When it ends, or a limit ends it, everything that it has started is killed. The tests run
in all cases. What an agent does is no failure of the attempt, and a failure of the sandboxes is never a reward.

Consumes: a task and an address of the endpoint. Waits for: the agent, then the tests. Unblocked by: their ends, their
limits (`agent_limits`, `test_limits`), or a budget of the episode (`cut_off`).
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig
from penstock.envs.contract import RewardResult
from penstock.envs.environment import Done, EndpointAccess
from penstock.envs.loading import load_task_source
from penstock.envs.reward_result import ANSWER
from penstock.envs.sandbox.config import RemoteConfig, SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, SandboxResult
from penstock.envs.sandbox.local import try_isolation
from penstock.envs.sandbox.remote import RemoteSandbox
from penstock.envs.sandbox.workspace import Workspace, run_once
from penstock.envs.tasks.agents import AgentProgram, parse_reward, variables_for, words_for
from penstock.envs.workers.permission_hints import ISOLATION_VARIABLE

AGENT_LIMITS = Limits(
    wall_s=600.0, cpu_s=600.0, memory_mib=4096, max_processes=256, max_file_mib=64, max_disk_mib=256,
    max_files=50_000, max_output_kib=8192,
)  # fmt: skip
"""Limits of the agent, all its programs together; `wall_s` includes the time of the policy."""
TEST_LIMITS = Limits(
    wall_s=120.0, cpu_s=240.0, memory_mib=4096, max_processes=256, max_file_mib=64, max_disk_mib=256,
    max_files=50_000, max_output_kib=1024,
)  # fmt: skip
_HELPER_LIMITS = {"wall_s": 60.0, "cpu_s": 60.0}
_MAX_PATCH_KIB = 64
_MTIME = 946_684_800
"""All files are of the year 2000: attempts see equal files, and archives of them can be made."""
_LEFT_OUT = frozenset({".git", "__pycache__"})
"""Folders that do not leave a sandbox. A cached module would be taken for that of a hidden file."""
_NOT_FOUND = (126, 127)
_UNPACK = "mkdir -p home repository && tar -xf -"
_GIT = """command -v git >/dev/null || exit 0
cd repository && git init -q && git config user.name agent && git config user.email agent@localhost && git add -A &&
git commit -q --allow-empty -m start"""
_SETUP = 'export HOME="$PWD/home" && cd repository && exec sh -c "$0"'
_AGENT = 'cd repository && exec env "$@"'
_COLLECT = """chmod -R u+rwX repository 2>/dev/null
tar -cf - --exclude=.git --exclude=__pycache__ -C repository . | base64"""
_DIFF = """mkdir a b; tar -xf - || exit 1
if command -v git >/dev/null; then git -c core.quotePath=off diff --no-index --no-color --no-ext-diff --no-prefix a b
else diff -ruN a b; fi
exit 0"""
_TEST = f'{_UNPACK} && export HOME="$PWD/home" && cd repository && exec sh -c "$0"'


class File(NamedTuple):
    """A file of a repository; with `link` a symbolic link."""

    content: bytes
    is_executable: bool = False
    link: str = ""


Files = Mapping[str, File]
"""Relative path -> file. Empty folders do not count."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all episodes of a source have in common; see `RepositoryTasks`."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    home: Files
    sandbox: SandboxConfig
    agent_limits: Limits
    test_limits: Limits
    is_reward_printed: bool
    isolate: bool

    async def run_alone(self, program: Program, limits: Limits, image: str | None) -> SandboxResult:
        """Run a program in a sandbox of its own, on the sandbox service if there is one."""
        if self.sandbox.remote is None:
            return await run_once(program, limits, self.sandbox, isolate=self.isolate, image=image)
        remote = RemoteSandbox(self.sandbox.remote, 1)
        try:
            return await remote.run(program, limits)
        finally:
            await remote.close()


class RepositoryTasks:
    """Task source whose tasks are repositories.

    Fields of a task: `files`, a folder or a mapping of paths to texts; `tests`, a command line, whose exit code 0 is
    reward 1 and any other reward 0; and, if needed, `hidden`, further files, which are written over the others when
    the agent has ended; `setup`, a command line that runs before the agent; `image`, a folder with a root filesystem.

    Args:
        seed: Seed of the task source.
        agent: Words of the agent's command, in which `{prompt}` and `{task_id}` stand for those of the task.
        tasks: Name or import path of the task source; its environment is not used.
        task_args: Keyword arguments of the task source.
        read: Files and folders of this machine that the agent and the tests may read: the agent's own program. A word
            of the command that is one of them may be a relative path.
        home: Files of the agent's home: a folder, or a mapping of paths to texts.
        variables: Environment variables of the agent, in addition to those with the address of the policy.
        agent_limits: Limits of the agent that differ from `AGENT_LIMITS`.
        test_limits: Limits of the tests that differ from `TEST_LIMITS`.
        prints_reward: Whether the last line of the tests' output is the reward: a number, or an object of numbers.
        allow_unisolated: Run agent and tests without isolation if this machine allows none.
        remote: A sandbox service for the tests, as `sandbox.remote`; the agent always runs on this machine.

    Raises:
        ValueError: If an argument is invalid.
        ConfigError: If the task source does not load, or this machine allows no isolation.
    """

    def __init__(
        self,
        seed: int,
        agent: Sequence[str],
        tasks: str = "dataset",
        task_args: Mapping[str, Any] | None = None,
        *,
        read: Sequence[str] = (),
        home: str | Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        agent_limits: Mapping[str, Any] | None = None,
        test_limits: Mapping[str, Any] | None = None,
        prints_reward: bool = False,
        allow_unisolated: bool = False,
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(agent, str) or not agent or isinstance(read, str):
            raise ValueError(
                f"env.args.agent={agent!r} and env.args.read={read!r}: the agent is a list of the words of a command, "
                '[my-agent, -p, "{prompt}"], and read a list of paths'
            )
        paths = {str(path): os.path.abspath(os.path.expanduser(path)) for path in read}  # noqa: PTH100, PTH111
        for given, path in paths.items():
            if not os.path.exists(path):  # noqa: PTH110
                raise ValueError(f"env.args.read: there is no {given!r} ({path})")
        self._read = tuple(paths.values())
        self._source = load_task_source(EnvConfig(factory=tasks, args=dict(task_args or {})), seed)
        sandbox = SandboxConfig(
            allow_unisolated=allow_unisolated,
            read_only_paths=self._read,
            remote=None if remote is None else RemoteConfig.model_validate(remote),
        )
        isolation = try_isolation(sandbox)
        if not isolation.is_isolated and not allow_unisolated:
            is_nested = ISOLATION_VARIABLE in os.environ
            nested = "env.episode.isolation is strict, and sandboxes cannot be nested"
            why = nested if is_nested else isolation.problem
            raise ConfigError(
                f"env.args.allow_unisolated=false, but this host allows no isolation: {why}. The agent could read, "
                "change and send what you can. Allow user namespaces (docs/guides/sandbox.md), or set "
                "env.args.allow_unisolated=true if you trust what the policy may do."
            )
        self._setting = Setting(
            tuple(paths.get(str(word), str(word)) for word in agent),
            {str(name): str(value) for name, value in (variables or {}).items()},
            read_files(home, "env.args.home"),
            sandbox,
            Limits.model_validate({**AGENT_LIMITS.model_dump(), **(agent_limits or {})}),
            Limits.model_validate({**TEST_LIMITS.model_dump(), **(test_limits or {})}),
            prints_reward,
            isolation.is_isolated,
        )
        for name in ("gold_actions", "stored"):
            if hasattr(self._source, name):
                setattr(self, name, getattr(self._source, name))

    def train(self) -> Iterator[Task]:
        """As the task source.

        Raises:
            ConfigError: If a task is no repository.
        """
        return map(self._checked, self._source.train())

    def held_out(self, num_tasks: int) -> list[Task]:
        """As the task source, and as `train`."""
        return [self._checked(task) for task in self._source.held_out(num_tasks)]

    def environment(self) -> RepositoryEpisode:
        """One run of the agent."""
        return RepositoryEpisode(self._setting)

    def _checked(self, task: Task) -> Task:
        try:
            self._check(task.fields)
        except ValueError as error:
            raise ConfigError(f"env: task {task.task_id} is no repository: {error} (docs/guides/agents.md).") from error
        return task

    def _check(self, fields: Mapping[str, Any]) -> None:
        for name in ("tests", "setup", "image"):
            value = fields.get(name)
            if not isinstance(value, str) and (value is not None or name == "tests"):
                raise ValueError(f"{name}={value!r:.80} is no text")
        for name in ("files", "hidden"):
            _check_files(fields.get(name), name)
        if fields.get("files") is None:
            raise ValueError(f"it has no files, only {sorted(fields)}")
        if (image := fields.get("image")) is not None:
            if not Path(image).expanduser().is_dir():
                raise ValueError(f"image={image!r} is no folder with a root filesystem")
            if self._setting.sandbox.remote is not None or not self._setting.isolate:
                raise ValueError(f"image={image!r} needs a sandbox on this machine, without env.args.remote")
        hidden, shown = fields.get("hidden"), [at for at in (*self._read, fields["files"]) if isinstance(at, str)]
        if isinstance(hidden, str) and (seen := next((at for at in shown if _overlap(at, hidden)), None)):
            raise ValueError(f"hidden={hidden!r} is in what the agent may read, {seen!r}")


class RepositoryEpisode(AgentProgram):
    """One run of the agent, and the tests of what it leaves. The patch is the episode's answer."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._workspace: Workspace | None = None
        self._running: asyncio.Task[SandboxResult] | None = None
        self._before: Files = {}

    async def run(self, access: EndpointAccess) -> Done:
        """Run the agent to its end, then the tests.

        Raises:
            RuntimeError: If the repository cannot be set up, or the agent ends without having called the policy.
            SandboxUnavailableError: If a sandbox failed.
        """
        setting, fields = self._setting, self.task.fields
        self._before = read_files(fields["files"], "files")
        url = urlsplit(access.base_url)
        assert url.hostname is not None
        workspace = self._workspace = Workspace(
            setting.sandbox,
            setting.agent_limits.max_disk_mib,
            isolate=setting.isolate,
            image=self._image,
            address=(url.hostname, url.port or 80),
        )
        packed = pack(_below("repository", self._before) | _below("home", setting.home))
        await self._prepare(workspace, Program(argv=("sh", "-c", _UNPACK), stdin=packed))
        if fields.get("setup") is not None:
            await self._prepare(workspace, Program(argv=("sh", "-c", _SETUP, fields["setup"])))
            self._before = await self._collect(workspace) or {}
        await self._prepare(workspace, Program(argv=("env", *_git_variables(), "sh", "-c", _GIT)))
        self._running = asyncio.create_task(workspace.run(self._agent(workspace, access), setting.agent_limits))
        return await self._judge(workspace, await asyncio.shield(self._running))

    async def cut_off(self) -> Done:
        """Kill the agent, and run the tests.

        Raises:
            SandboxUnavailableError: If a sandbox failed.
        """
        if self._workspace is None or self._running is None:
            return Done(None)
        return await self._judge(self._workspace, await self._workspace.stop(self._running))

    async def close(self) -> None:
        """Kill everything that runs."""
        if self._workspace is not None:
            await self._workspace.close()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    @property
    def _image(self) -> str | None:
        image = self.task.fields.get("image")
        return None if image is None else os.path.abspath(os.path.expanduser(image))  # noqa: PTH100, PTH111

    def _agent(self, workspace: Workspace, access: EndpointAccess) -> Program:
        assert workspace.address is not None
        host, port = workspace.address
        there = EndpointAccess(f"http://{host}:{port}{urlsplit(access.base_url).path}", access.api_key, access.model)
        variables = {"HOME": f"{workspace.folder}/home", **variables_for(there)}
        assigned = [f"{name}={value}" for name, value in {**variables, **self._setting.variables}.items()]
        return Program(argv=("sh", "-c", _AGENT, "sh", *assigned, *words_for(self._setting.command, self.task)))

    async def _prepare(self, workspace: Workspace, program: Program) -> None:
        result = await workspace.run(program, self._setting.agent_limits)
        if not result.is_ok:
            raise RuntimeError(f"the repository cannot be set up with env.args.agent_limits: {_told(result)}")

    async def _judge(self, workspace: Workspace, ended: SandboxResult) -> Done:
        """The reward of what the agent has left; `ended` says how it ended."""
        asked = None if workspace.relay is None else workspace.relay.num_connections
        if asked == 0 or (asked is None and ended.exit_code in _NOT_FOUND):
            raise RuntimeError(f"the agent has ended and not called the policy: {_told(ended)}")
        counts = {
            "agent_s": ended.wall_s,
            "agent_limit": float(ended.hit_a_limit),
            "agent_errors": float(ended.exit_code not in (0, None)),
        }
        after = await self._collect(workspace)
        await workspace.close()
        if after is None:
            return Done(0.0, {**counts, "unreadable": 1.0})
        changed = sorted(path for path in {*self._before, *after} if self._before.get(path) != after.get(path))
        patch = await self._patch(after, changed)
        hidden = read_files(self.task.fields.get("hidden"), "hidden")
        packed = pack(_below("repository", overlaid(after, hidden)))
        program = Program(argv=("sh", "-c", _TEST, self.task.fields["tests"]), stdin=packed)
        tested = await self._setting.run_alone(program, self._setting.test_limits, self._image)
        counts |= {
            "files_changed": float(len(changed)),
            "tests_s": tested.wall_s,
            "tests_limit": float(tested.hit_a_limit),
            "tests_not_found": float(tested.exit_code in _NOT_FOUND),
        }
        printed: RewardResult | None = float(tested.is_ok)
        if self._setting.is_reward_printed:
            printed = None if tested.hit_a_limit else parse_reward(tested.stdout)
            counts["reward_not_printed"] = float(printed is None)
        parts = printed if isinstance(printed, Mapping) else {"reward": printed or 0.0}
        return Done({**parts, ANSWER: patch}, counts)

    async def _collect(self, workspace: Workspace) -> Files | None:
        """The files that are there now; None if the agent has left more than may be read.

        Raises:
            RuntimeError: If they cannot be collected, for which the agent is not to blame.
        """
        most = self._setting.agent_limits.max_disk_mib << 20
        limits = self._setting.agent_limits.model_copy(
            update={**_HELPER_LIMITS, "max_output_kib": most * 3 // 2 >> 10}  # base64 needs 4/3
        )
        result = await workspace.run(Program(argv=("sh", "-c", _COLLECT)), limits)
        if not result.is_ok and not result.hit_a_limit:
            raise RuntimeError(f"the files of the repository cannot be collected (tar, base64): {_told(result)}")
        return None if result.hit_a_limit else unpack(base64.b64decode(result.stdout), most)

    async def _patch(self, after: Files, changed: Sequence[str]) -> str:
        """What the agent has changed, as a diff of git. It is made in a sandbox, without the repository's settings."""
        if not changed:
            return ""
        both = {"a": self._before, "b": after}
        given = {f"{at}/{path}": files[path] for at, files in both.items() for path in changed if path in files}
        limits = self._setting.test_limits.model_copy(update={**_HELPER_LIMITS, "max_output_kib": _MAX_PATCH_KIB})
        program = Program(argv=("env", "HOME=/nonexistent", "sh", "-c", _DIFF), stdin=pack(given))
        return (await self._setting.run_alone(program, limits, self._image)).stdout


def read_files(given: object, what: str) -> dict[str, File]:
    """Files of a folder, or of a mapping of paths to texts; none if it is None. A folder's `.git` is left out: its
    history may hold the solution.

    Raises:
        ValueError: If it is neither, or a path is not below the folder.
    """
    _check_files(given, what)
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(path): File(str(text).encode()) for path, text in given.items() if text is not None}
    root, files = Path(str(given)).expanduser(), dict[str, File]()
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = sorted(set(folders) - _LEFT_OUT - set(links))
        for name in [*names, *links]:
            path = Path(folder) / name
            at = path.relative_to(root).as_posix()
            if path.is_symlink():
                files[at] = File(b"", link=str(path.readlink()))
            elif path.is_file():
                files[at] = File(path.read_bytes(), os.access(path, os.X_OK))
    return files


def _check_files(given: object, what: str) -> None:
    if isinstance(given, str):
        if not Path(given).expanduser().is_dir():
            raise ValueError(f"{what}={given!r}: there is no such folder")
    elif isinstance(given, Mapping):
        for path in given:
            parts = PurePosixPath(str(path)).parts
            if not parts or str(path).startswith("/") or ".." in parts or "\0" in str(path):
                raise ValueError(f"{what} has the path {path!r}, which is not below the folder")
        if wrong := {path: text for path, text in given.items() if not isinstance(text, str | None)}:
            raise ValueError(f"{what} has {wrong!r:.80}, which is no text")
    elif given is not None:
        raise ValueError(f"{what}={given!r:.80} is neither a folder nor a mapping of paths to texts")


def _overlap(one: str, other: str) -> bool:
    paths = [Path(os.path.realpath(os.path.expanduser(path))) for path in (one, other)]  # noqa: PTH111
    return paths[0].is_relative_to(paths[1]) or paths[1].is_relative_to(paths[0])


def _below(folder: str, files: Files) -> dict[str, File]:
    return {f"{folder}/{path}": file for path, file in files.items()}


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(path).parents][:-1]


def overlaid(files: Files, hidden: Files) -> dict[str, File]:
    """`files` with `hidden` over them. What stands in their way is left out: a link where they have a folder would
    send them elsewhere.
    """
    folders = {parent for path in hidden for parent in _parents(path)}
    kept = {
        path: file
        for path, file in files.items()
        if path not in folders and not any(parent in hidden for parent in _parents(path))
    }
    return {**kept, **hidden}


def pack(files: Files) -> bytes:
    """A tar archive of files, the same for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, file in files.items():
            entry = tarfile.TarInfo(path)
            entry.mtime, entry.mode = _MTIME, 0o755 if file.is_executable else 0o644
            if file.link:
                entry.type, entry.linkname = tarfile.SYMTYPE, file.link
            else:
                entry.size = len(file.content)
            archive.addfile(entry, io.BytesIO(file.content))
    return buffer.getvalue()


def unpack(packed: bytes, max_bytes: int) -> dict[str, File] | None:
    """The files and links of a tar archive, not its folders and devices; None if it is broken, or has more bytes."""
    files: dict[str, File] = {}
    num_bytes = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for entry in archive:
                path = entry.name.removeprefix("./")
                if entry.islnk():  # another name of a file that has come before
                    files[path] = files[entry.linkname.removeprefix("./")]
                elif entry.issym():
                    files[path] = File(b"", link=entry.linkname)
                elif entry.isreg() and (content := archive.extractfile(entry)) is not None:
                    if entry.size > max_bytes:
                        return None
                    files[path] = File(content.read(), bool(entry.mode & 0o100))
                num_bytes += len(files[path].content) if path in files else 0
                if num_bytes > max_bytes:
                    return None
    except (tarfile.TarError, EOFError, KeyError, ValueError):
        return None
    return files


def _git_variables() -> list[str]:
    """For one commit that is the same in every attempt."""
    date = f"{_MTIME} +0000"
    return [
        f"GIT_AUTHOR_DATE={date}", f"GIT_COMMITTER_DATE={date}", "GIT_CONFIG_GLOBAL=/dev/null",
        "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=init.defaultBranch", "GIT_CONFIG_VALUE_0=main",
    ]  # fmt: skip


def _told(result: SandboxResult) -> str:
    """How a program ended, with the tail of its output."""
    return f"{result.summary}\n{(result.stderr or result.stdout).strip()[-2000:]}"
