"""Penstock: asynchronous reinforcement-learning post-training of language models on Ray."""

import sys

__version__ = "0.1.0"

_TOOLS = ("DescribedTool", "ToolCall", "ToolError", "ToolResult", "ToolServerError", "Toolbox")
MOVED = {
    **{f"penstock.envs.tools.{name}": f"penstock.envs.tools.functions.{name}" for name in _TOOLS},
    "penstock.envs.agents": "penstock.envs.tasks.agents",
    "penstock.envs.arithmetic": "penstock.envs.tasks.arithmetic",
    "penstock.envs.arithmetic_form": "penstock.envs.rewards.arithmetic_form",
    "penstock.envs.generated_tasks": "penstock.envs.tasks.generated_tasks",
    "penstock.envs.math_tasks": "penstock.envs.tasks.math_tasks",
    "penstock.envs.mcp_tools": "penstock.envs.tools.mcp_tools",
    "penstock.envs.preferences": "penstock.envs.tasks.preferences",
    "penstock.envs.python_tasks": "penstock.envs.tasks.python_tasks",
    "penstock.envs.tool_environment": "penstock.envs.tools.tool_environment",
}
"""Public modules, and names of the module `tools` that is a folder now, by the paths they had before."""


class _Moved:
    """Asked when nothing else has found a module: an old name is answered with the new one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004 - Python's signature
        if name in MOVED:
            # `from package import name` ignores the error if its name is that of the missing module.
            raise ModuleNotFoundError(f"{name} has moved to {MOVED[name]}", name=MOVED[name])


sys.meta_path.append(_Moved)
