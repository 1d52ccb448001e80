"""Configuration of tasks, episodes and rewards."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from penstock.dataflow.settings import MAX_TIMEOUT_S, MIN_CALL_TIMEOUT_S, Settings

STRICT, PROCESS = "strict", "process"
PeerStyle = Literal["trl", "verl"]
"""Libraries whose reward functions are called as these libraries call them (envs/rewards/peer_styles.py)."""
OnLongPrompt = Literal["skip", "error"]
SpecialTokens = Literal["text", "tokens"]
TrainedThreads = Literal["agent", "all", "last", "strict"]
Ignorable = Literal["response_format", "tool_choice", "parallel_tool_calls"]


class IsolationConfig(Settings):
    """The permissions of isolated user code (docs/guides/sandbox.md); `strict` is an empty section."""

    network: bool = False
    """Whether it may use the host's network."""
    variables: tuple[str, ...] = ()
    """Environment variables that it sees, in addition to harmless ones."""
    read: tuple[str, ...] = ()
    """Paths that it may read, in addition to those of the system, this Python, the import path and `args`."""


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


class SourceConfig(Settings):
    """A source of tasks beside that of `env`."""

    factory: str | None = None
    """As `env.factory`; None is `env.factory`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that differ from `env.args`, or all of them for another factory."""
    max_open: int | None = Field(default=None, ge=1)
    """As `env.episode.max_open`, for its environments; None is `env.episode.max_open`."""


class StreamConfig(SourceConfig):
    """One of several streams of training tasks."""

    weight: float = Field(default=1.0, ge=0)
    """Share of admissions, relative to the other streams."""
    quota: float = Field(default=1.0, gt=0, le=1)
    """Largest share of the admission window that its live groups may take."""
    gate: float | None = None
    """When the mean reward of its newest groups reaches this value, the next stream begins. If any stream has a gate,
    the streams are stages in their order, and weights have no effect."""
    gate_groups: int = Field(default=32, ge=1, le=64)
    """Number of groups in that mean."""


