"""The threads of one episode: who speaks next, behind which tokens, and whether there is room.

    thread: not open --prompt, or fork--> speaks --its turn ended--> waits --an observation--> speaks …

Invariant: each sampled token has mask 1 in one thread, that in which it was sampled; in forks of it, it is part of the
prompt (docs/concepts/threads.md).
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.seeding import derive_seed
from penstock.dataflow.trajectory import MAIN_THREAD, EpisodeEnd, Task, Turn
from penstock.envs.environment import Action, Observation
from penstock.envs.threads import ThreadNames
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import Conversation, EpisodeBudget, PartialTurn


class Threads:
    """Grows reply by reply.

    Attributes:
        dialogues: By name, in the order in which they were opened.
        speaking: Turns to be sampled now, each with its thread, in the order of the observations that asked for them.
    """

    def __init__(self, task: Task, codec: TokenCodec, budget: EpisodeBudget, sampling: SamplingParams) -> None:
        self.dialogues: dict[str, Conversation] = {}
        self.speaking: list[tuple[Conversation, PartialTurn]] = []
        self._task = task
        self._codec = codec
        self._budget = budget
        self._sampling = sampling
        self._names = ThreadNames(task.task_id, budget.max_threads)
        self._order: list[tuple[Conversation, int]] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Finished ones of all threads, in the order in which they were asked for."""
        return tuple(dialogue.turns[index] for dialogue, index in self._order)

    def listen(self, reply: EpisodeReply) -> EpisodeEnd | None:
        """Take what the environment said; says why the episode ends, or None: there are turns to sample.

        Raises:
            TrajectoryError: kind `env`, if it cannot be said, no token stands for it, or the first prompt leaves no
                room.
        """
        said = self._names.listen(reply)
        if not said:
            return "done"
        if len(self._order) + len(said) > self._budget.max_turns:
            what = f"asks for {len(said)} turns, the episode has {self._budget.max_turns} (env.episode.max_turns)"
            return self._is_over("max_turns", what)
        heard: list[tuple[Observation, Conversation | None, tuple[int, ...]]] = []
        for one in said:
            before = self.dialogues.get(one.thread if one.fork_of is None else one.fork_of)
            if before is None:
                token_ids = self._codec.encode_prompt(one.content)
            else:
                content = one.messages if before.is_chat else one.text
                token_ids = self._codec.encode_observation(content, before.token_ids[-1])
            heard.append((one, before, token_ids))
        longest = max(len(ids) + (0 if before is None else before.num_tokens) for _, before, ids in heard)
        if longest >= self._budget.max_tokens:
            limit = f"the budget of the episode is {self._budget.max_tokens} (env.episode.max_tokens)"
            return self._is_over("max_tokens", f"the prompt has {longest} tokens, {limit}")
        # Forks first: they begin with what was there before the thread that they fork hears more.
        new = [one for one in heard if one[0].thread not in self.dialogues]
        opened = {one.thread: self._open(one, before, token_ids) for one, before, token_ids in new}
        for one, _, token_ids in heard:
            if one.thread in self.dialogues:
                self.dialogues[one.thread].observed(token_ids, self._codec.decode(token_ids))
        self.dialogues |= opened
        speakers = [self.dialogues[one.thread] for one in said]
        self.speaking = [(dialogue, dialogue.next_turn(self._budget.max_tokens)) for dialogue in speakers]
        return None

    def spoken(self) -> list[Action]:
        """The turns that were sampled, as the environment gets them."""
        actions = []
        for dialogue, partial in self.speaking:
            spoken = self._codec.split(partial.token_ids, dialogue.newest_text)
            dialogue.sampled(partial, spoken)
            is_truncated = partial.finish_reason != "stop"
            turn = len(self._order)
            actions.append(Action(spoken.answer, is_truncated, turn, dialogue.name, spoken.reasoning))
            self._order.append((dialogue, len(dialogue.turns) - 1))
        return actions

    def _is_over(self, end: EpisodeEnd, why: str) -> EpisodeEnd:
        """A budget is used up, which is an error where nothing was sampled yet."""
        if not self._order:
            raise TrajectoryError("env", f"reset of {self._task.task_id}: {why}, so nothing could be sampled")
        return end

    def _open(self, said: Observation, before: Conversation | None, token_ids: tuple[int, ...]) -> Conversation:
        """A new thread, with a seed of its own: two with one prompt would else draw the same tokens."""
        name, opening = said.thread, self._codec.decode(token_ids)
        seed = self._sampling.seed
        if seed is not None and name != MAIN_THREAD:
            seed = derive_seed(seed, zlib.crc32(name.encode()))
        sampling = replace(self._sampling, seed=seed)
        if before is None:
            return Conversation(token_ids, opening, sampling, name, is_chat=not isinstance(said.content, str))
        everything = (*before.token_ids, *token_ids)
        return Conversation(everything, opening, sampling, name, is_chat=before.is_chat, fork_of=before)
