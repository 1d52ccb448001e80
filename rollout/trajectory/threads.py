"""The threads of one episode: which turns are sampled next, after which tokens, and whether the budget allows them.

    thread: new --prompt or fork--> sampling --turn ended--> waiting --observation--> sampling …

Invariant: a sampled token has loss mask 1 only in the thread in which it was sampled; in forks of that thread it is
part of the prompt (docs/guides/several-agents.md).
"""

from __future__ import annotations

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import EpisodeEnd, Turn
from penstock.envs.environment import Action, Observation
from penstock.envs.threads import ThreadNames
from penstock.envs.tools.functions import parse_calls
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import Conversation, EpisodeBudget, PartialTurn


class Threads:
    """The conversations of an episode, extended by each reply of the environment.

    Attributes:
        conversations: Thread name -> conversation, in the order in which they were opened.
        pending_turns: Turns to sample now, each with its conversation, in the order of their observations.
    """

    def __init__(self, task: Task, codec: TokenCodec, budget: EpisodeBudget, sampling: SamplingParams) -> None:
        self.conversations: dict[str, Conversation] = {}
        self.pending_turns: list[tuple[Conversation, PartialTurn]] = []
        self._task = task
        self._codec = codec
        self._budget = budget
        self._sampling = sampling
        self._names = ThreadNames(task.task_id, budget.max_threads)
        self._order: list[tuple[Conversation, int]] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Finished turns of all threads, in the order of their observations."""
        return tuple(conversation.turns[index] for conversation, index in self._order)

    def receive(self, reply: EpisodeReply) -> EpisodeEnd | None:
        """Apply a reply of the environment. Returns why the episode ends, or None if there are turns to sample.

        Raises:
            TrajectoryError: kind `env`, if the observations are inconsistent, cannot be encoded, or ask for more turns
                than an episode has; kind `long_prompt`, final, if the first prompt, with its tools, exceeds the budget.
        """
        observations = self._names.check(reply)
        if not observations:
            return "done"
        if len(self._order) + len(observations) > self._budget.max_turns:
            what = (
                f"asks for {len(observations)} turns, the episode has {self._budget.max_turns} (env.episode.max_turns)"
            )
            return self._end("max_turns", what)
        encoded: list[tuple[Observation, Conversation | None, tuple[int, ...]]] = []
        for one in observations:
            before = self.conversations.get(one.thread if one.fork_of is None else one.fork_of)
            if before is None:
                token_ids = self._codec.encode_prompt(one.content, one.tools)
            else:
                content = one.messages if before.is_chat else one.text
                calls = parse_calls(before.turns[-1].response) if one.role == "tool" and before.turns else []
                names = [call.name for call in calls]
                token_ids = self._codec.encode_observation(content, before.token_ids[-1], names)
            encoded.append((one, before, token_ids))
        longest = max(len(ids) + (0 if before is None else before.num_tokens) for _, before, ids in encoded)
        if longest >= self._budget.max_tokens:
            limit = f"the budget of the episode is {self._budget.max_tokens} (env.episode.max_tokens)"
            return self._end("max_tokens", f"the prompt has {longest} tokens, {limit}")
        # Forks come first: they begin with the tokens that their thread had before this reply.
        new = [one for one in encoded if one[0].thread not in self.conversations]
        opened = {one.thread: self._open(one, before, token_ids) for one, before, token_ids in new}
        for one, _, token_ids in encoded:
            if one.thread in self.conversations:
                self.conversations[one.thread].add_observation(token_ids, self._codec.decode_prompt(token_ids))
        self.conversations |= opened
        next_up = [self.conversations[one.thread] for one in observations]
        self.pending_turns = [
            (conversation, conversation.next_turn(self._budget.max_tokens)) for conversation in next_up
        ]
        return None

    def take_actions(self) -> list[Action]:
        """Add the sampled turns to their conversations and return them as actions for the environment."""
        actions = []
        for conversation, partial in self.pending_turns:
            turn_text = self._codec.split(partial.token_ids, conversation.newest_text)
            conversation.add_turn(partial, turn_text)
            is_truncated = partial.finish_reason != "stop"
            turn = len(self._order)
            actions.append(Action(turn_text.answer, is_truncated, turn, conversation.name, turn_text.reasoning))
            self._order.append((conversation, len(conversation.turns) - 1))
        return actions

    def _end(self, end: EpisodeEnd, why: str) -> EpisodeEnd:
        """End the episode for an exhausted budget, which is an error if nothing was sampled yet."""
        if not self._order:
            told, is_long = f"reset of {self._task.task_id}: {why}, so nothing could be sampled", end == "max_tokens"
            raise TrajectoryError("long_prompt" if is_long else "env", told, is_final=is_long)
        return end

    def _open(self, observation: Observation, before: Conversation | None, token_ids: tuple[int, ...]) -> Conversation:
        is_chat = before.is_chat if before is not None else not isinstance(observation.content, str)
        opening = self._codec.decode_prompt(token_ids)
        return Conversation(token_ids, opening, self._sampling, observation.thread, is_chat=is_chat, fork_of=before)
