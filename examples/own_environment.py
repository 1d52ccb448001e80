"""Your own multi-turn environment, and a reward for it; docs/guides/first-environment.md explains the parts.

In this folder:

    penstock train experiment=arithmetic env.factory=own_environment:HotOrCold '~env.args' reward=episode \\
        reward.fn=own_reward:quick evaluation.num_tasks=64 name=own_environment
"""

from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks


class HotOrCold(GeneratedTasks):
    def draw(self, rng):
        return {"prompt": f"?{rng.randint(100, 999)}:", "secret": rng.randint(0, 9)}

    def environment(self):
        return Game()

    def gold_actions(self, task):  # only for `penstock env check`
        return [str(task.fields["secret"])]


class Game(Environment):
    guesses = 0

    def step(self, action):
        self.guesses += 1
        guess = next((int(sign) for sign in action.text if sign in "0123456789"), 10)
        distance = abs(guess - self.task.fields["secret"])
        if distance == 0 or self.guesses == 3:
            return Done({"near": 0.5 - distance / 20, "found": 0.5 * (distance == 0)})
        return Observation("<" if guess > self.task.fields["secret"] else ">", counts={"misses": 1})
