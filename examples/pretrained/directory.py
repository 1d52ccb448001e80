"""A task of two turns with a slow tool: whom to ask, then what that person's entry in a directory says.

    user       Nora is a baker. Omar is a pilot. Whom do you ask where the pilot works? Answer with the name only.
    assistant  Omar
    user       Omar works in Lima. In which city does the pilot work? Answer with the city only.
    assistant  Lima

The directory takes 0.2 s and more, sometimes seconds. `make real TASK=directory` trains on it.
"""

from __future__ import annotations

import asyncio
import random
import re

from examples.pretrained.facts import CITIES, JOBS, NAMES
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

LEAST_S, MEDIAN_S, MOST_S, SIGMA = 0.2, 0.6, 10.0, 1.0


class Directory(GeneratedTasks):
    """Three people; one is asked about by the job."""

    def draw(self, rng: random.Random) -> dict:
        names, jobs, cities = (rng.sample(one, 3) for one in (NAMES, JOBS, CITIES))
        asked = rng.randrange(3)
        people = [f"{name} is a {job}." for name, job in zip(names, jobs, strict=True)]
        question = f"{' '.join(people)} Whom do you ask where the {jobs[asked]} works? Answer with the name only."
        return {
            "prompt": [{"role": "user", "content": question}],
            "people": people,
            "entries": dict(zip(names, cities, strict=True)),
            "job": jobs[asked],
            "answer": cities[asked],
        }

    def split_by(self, row: dict) -> dict:
        """Held out are people with their jobs, in whatever order, whoever of them is asked about."""
        return {"people": sorted(row["people"])}

    def environment(self) -> Environment:
        return Enquiry()

    def gold_actions(self, task) -> list[str]:
        name = next(name for name, city in task.fields["entries"].items() if city == task.fields["answer"])
        return [name, task.fields["answer"]]


class Enquiry(Environment):
    has_asked = False

    async def step(self, action: Action) -> Observation | Done:
        words = set(re.findall(r"\w+", action.text))
        if self.has_asked:
            return Done(float(words & set(CITIES) == {self.task.fields["answer"]}))
        self.has_asked = True
        people = words & set(self.task.fields["entries"])
        if len(people) != 1:  # nobody, or several at once
            return Done(0.0, counts={"asked_nobody": 1})
        name = people.pop()
        await asyncio.sleep(latency_s(f"{self.task.task_id} {name}"))
        city = self.task.fields["entries"][name]
        question = f"In which city does the {self.task.fields['job']} work? Answer with the city only."
        return Observation(f"{name} works in {city}. {question}", counts={"lookups": 1})


def latency_s(call: str) -> float:
    """Of one lookup: lognormal, the same for the same call in every run."""
    drawn = random.Random(call).lognormvariate(0.0, SIGMA)
    return min(max(MEDIAN_S * drawn, LEAST_S), MOST_S)
