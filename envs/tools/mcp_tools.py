"""Tools of MCP servers (Model Context Protocol), with the official library `mcp`; a server is a command or a URL.

    class Episode(McpToolEnvironment):
        servers = (McpServer(command=("python", "my_server.py")),)

Every episode has its own session with each server, and its own process if the server is a command, so episodes do not
affect each other. A server that dies or does not answer in time fails the attempt with the cause; an error that a tool
reports goes to the model.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from penstock.dataflow.task import Task
from penstock.envs.environment import Observation
from penstock.envs.tools.functions import DescribedTool, Toolbox, ToolError, ToolServerError
from penstock.envs.tools.tool_environment import ToolEnvironment

_MAX_STDERR_BYTES = 500
_CLOSE_S = 8.0
"""The client library gives a process 2 s to end by itself, then 2 s after SIGTERM, then it kills it."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server: exactly one of `command` and `url`."""

    command: Sequence[str] = ()
    """Program and arguments; it communicates over its standard input and output."""
    url: str | None = None
    """Address of a server with streamable HTTP."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command, in addition to HOME, PATH and the like; it gets no secrets."""
    tools: Sequence[str] | None = None
    """Tools that the policy may call; None is all."""
    startup_timeout_s: float = 20.0
    """Longest time until it has listed its tools, seconds."""

    def __post_init__(self) -> None:
        if bool(self.command) == (self.url is not None):
            raise ValueError(f"McpServer(command={list(self.command)}, url={self.url!r}): give one of the two")

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"MCP server {self.url or ' '.join(self.command)!r}"


class McpSession:
    """One session with one server. `open`, then calls, then `close`, all from one event loop.

    One asyncio task holds the connection from start to end, because the library's cancel scopes must not change tasks.
    """

    def __init__(self, server: McpServer, call_timeout_s: float) -> None:
        self._server = server
        self._call_timeout_s = call_timeout_s
        self._client: Any = None
        self._is_connected = False
        self._is_over = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._stderr: IO[str] | None = None

    async def open(self) -> list[DescribedTool]:
        """Connect, and return the tools.

        Raises:
            ToolServerError: If the server does not start, does not answer in time, or lacks a tool of `server.tools`.
        """
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(connected))
        try:
            async with asyncio.timeout(self._server.startup_timeout_s):
                await connected
                listed = await self._list_tools()
        except TimeoutError:
            problem = f"did not list its tools within {self._server.startup_timeout_s:g} s"
            raise ToolServerError(self._with_stderr(problem)) from None
        except Exception as error:
            raise ToolServerError(self._with_stderr(f"does not start: {_last_cause(error)}")) from error
        wanted = self._server.tools
        missing = sorted(set(wanted or ()) - {tool.name for tool in listed})
        if missing:
            raise ToolServerError(f"{self._server.label} has no tool {missing}; it has {[t.name for t in listed]}")
        return [tool for tool in listed if wanted is None or tool.name in wanted]

    async def close(self) -> None:
        """End the session, and the process with it."""
        self._is_over.set()
        if self._holding is not None:
            if not self._is_connected:
                self._holding.cancel()  # only once here: the task ends the process while it unwinds
            await asyncio.wait([self._holding], timeout=_CLOSE_S)
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)
        if self._stderr is not None:
            self._stderr.close()

    async def _hold(self, connected: asyncio.Future[None]) -> None:
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        target: Any = self._server.url
        try:
            if target is None:
                self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `close`
                program, *arguments = self._server.command
                parameters = StdioServerParameters(command=program, args=arguments, env=dict(self._server.variables))
                target = stdio_client(parameters, self._stderr)
            async with Client(target) as self._client:
                self._is_connected = True
                if not connected.done():
                    connected.set_result(None)
                await self._is_over.wait()
        except Exception as error:  # noqa: BLE001  the library's, of many kinds: `open` classifies it
            if not connected.done():
                connected.set_exception(error)

    async def _list_tools(self) -> list[DescribedTool]:
        tools: list[DescribedTool] = []
        cursor: str | None = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += [
                DescribedTool(tool.name, tool.description or "", tool.input_schema, partial(self._call, tool.name))
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call.

        Raises:
            ToolError: If the tool reports an error, or the server refuses the call.
            ToolServerError: If the server died, or does not answer in time.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(self._call_timeout_s):
                result = await self._client.call_tool(name, dict(arguments))
        except TimeoutError:
            problem = f"did not answer a call of {name} within {self._call_timeout_s:g} s"
            raise ToolServerError(self._with_stderr(problem)) from None
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                raise ToolError(error.error.message) from error
            raise ToolServerError(self._with_stderr(f"ended during a call of {name}")) from error
        except Exception as error:
            raise ToolServerError(self._with_stderr(f"failed in a call of {name}: {_last_cause(error)}")) from error
        text = "\n".join(map(_text_of, result.content))
        if result.is_error:
            raise ToolError(text)
        return text

    def _with_stderr(self, problem: str) -> str:
        stderr = ""
        if self._stderr is not None:
            size = self._stderr.seek(0, 2)
            self._stderr.seek(max(size - _MAX_STDERR_BYTES, 0))
            stderr = self._stderr.read().strip()
        return f"{self._server.label} {problem}" + (f"; the end of its standard error: {stderr}" if stderr else "")


class McpToolEnvironment(ToolEnvironment):
    """A `ToolEnvironment` with the tools of MCP servers in addition to its own."""

    servers: Sequence[McpServer] = ()
    """MCP servers with the tools."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions: list[McpSession] = []

    async def reset(self, task: Task) -> Observation:
        """Start the servers, then return the prompt with all tools.

        Raises:
            ToolServerError: If a server does not start.
        """
        self.task = task
        await McpToolEnvironment.close(self)  # servers of the episode before; that of a subclass may end more
        self._sessions = [McpSession(server, self.tool_timeout_s) for server in self.servers]
        offered = [await session.open() for session in self._sessions]
        tools = [*self.tools, *(tool for tools in offered for tool in tools)]
        self.toolbox = Toolbox(tools, self.tool_timeout_s, self.max_result_characters)
        return Observation(task.prompt, tools=self.toolbox.schemas())

    async def close(self) -> None:
        """End the servers."""
        await asyncio.gather(*(session.close() for session in self._sessions))


def _text_of(part: Any) -> str:
    """Text of a part of a result; without one, its type, and its address if it has one."""
    resource = getattr(part, "resource", part)
    text, uri = getattr(resource, "text", None), getattr(resource, "uri", None)
    return text if text is not None else f"[{part.type}]" if uri is None else f"[{part.type}: {uri}]"


def _last_cause(error: BaseException) -> str:
    """The first leaf of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
