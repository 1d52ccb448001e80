"""Configuration of tasks, episodes and rewards."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from penstock.dataflow.limits import MAX_TIMEOUT_S, MIN_CALL_TIMEOUT_S

STRICT, PROCESS = "strict", "process"
PeerStyle = Literal["trl", "verl"]
"""Libraries whose reward functions are called as these libraries call them (envs/rewards/peer_styles.py)."""
OnLongPrompt = Literal["skip", "error"]
SpecialTokens = Literal["text", "tokens"]


class IsolationConfig(BaseModel):
    """The permissions of isolated user code (docs/guides/sandbox.md); `strict` is an empty section.

    Attributes:
        network: Whether it may use the host's network.
        variables: Environment variables that it sees, in addition to harmless ones.
        read: Paths that it may read, in addition to those of the system, this Python, the import path and `args`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    network: bool = False
    variables: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


def _named_isolation(value: object) -> object:
    """Resolve the names `strict` and `process`."""
    if isinstance(value, str):
        if value not in (STRICT, PROCESS):
            near = get_close_matches(value, [STRICT, PROCESS], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"it is process, strict, or a section with network, variables and read.{hint}")
        return {} if value == STRICT else None
    if isinstance(value, dict):
        return {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
    return value


Isolation = Annotated[IsolationConfig | None, BeforeValidator(_named_isolation)]


class StreamConfig(BaseModel):
    """One of several streams of training tasks.

    Attributes:
        factory: As `env.factory`; None is `env.factory`.
        args: Keyword arguments that differ from `env.args`, or all of them for another factory.
        weight: Share of admissions, relative to the other streams.
        quota: Largest share of the admission window that its live groups may take.
        gate: When the mean reward of its newest groups reaches this value, the next stream begins. If any stream has a
            gate, the streams are stages in their order, and weights have no effect.
        gate_groups: Number of groups in that mean.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    factory: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, ge=0)
    quota: float = Field(default=1.0, gt=0, le=1)
    gate: float | None = None
    gate_groups: int = Field(default=32, ge=1, le=64)


class EpisodeConfig(BaseModel):
    """Limits of multi-turn episodes; without effect on single-turn tasks.

    Attributes:
        max_turns: Turns of the policy in one episode, over all its threads.
        max_tokens: Tokens of one thread, prompt and observations included; None is `model.max_context_tokens`.
        max_threads: Token sequences of one episode: agents, and forks (docs/concepts/threads.md).
        timeout_s: Longest time for one reset or step; then the attempt fails (kind env), never reward 0.
        startup_timeout_s: Longest time for loading the environment, seconds.
        num_workers: Environment processes; each plays many episodes concurrently.
        max_memory_gib: Memory of a process and its descendants, GiB; None is unlimited.
        max_processes: Concurrent processes of a worker.
        isolation: `process`, or None: a process with the user's permissions, killed at a limit. `strict` or a
            section: also in a sandbox, with the permissions of the section.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_turns: int = Field(default=8, ge=1)
    max_tokens: int | None = Field(default=None, ge=2)
    max_threads: int = Field(default=8, ge=1)
    timeout_s: float = Field(default=30.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    startup_timeout_s: float = Field(default=120.0, ge=1, le=MAX_TIMEOUT_S)
    num_workers: int = Field(default=1, ge=1, le=10_000)
    max_memory_gib: float | None = Field(default=8.0, gt=0)
    max_processes: int = Field(default=256, ge=1)
    isolation: Isolation = None


class EndpointConfig(BaseModel):
    """The endpoint where agent programs, and judges that use the policy, reach it. It listens only if needed.

    Attributes:
        host: Address to listen on.
        port: TCP port; 0 is a free one.
        key_variable: Environment variable with a key for plain questions to the policy, such as those of a judge:
            greedy answers that are not recorded. None: only agent programs are answered.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    key_variable: str | None = None


class ReasoningConfig(BaseModel):
    """The marks around the reasoning of a policy (envs/reasoning.py).

    Attributes:
        open: Opens the reasoning at the beginning of a turn, or at the end of its prompt if the chat template opens it;
            None: every turn begins with reasoning.
        close: The text after it is the answer. Without it there is no answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    open: str | None = Field(default="<think>", min_length=1)
    close: str = Field(default="</think>", min_length=1)


class EnvConfig(BaseModel):
    """The source of tasks and their environment.

    Attributes:
        factory: Import path of a callable `(seed: int, **args) -> TaskSource` (envs/contract.py), or the name of an
            installed environment (`penstock env list`).
        args: Keyword arguments of the factory.
        streams: Name -> stream of training tasks, mixed by weight; empty: one stream, that of the factory. Held-out
            tasks are always the factory's.
        curriculum: Import path of a `Curriculum` (dataflow/task_queue.py) that changes the weights; None is off.
        episode: Limits of multi-turn episodes.
        endpoint: The endpoint at which agent programs reach the policy.
        on_long_prompt: What happens to tasks whose prompt, rendered by the chat template, leaves no space in
            `model.max_context_tokens` for an answer of `rollout.sampling.max_new_tokens`. `skip` leaves them out, of
            training and evaluation, and counts them; more than half of them is an error. `error` refuses the start.
        reasoning: Marks of the reasoning, which rewards, environments and agent programs get separately from the
            answer; `think` is `<think>` and `</think>`. None: the whole text is the answer.
        special_tokens: What `<|im_end|>` is if a prompt, an observation or a schema of a tool spells it: `text`, or
            `tokens`, the policy's control tokens, for prompts that are rendered already.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    factory: str
    args: dict[str, Any] = Field(default_factory=dict)
    streams: dict[str, StreamConfig] = Field(default_factory=dict)
    curriculum: str | None = None
    episode: EpisodeConfig = EpisodeConfig()
    endpoint: EndpointConfig = EndpointConfig()
    on_long_prompt: OnLongPrompt = "skip"
    reasoning: ReasoningConfig | None = None
    special_tokens: SpecialTokens = "text"

    @property
    def has_stages(self) -> bool:
        """Whether the streams follow one another, by gates."""
        return any(stream.gate is not None for stream in self.streams.values())

    @field_validator("reasoning", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Resolve the name `think`."""
        if isinstance(value, str) and value != "think":
            near = " Did you mean think?" if get_close_matches(value, ["think"]) else ""
            raise ValueError(f"it is null, think, or a section with open and close.{near}")
        return {} if value == "think" else value


class RewardPartConfig(BaseModel):
    """One of several rewards that are added up.

    Attributes:
        fn: As `reward.fn`.
        args: As `reward.args`.
        style: As `reward.style`.
        weight: Factor of its value; 0 only records it.
        clip: Lowest and highest value before weighting; None is unbounded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fn: str
    args: dict[str, Any] = Field(default_factory=dict)
    style: PeerStyle | None = None
    weight: float = Field(default=1.0, allow_inf_nan=False)
    clip: tuple[float, float] | None = None


class RewardConfig(BaseModel):
    """The reward.

    Attributes:
        fn: Import path of a function `fn(trajectory, **task_fields) -> float | dict[str, float]`, sync or async, or of
            a class with `build` (contract.RewardFactory); None if there are `parts`.
        args: Keyword arguments of every call, or of `build`.
        style: How `fn` is called: `trl` as a reward function of TRL, `verl` as `compute_score` of verl; None: as above.
        parts: Name -> reward, instead of `fn`: their weighted values are added up, and each is recorded.
        num_workers: Reward worker processes; on a GPU pool each has a GPU of its own.
        pool: Pool that they run on, for a reward that computes on its devices (contract.RewardContext.device); None: on
            the driver's node, without a device.
        num_parameters: Parameters of its model, for the estimate of memory on `pool`; None: as many as the policy has.
        startup_timeout_s: Longest time for loading it, seconds.
        timeout_s: Longest time for one call, seconds; then the trajectory fails (kind reward), never reward 0.
        max_concurrency: Concurrent calls of an asynchronous function in each worker.
        max_attempts: Attempts of a call whose process dies, each in a new process; then the trajectory fails.
        max_memory_gib: Memory of a worker's process and its descendants, GiB; None is unlimited.
        max_processes: Concurrent processes of a worker.
        isolation: `process`, or None: a process with the user's permissions, killed at a limit. `strict` or a
            section: also in a sandbox, with the permissions of the section.
        cache_entries: Results that each worker caches if the function is declared pure (contract.pure); with parts,
            results of each pure part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fn: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    style: PeerStyle | None = None
    parts: dict[str, RewardPartConfig] = Field(default_factory=dict)
    num_workers: int = Field(default=1, ge=1, le=10_000)
    pool: str | None = None
    num_parameters: int | None = Field(default=None, gt=0)
    startup_timeout_s: float = Field(default=120.0, ge=1, le=MAX_TIMEOUT_S)
    timeout_s: float = Field(default=10.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    max_concurrency: int = Field(default=256, ge=1, le=100_000)
    max_attempts: int = Field(default=2, ge=1)
    max_memory_gib: float | None = Field(default=4.0, gt=0)
    max_processes: int = Field(default=256, ge=1)
    isolation: Isolation = None
    cache_entries: int = Field(default=4096, ge=0)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.fn or " + ".join(self.parts) or "no reward"
