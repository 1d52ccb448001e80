"""Which tasks fit the policy: the rendered prompt and an answer of full length within its context.

    fits = prompt tokens + max_new_tokens ≤ max_context_tokens

A task that does not fit is skipped before it is admitted (`env.on_long_prompt`), and is counted where it was drawn:
training tasks by the task queue, held-out tasks by their evaluation.
"""

from __future__ import annotations

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.rollout.tokenization.tokenizers import TokenCodec


class PromptLimit:
    """Judges tasks by their prompt.

    Args:
        codec: Tokenizer and chat template of the policy.
        max_prompt_tokens: Longest prompt that leaves space for an answer, tokens.
    """

    def __init__(self, codec: TokenCodec, max_prompt_tokens: int) -> None:
        self._codec = codec
        self.max_prompt_tokens = max_prompt_tokens

    def fits(self, task: Task) -> bool:
        """Whether the prompt leaves space for an answer. One that cannot be encoded fails later, with its own cause."""
        try:
            return len(self._codec.encode_prompt(task.prompt)) <= self.max_prompt_tokens
        except (ConfigError, TrajectoryError):
            return True
