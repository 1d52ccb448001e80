"""A reward for code that passes the task's tests. The code runs in the sandbox, never in this process."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal, Self

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import RewardContext
from penstock.envs.sandbox.contract import Limits, Program, Sandbox
from penstock.envs.sandbox.open_sandbox import check_sandbox, open_sandbox

FENCED_BLOCK = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
Mode = Literal["share", "all"]

_HARNESS = """
import sys as _sys
_write, _flush = _sys.stdout.write, _sys.stdout.flush
_sys.stdin.close()
_module = _sys.modules["solution"] = type(_sys)("solution")
_space = _module.__dict__
try:
    exec(compile(open("solution.py").read(), "solution.py", "exec"), _space)
except BaseException as _error:
    _write(f"\\n{_token} failed solution {type(_error).__name__}\\n"); _flush(); raise
for _number, _test in enumerate(_tests):
    try:
        exec(compile(_test, f"test_{_number}", "exec"), _space)
    except BaseException:
        continue
    _write(f"\\n{_token} passed {_number}\\n"); _flush()
"""


class PythonCodeReward:
    """Runs the last fenced code block of the response with the task's tests.

    The task has `tests`: Python statements, each of which passes if it raises nothing (`assert add(1, 2) == 3`). They
    run one after the other in the namespace of the solution, in one program within the sandbox's limits. If the program
    hits a limit, the tests that have not passed by then fail. A response without a code block, or whose code fails,
    scores 0, because that is an error of the policy. If the sandbox itself fails, the trajectory fails instead.

    A case that hits a limit also fails all later cases, which are not run: an endless loop costs one `wall_s` for any
    number of cases, so that it scores 0 instead of exceeding `reward.timeout_s`.

    It does not protect against code that cheats: from inside the same interpreter, code can find the harness and report
    success (it cannot guess the token, but it can search for it). If that matters, give the tests as `stdin` / `stdout`
    pairs, `cases`: each runs as a program of its own, and its output is compared outside.

    Args:
        sandbox: Runs the programs.
        limits: Limits of one program.
        mode: `share` of the tests passed, or 1 only if `all` passed.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, mode: Mode) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._mode = mode
        self.is_called_before_start = True

    is_pure = False  # time limits depend on the machine

    @classmethod
    def build(cls, context: RewardContext, **args: Any) -> Self:
        """Build it from `reward.args`: `mode`.

        Raises:
            ConfigError: If this host allows no isolation and `sandbox.allow_unisolated` is off.
            ValueError: If an argument is unknown or wrong.
        """
        mode = args.pop("mode", "share")
        if args or mode not in ("share", "all"):
            raise ValueError(f"mode={mode!r} with {sorted(args)}; it takes mode=share or mode=all, and nothing else")
        check_sandbox(context.sandbox)
        reward = cls(open_sandbox(context.sandbox), context.sandbox.limits, mode)
        reward.is_called_before_start = context.sandbox.remote is None
        return reward

    async def __call__(
        self,
        trajectory: Trajectory,
        tests: Sequence[str] = (),
        cases: Sequence[Sequence[str]] = (),
        **_: Any,
    ) -> dict[str, float]:
        """Score the response: `reward`, and `passed` tests of `tests`.

        Args:
            trajectory: Its response holds the code.
            tests: Python statements.
            cases: Pairs of standard input and expected standard output; trailing blanks of lines and trailing empty
                lines are ignored.

        Raises:
            ValueError: If the task has neither.
            SandboxUnavailableError: If the sandbox failed.
        """
        num_tests = len(tests) + len(cases)
        if not num_tests:
            raise ValueError("the task has no tests and no cases, so there is nothing to run the code with")
        code = last_code_block(trajectory.response)
        passed = 0
        if code is not None:
            passed = await self._run_tests(code, tests) if tests else 0
            passed += await self._run_cases(code, cases)
        share = passed / num_tests
        return {"reward": share if self._mode == "share" else float(passed == num_tests), "passed": float(passed)}

    async def _run_tests(self, code: str, tests: Sequence[str]) -> int:
        token = secrets.token_hex(16)
        # As literals: importing a module to parse them would cost as much as the rest of the run.
        given = f"_token, _tests = {token!r}, {list(map(str, tests))!r}"
        program = Program(code=given + _HARNESS, files={"solution.py": code.encode()})
        result = await self._sandbox.run(program, self._limits)
        passed = re.findall(rf"^{token} passed (\d+)$", result.stdout, re.MULTILINE)
        return len(set(passed) & {str(number) for number in range(len(tests))})

    async def _run_cases(self, code: str, cases: Sequence[Sequence[str]]) -> int:
        programs = [Program(code=code, stdin=given.encode()) for given, _ in cases]
        results = await self._sandbox.run_in_turn(programs, self._limits) if programs else []
        expected = [_lines(stdout) for _, stdout in cases]
        return sum(
            result.is_ok and _lines(result.stdout) == lines for result, lines in zip(results, expected, strict=False)
        )


def last_code_block(text: str) -> str | None:
    """The code of the last closed fenced block that names Python or no language."""
    is_python = ("", "python", "python3", "py")
    blocks = [match["code"] for match in FENCED_BLOCK.finditer(text) if match["language"].strip().lower() in is_python]
    return blocks[-1] if blocks else None


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks, and without trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