class EpisodeConfig(Settings):
    """Limits of multi-turn episodes; without effect on single-turn tasks."""

    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in one episode, over all its threads."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Tokens of one thread, prompt and observations included; None is `model.max_context_tokens`."""
    max_threads: int = Field(default=8, ge=1)
    """Token sequences of one episode: agents, and forks (docs/guides/several-agents.md)."""
    timeout_s: float = Field(default=30.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    """Longest time for one reset or step; then the attempt fails (kind env), never reward 0."""
    startup_timeout_s: float = Field(default=120.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest time for loading the task source, and for opening one environment, seconds."""
    warm: int = Field(default=0, ge=0, le=100_000)
    """Idle environments of each task source that are kept open ahead of their episode, over all processes and nodes; 0
    opens one when its episode begins."""
    max_open: int | None = Field(default=None, ge=1)
    """Open environments of each task source, over all processes and nodes; further episodes wait. None is unlimited."""
    wait_timeout_s: float = Field(default=1800.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    """Longest time in which no waiting episode gets an environment, seconds; then the attempt fails (kind env)."""
    num_workers: int = Field(default=1, ge=1, le=10_000)
    """Environment processes; each plays many episodes concurrently."""
    max_memory_gib: float | None = Field(default=8.0, gt=0)
    """Memory of a process and its descendants, GiB; None is unlimited."""
    max_processes: int = Field(default=256, ge=1)
    """Concurrent processes of a worker."""
    isolation: Isolation = None
    """`process`, or None: a process with the user's permissions, killed at a limit. `strict` or a section: also in a
    sandbox, with the permissions of the section."""

    @model_validator(mode="after")
    def _warm_ones_fit(self) -> Self:
        if self.max_open is not None and self.warm > self.max_open:
            raise ValueError(
                f"episode.warm={self.warm} environments cannot be open while max_open={self.max_open}. Lower warm, or "
                "raise max_open."
            )
        return self


class EndpointConfig(Settings):
    """The endpoint where agent programs, and judges that use the policy, reach it. It listens only if needed."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port; 0 is a free one."""
    key_variable: str | None = None
    """Environment variable with a key for plain questions to the policy, such as those of a judge: greedy answers that
    are not recorded. None: only agent programs are answered."""
    threads: TrainedThreads = "agent"
    """Which histories of an agent program are trained. `agent`: those with the tools of the one that has the most
    turns, so neither titles nor summaries; `all`; `last`: what led to the last answer of the agent. `strict`: a program
    may have one history only, and what does not continue it is refused."""
    ignore: tuple[Ignorable, ...] = ()
    """Those of `response_format`, `tool_choice` and `parallel_tool_calls` that are accepted in requests without effect:
    the policy is not made to follow them (docs/guides/openai-endpoint.md). Others are refused."""


class ReasoningConfig(Settings):
    """The marks around the reasoning of a policy (envs/reasoning.py)."""

    open: str | None = Field(default="<think>", min_length=1)
    """Opens the reasoning at the beginning of a turn, or at the end of its prompt if the chat template opens it; None:
    every turn begins with reasoning."""
    close: str = Field(default="</think>", min_length=1)
    """The text after it is the answer. Without it there is no answer."""


class EnvConfig(Settings):
    """The source of tasks and their environment."""

    factory: str
    """Import path of a callable `(seed: int, **args) -> TaskSource` (envs/contract.py), or the name of an installed
    environment (`penstock env list`)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    python: str | None = None
    """Interpreter in which tasks and episodes run, with packages that do not fit beside ours: a path, or a program on
    PATH; it needs Python 3.11, numpy and pydantic. None is the interpreter of the run."""
    streams: dict[str, StreamConfig] = Field(default_factory=dict)
    """Name -> stream of training tasks, mixed by weight; empty: one stream, that of the factory. Held-out tasks are
    always the factory's."""
    curriculum: str | None = None
    """Import path of a `Curriculum` (dataflow/task_queue.py) that changes the weights; None is off."""
    episode: EpisodeConfig = EpisodeConfig()
    """Limits of multi-turn episodes."""
    endpoint: EndpointConfig = EndpointConfig()
    """The endpoint at which agent programs reach the policy."""
    on_long_prompt: OnLongPrompt = "skip"
    """What happens to tasks whose prompt, rendered by the chat template, leaves no space in `model.max_context_tokens`
    for an answer of `rollout.sampling.max_new_tokens`. `skip` leaves them out, of training and evaluation, and
    counts them; more than half of them is an error. `error` refuses the start."""
    reasoning: ReasoningConfig | None = None
    """Marks of the reasoning, which rewards, environments and agent programs get separately from the answer; `think` is
    `<think>` and `</think>`. None: the whole text is the answer."""
    tool_calls: str | None = None
    """Who reads the policy's tool calls: `hermes`, the form of Hermes and Qwen, or the name of a tool parser of vLLM,
    for `rollout/engine=vllm`. None: the one that reads the calls that the chat template writes; the run says which."""
    reasoning_parser: str | None = None
    """Name of a reasoning parser of vLLM, for answers of agent programs in families whose marks are special tokens;
    rewards and environments get the whole text. None: only the marks of `reasoning` are split off."""
    special_tokens: SpecialTokens = "text"
    """What `<|im_end|>` is if a prompt, an observation or a schema of a tool spells it: `text`, or `tokens`, the
    policy's control tokens, for prompts that are rendered already."""

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


class RewardPartConfig(Settings):
    """One of several rewards that are added up."""

    model_config = ConfigDict(allow_inf_nan=True)

    fn: str
    """As `reward.fn`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """As `reward.args`."""
    style: PeerStyle | None = None
    """As `reward.style`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value; 0 only records it."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value before weighting; None is unbounded."""


class RewardConfig(Settings):
    """The reward."""

    fn: str | None = None
    """Import path of a function `fn(trajectory, **task_fields) -> float | dict[str, float]`, sync or async, or of a
    class with `build` (contract.RewardFactory); None if there are `parts`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call, or of `build`."""
    style: PeerStyle | None = None
    """How `fn` is called: `trl` as a reward function of TRL, `verl` as `compute_score` of verl; None: as above."""
    parts: dict[str, RewardPartConfig] = Field(default_factory=dict)
    """Name -> reward, instead of `fn`: their weighted values are added up, and each is recorded."""
    num_workers: int = Field(default=1, ge=1, le=10_000)
    """Reward worker processes; on a GPU pool each has a GPU of its own."""
    pool: str | None = None
    """Pool that they run on, for a reward that computes on its devices (contract.RewardContext.device); None: on the
    driver's node, without a device."""
    num_parameters: int | None = Field(default=None, gt=0)
    """Parameters of its model, for the estimate of memory on `pool`; None: as many as the policy has."""
    startup_timeout_s: float = Field(default=120.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest time for loading it, seconds."""
    timeout_s: float = Field(default=10.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    """Longest time for one call, seconds; then the trajectory fails (kind reward), never reward 0."""
    max_concurrency: int = Field(default=256, ge=1, le=100_000)
    """Concurrent calls of an asynchronous function in each worker."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts of a call whose process dies, each in a new process; then the trajectory fails."""
    max_memory_gib: float | None = Field(default=4.0, gt=0)
    """Memory of a worker's process and its descendants, GiB; None is unlimited."""
    max_processes: int = Field(default=256, ge=1)
    """Concurrent processes of a worker."""
    isolation: Isolation = None
    """`process`, or None: a process with the user's permissions, killed at a limit. `strict` or a section: also in a
    sandbox, with the permissions of the section."""
    cache_entries: int = Field(default=4096, ge=0)
    """Results that each worker caches if the function is declared pure (contract.pure); with parts, results of each
    pure part."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.fn or " + ".join(self.parts) or "no reward"
