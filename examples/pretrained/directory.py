"""A task of two turns with a slow tool: whom to look up in a directory, then what the entry says.

    user       Nora is a baker. Omar is a pilot. Ada is a nurse. Who is the pilot?
    assistant  Omar is the pilot.
    user       Omar works in Lima. In which city does the pilot work?
    assistant  The pilot works in Lima.

The directory takes 0.2 s and more, sometimes seconds. Half of the reward is for the person, half for the city.
`make real TASK=directory` trains on it as an environment; `make real TASK=directory ARGS="env=agent env.args=…"` trains
`enquire`, an agent that calls the policy itself (docs/guides/openai-endpoint.md).
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
        question = f"{' '.join(people)} Who is the {jobs[asked]}?"
        return {
            "prompt": [{"role": "user", "content": question}],
            "people": people,
            "entries": dict(zip(names, cities, strict=True)),
            "job": jobs[asked],
            "person": names[asked],
            "answer": cities[asked],
        }

    def split_by(self, row: dict) -> dict:
        """Held out are people with their jobs, in whatever order, whoever of them is asked about."""
        return {"people": sorted(row["people"])}

    def environment(self) -> Environment:
        return Enquiry()

    def gold_actions(self, task) -> list[str]:
        return [task.fields["person"], task.fields["answer"]]


class Enquiry(Environment):
    looked_up: str | None = None

    async def step(self, action: Action) -> Observation | Done:
        words, task = words_of(action.text), self.task.fields
        if self.looked_up is not None:
            return self.done(names_the_city=words & set(CITIES) == {task["answer"]})
        people = words & set(task["entries"])
        if len(people) != 1:  # nobody, or several at once
            return self.done(names_the_city=False)
        (self.looked_up,) = people
        await asyncio.sleep(latency_s(f"{self.task.task_id} {self.looked_up}"))
        entry = f"{self.looked_up} works in {task['entries'][self.looked_up]}."
        return Observation(f"{entry} In which city does the {task['job']} work?", counts={"lookups": 1})

    def done(self, *, names_the_city: bool) -> Done:
        is_right = self.looked_up == self.task.fields["person"]
        return Done({"names_the_person": 0.5 * is_right, "names_the_city": 0.5 * names_the_city})


async def enquire(task, client) -> dict[str, float]:
    """The same by an agent program."""
    messages = list(task.prompt)
    said = await answer(client, messages)
    people = words_of(said) & set(task.fields["entries"])
    if len(people) != 1:
        return {"names_the_person": 0.0, "names_the_city": 0.0}
    (person,) = people
    await asyncio.sleep(latency_s(f"{task.task_id} {person}"))
    entry = f"{person} works in {task.fields['entries'][person]}."
    question = f"{entry} In which city does the {task.fields['job']} work?"
    said = await answer(
        client, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": question}]
    )
    is_city = words_of(said) & set(CITIES) == {task.fields["answer"]}
    return {"names_the_person": 0.5 * (person == task.fields["person"]), "names_the_city": 0.5 * is_city}


async def answer(client, messages: list) -> str:
    return (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content or ""


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def latency_s(call: str) -> float:
    """Of one lookup: lognormal, the same for the same call in every run."""
    drawn = random.Random(call).lognormvariate(0.0, SIGMA)
    return min(max(MEDIAN_S * drawn, LEAST_S), MOST_S)
