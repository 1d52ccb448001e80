"""A reward for code that passes the task's tests. The code runs in the sandbox, never in this process."""

from __future__ import annotations

import json
import re
import secrets
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import RewardContext
from penstock.envs.sandbox.contract import Limits, Program, Sandbox
from penstock.envs.sandbox.open_sandbox import check_sandbox, open_sandbox

_FENCE = re.compile(r"([ \t]*)```([^`]*)")
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
        tests: str | Sequence[str] = (),
        cases: Sequence[Sequence[str] | Mapping[str, str]] = (),
        **_: Any,
    ) -> dict[str, float]:
        """Score the response: `reward`, and `passed` tests of `tests`.

        Args:
            trajectory: Its response holds the code.
            tests: Python statements; one text is one test.
            cases: Pairs of standard input and expected standard output, also as `{"input": ..., "output": ...}`;
                trailing blanks of lines and trailing empty lines are ignored.

        Raises:
            ValueError: If the task has neither, or one has another form, or no program may print what a case expects.
            SandboxUnavailableError: If the sandbox failed.
        """
        statements, pairs = _statements(tests), _pairs(cases)
        num_tests = len(statements) + len(pairs)
        if not num_tests:
            raise ValueError("the task has no tests and no cases, so there is nothing to run the code with")
        max_bytes = self._limits.max_output_kib << 10
        for number, (_given, stdout) in enumerate(pairs):
            num_bytes = len("\n".join(_lines(stdout)).encode())
            if num_bytes > max_bytes:
                raise ValueError(
                    f"the output of cases[{number}] of the task has {num_bytes} bytes, and a program that prints more "
                    f"than {max_bytes} is ended (sandbox.limits.max_output_kib={self._limits.max_output_kib}), so no "
                    "code would pass. Raise the limit, or leave such cases out"
                )
        code = last_code_block(trajectory.response)
        passed = 0
        if code is not None:
            passed = await self._run_tests(code, statements) if statements else 0
            passed += await self._run_cases(code, pairs)
        share = passed / num_tests
        return {"reward": share if self._mode == "share" else float(passed == num_tests), "passed": float(passed)}

    async def _run_tests(self, code: str, tests: list[str]) -> int:
        token = secrets.token_hex(16)
        # As literals: importing a module to parse them would cost as much as the rest of the run.
        given = f"_token, _tests = {token!r}, {tests!r}"
        program = Program(code=given + _HARNESS, files={"solution.py": code.encode()})
        result = await self._sandbox.run(program, self._limits)
        passed = re.findall(rf"^{token} passed (\d+)$", result.stdout, re.MULTILINE)
        return len(set(passed) & {str(number) for number in range(len(tests))})

    async def _run_cases(self, code: str, cases: list[tuple[str, str]]) -> int:
        programs = [Program(code=code, stdin=given.encode()) for given, _ in cases]
        results = await self._sandbox.run_in_turn(programs, self._limits) if programs else []
        expected = [_lines(stdout) for _, stdout in cases]
        return sum(
            result.is_ok and _lines(result.stdout) == lines for result, lines in zip(results, expected, strict=False)
        )


def last_code_block(text: str) -> str | None:
    """The code of the last closed fenced block that names Python; without one, of the last that names no language."""
    found = {}
    for info, code in fenced_blocks(text):
        language = re.split(r"\W", info, maxsplit=1)[0].lower() or info
        if language in ("", "python", "python3", "py"):
            found[language != ""] = code
    return found.get(True, found.get(False))


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """What the opening fence says, and the code, of each fenced block that is closed.

    A fence closes a block if it is not indented more than the one that opened it, as those in docstrings are, or if it
    is at the end of a line without other backticks.
    """
    opening = None
    lines: list[str] = []
    for line in text.split("\n"):
        if opening is None:
            opening = _FENCE.fullmatch(line)
            lines.clear()
            continue
        last = line.rstrip().removesuffix("```")
        is_closing = line.rstrip() != last and "`" not in last and (last.strip() or len(last) <= len(opening[1]))
        lines.append(last if is_closing else line)
        if is_closing:
            code = "\n".join(lines)
            yield opening[2].strip(), textwrap.dedent(code) if opening[1] else code
            opening = None


def _statements(tests: Any) -> list[str]:
    """The tests of a task.

    Raises:
        ValueError: If they are no Python statements, which could pass with any code or with none.
    """
    statements = [tests] if isinstance(tests, str) else tests
    is_listed = isinstance(statements, Sequence) and all(isinstance(test, str) for test in statements)
    if not is_listed or (isinstance(tests, str) and _is_json(tests)):
        raise ValueError(
            f"the task has tests={tests!r:.200}; it takes Python statements, as a list of texts or as one text, and "
            "pairs of standard input and output as cases"
        )
    return list(map(str, statements))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _pairs(cases: Any) -> list[tuple[str, str]]:
    """Standard input and expected output of the cases of a task.

    Raises:
        ValueError: If one is no pair of texts.
    """
    is_listed = isinstance(cases, Sequence) and not isinstance(cases, str)
    if not is_listed:
        raise ValueError(f"the task has cases={cases!r:.200}; it takes a list of pairs of standard input and output")
    pairs = []
    for number, case in enumerate(cases):
        match case:
            case [str(given), str(stdout)]:
                pairs.append((given, stdout))
            case {"input": str(given), "output": str(stdout), **others} if not others:
                pairs.append((given, stdout))
            case _:
                raise ValueError(
                    f"the task has cases[{number}]={case!r:.200}; each is a pair of texts, standard input and output, "
                    'or {"input": text, "output": text}'
                )
    return pairs


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks, and without trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
