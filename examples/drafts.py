"""Parallel reasoning: a plan, `k` drafts that fork from it, and an answer that has read them all.

In this folder:

    penstock train experiment=arithmetic env.factory=drafts:Drafts env.episode.max_threads=4 reward=episode name=drafts
"""

from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.arithmetic import ArithmeticTasks


class Drafts(ArithmeticTasks):
    def environment(self):
        return Refine(k=3)

    def gold_actions(self, task):  # only for `penstock env check`: the plan, the drafts, the answer
        return ["", "", "", "", task.fields["answer"]]


class Refine(Environment):
    def __init__(self, k):
        self.k = k

    def step(self, action):
        if action.turn == 0:  # the plan, behind the prompt: all drafts begin with both
            return [Observation(f"#{i}:", thread=f"draft{i}", fork_of="main") for i in range(self.k)]
        return Done(float(action.text.rpartition(";")[2].strip() == self.task.fields["answer"]))

    def step_all(self, drafts):
        return Observation("|".join(["", *(draft.text for draft in drafts), "="]))  # back in `main`, as a quote
