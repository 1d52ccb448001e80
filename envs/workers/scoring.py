"""The Ray-free core of a reward worker: the user's function in a process that can be killed, and its time-outs.

A failure is never a reward. A call that raises, hangs, kills its process or returns no finite number becomes a
`TrajectoryError` of kind `reward`. Every other call gets its score, even if concurrent calls fail.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.dataflow.errors import ConfigError, PenstockError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.reward_result import Reply
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.child_process import ChildProcess, reward_spec
from penstock.envs.workers.reward_cache import LruCache, cache_key
from penstock.envs.workers.reward_child import encode_frame

_ASYNC_GRACE_S = 1.0


@dataclass(slots=True)
class _Call:
    """One trajectory to score."""

    call_id: int
    label: str
    body: bytes
    """Pickled once; the same bytes go to the next process if this one dies."""
    outcome: asyncio.Future[Score]
    key: bytes | None = None
    """Cache key of its score; None if it is not cached."""
    is_alone: bool = False
    """Suspected of blocking or killing the process, so it is sent without concurrent calls."""
    deaths: int = 0
    """Processes that died while running it."""
    sent_at: float = 0.0


class RewardRunner:
    """Scores trajectories with a user's function (sync or async) in a warm, killable child process.

    A synchronous function gets its calls one after the other, an asynchronous one concurrently. If a synchronous call
    takes longer than `timeout_s`, the process and its descendants are killed and replaced; the next process scores the
    calls after it. An asynchronous call is cancelled, and the process is killed only if that fails.

    Use it from one event loop, whose thread must outlive it: the child dies with the thread that started it.

    Args:
        config: The function and its limits.
        sandbox: Sandbox of rewards that run programs.
        device: Device of the reward's model.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig | None = None, device: Device = "cpu") -> None:
        self._config = config
        self._label = config.label
        self._sandbox = sandbox or SandboxConfig()
        self._timeout_s = config.timeout_s
        self._device = device
        self._cache: LruCache[Score] = LruCache(config.cache_entries)
        self._is_caching = False  # until the process reports that the function is pure
        # An unsettled call is in exactly one of the two, so none is lost or scored twice.
        self._waiting: deque[_Call] = deque()
        self._in_flight: dict[int, _Call] = {}
        self._process: ChildProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._next_id = 1
        self._progress_at = 0.0
        self._is_shut_down = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the child before the first call.

        Raises:
            ConfigError: If the function does not load.
            TrajectoryError: kind `reward`, if the machine cannot start the process now; the next call tries again.
        """
        if self._process is None:
            await asyncio.shield(self._ensure_starting())
        if self._process is None:
            raise ConfigError(f"reward.fn={self._label!r}: the reward runner has been shut down.")

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory.

        Raises:
            TrajectoryError: kind `reward`, if the function raised, hung, died or returned no finite number.
            ConfigError: If the function does not load.
        """
        return await self._submit(task, trajectory)

    async def score_many(self, pairs: Sequence[tuple[Task, Trajectory]]) -> list[Score | TrajectoryError]:
        """Score many trajectories; failures are returned in place of scores.

        Raises:
            ConfigError: If the function does not load.
        """
        futures = [self._submit(task, trajectory) for task, trajectory in pairs]
        results = await asyncio.gather(*futures, return_exceptions=True)
        for result in results:
            if not isinstance(result, (Score, TrajectoryError)):
                raise result
        return [result for result in results if isinstance(result, (Score, TrajectoryError))]

    async def shutdown(self) -> None:
        """End the child and fail unfinished calls. The runner cannot be used again."""
        self._is_shut_down = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._drop_process()
        self._fail_all(TrajectoryError("reward", f"{self._label}: the reward worker was shut down"))

    def _submit(self, task: Task, trajectory: Trajectory) -> asyncio.Future[Score]:
        outcome: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        key = cache_key(trajectory, task.fields) if self._is_caching else None
        if key is not None and (cached := self._cache.get(key)) is not None:
            outcome.set_result(cached)
            return outcome
        label = f"{self._label} on {trajectory.trajectory_id} ({task.task_id})"
        if self._is_shut_down:
            outcome.set_exception(TrajectoryError("reward", f"{label}: the reward worker was shut down"))
            return outcome
        try:
            body = pickle.dumps((trajectory, dict(task.fields)), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  user data: an error of its pickling fails the call
            outcome.set_exception(TrajectoryError("reward", f"{label}: the task cannot be sent: {error!r}"))
            return outcome
        self._waiting.append(_Call(self._next_id, label, body, outcome, key))
        self._next_id += 1
        # Pump after the caller has submitted all its calls, so that the whole batch is one write.
        asyncio.get_running_loop().call_soon(self._pump)
        return outcome

    def _pump(self) -> None:
        """Send as many waiting calls as allowed to the process; start one if there is none."""
        if not self._waiting or self._is_shut_down:
            return
        if self._process is None:
            self._ensure_starting()
            return
        now = asyncio.get_running_loop().time()
        if not self._in_flight:
            self._progress_at = now
        frames = []
        while self._waiting and self._may_send(self._waiting[0]):
            call = self._waiting.popleft()
            call.sent_at = now
            self._in_flight[call.call_id] = call
            frames.append(encode_frame(call.call_id, call.body))
        if frames:
            self._process.write(b"".join(frames))
            self._arm_watchdog()

    def _may_send(self, call: _Call) -> bool:
        oldest = self._oldest()
        if oldest is None:
            return True
        return not call.is_alone and not oldest.is_alone and len(self._in_flight) < self._config.max_concurrency

    def _oldest(self) -> _Call | None:
        """The oldest call in flight."""
        return next(iter(self._in_flight.values()), None)

    def _on_reply(self, call_id: int, reply: Reply) -> None:
        call = self._in_flight.pop(call_id, None)
        if call is None:
            return
        self._progress_at = asyncio.get_running_loop().time()
        if "reward" in reply or "abstains" in reply:
            score = Score(None) if "abstains" in reply else Score(reply["reward"], reply["parts"], reply.get("answer"))
            if call.key is not None:
                self._cache.put(call.key, score)
            if not call.outcome.done():
                call.outcome.set_result(score)
        else:
            self._fail(call, f"timed out after {self._timeout_s:g} s" if "timed_out" in reply else reply["error"])
        self._pump()

    def _fail(self, call: _Call, what: str) -> None:
        if not call.outcome.done():
            call.outcome.set_exception(TrajectoryError("reward", f"{call.label}: {what}"))

    def _arm_watchdog(self) -> None:
        if self._watchdog is None and (when := self._deadline()) is not None:
            self._watchdog = asyncio.get_running_loop().call_at(when, self._on_watchdog)

    def _deadline(self) -> float | None:
        """Loop time by which the process must have answered its oldest call; None if it has none."""
        oldest = self._oldest()
        if self._process is None or oldest is None:
            return None
        if self._process.hello["is_async"]:
            return oldest.sent_at + self._timeout_s + _ASYNC_GRACE_S
        return max(oldest.sent_at, self._progress_at) + self._timeout_s

    def _on_watchdog(self) -> None:
        self._watchdog = None
        deadline = self._deadline()
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            what = f"timed out after {self._timeout_s:g} s; its process was killed and replaced"
            self._replace_process(what, is_hang=True)
        self._arm_watchdog()

    def _on_exit(self, process: ChildProcess) -> None:
        how = process.end()
        if process is self._process:
            self._replace_process(f"its process {how}", is_hang=False)

    def _replace_process(self, what: str, *, is_hang: bool) -> None:
        """Kill the process, fail the call that caused the hang or the death, and send the other calls again, in order.

        A synchronous process runs only its oldest call, and a call that was sent alone is the only one. Such a call is
        certainly the cause: it fails at once after a hang, and at the last attempt after a death. Otherwise any call in
        flight may be the cause, and one that was in flight `max_attempts` times is sent alone from then on.
        """
        assert self._process is not None
        oldest, max_deaths = self._oldest(), self._config.max_attempts
        if oldest is not None and (oldest.is_alone or not self._process.hello["is_async"]):
            oldest.deaths += 1
            oldest.is_alone = True
            if is_hang or oldest.deaths >= max_deaths:
                del self._in_flight[oldest.call_id]
                times = f", {oldest.deaths} times in a row" if oldest.deaths > 1 and not is_hang else ""
                self._fail(oldest, what + times)
        else:
            for call in self._in_flight.values():
                call.deaths += 1
                call.is_alone = call.deaths >= max_deaths
        self._drop_process()
        self._waiting.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()
        self._pump()

    def _drop_process(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _ensure_starting(self) -> asyncio.Task[None]:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start_process())
            # Marks the exception as retrieved: every waiting call gets it.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._starting

    async def _start_process(self) -> None:
        process = ChildProcess(reward_spec(self._config, self._sandbox, self._device), self._on_reply, self._on_exit)
        try:
            await process.start(self._config.startup_timeout_s)
        except PenstockError as error:
            self._fail_all(error)
            raise
        except Exception as error:
            what = f"{self._label}: its process cannot be started: {type(error).__name__}: {error}"
            failure = TrajectoryError("reward", what)
            self._fail_all(failure)
            raise failure from error
        else:
            self._process = process
        finally:
            self._starting = None
            if self._process is not process:
                process.kill()
        self._is_caching = process.hello["is_pure"] and self._config.cache_entries > 0
        self._pump()

    def _fail_all(self, error: Exception) -> None:
        calls = [*self._in_flight.values(), *self._waiting]
        self._in_flight.clear()
        self._waiting.clear()
        for call in calls:
            if not call.outcome.done():
                call.outcome.set_exception(error)
