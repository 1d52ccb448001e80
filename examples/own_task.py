"""Your own tasks and your own reward in one file; docs/extending.md goes through it.

The tiny policy of `make demo` can answer these prompts: its tokenizer knows digits and `+-*/=();`. In this folder:

    penstock train experiment=arithmetic env.factory=own_task:MyTasks '~env.args' reward.fn=own_task:my_fn \
        model.path=../runs/arithmetic_sft-seed0/policy name=own
"""

import random
from collections.abc import Iterator
from hashlib import sha256
from itertools import combinations_with_replacement

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory


class MyTasks:
    def __init__(self, seed: int) -> None:
        self.seed, self.train_tasks, self.held_out_tasks = seed, [], []
        for a, b in combinations_with_replacement(range(100, 300), 2):
            is_held_out = sha256(f"{a}+{b}".encode()).digest()[0] < 26  # a tenth, by a hash: nothing leaks
            side = self.held_out_tasks if is_held_out else self.train_tasks
            side.append(Task(f"sums/{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}))
        random.Random(0).shuffle(self.held_out_tasks)

    def train(self) -> Iterator[Task]:  # endless, the same for the same seed
        rng = random.Random(self.seed)
        while True:
            yield rng.choice(self.train_tasks)

    def held_out(self, num_tasks: int) -> list[Task]:  # all if there are fewer; the same for every seed
        return self.held_out_tasks[:num_tasks]


def my_fn(trajectory: Trajectory, answer: str, **_: object) -> float:  # called with the fields of the task
    return float(trajectory.response.rpartition(";")[2] == answer)
