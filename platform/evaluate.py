"""`penstock eval`: greedy accuracy of a policy on held-out tasks, on the engines of the configuration."""

from __future__ import annotations

import json

from penstock.envs.streams import load_held_out
from penstock.platform.config.schema import RunConfig
from penstock.platform.evaluation import Evaluator
from penstock.platform.lifecycle import EXIT_OK, run_to_end
from penstock.platform.roles import model_path
from penstock.platform.serving import serving


def run_eval(config: RunConfig) -> int:
    """Run `penstock eval`; prints one JSON line with the figures and returns the exit code."""

    async def main() -> int:
        tasks = load_held_out(config.env, config.seed, config.evaluation.num_tasks)
        async with serving(config, "eval") as (runner, rewards):
            evaluator = Evaluator(runner, rewards, config.rollout.sampling.max_new_tokens)
            evaluation = await evaluator.evaluate(0, tasks)
        print(
            json.dumps(
                {
                    "model": model_path(config),
                    "accuracy": evaluation.accuracy,
                    "reward_mean": evaluation.reward_mean,
                    "tasks": evaluation.num_tasks,
                }
            )
        )
        return EXIT_OK

    return run_to_end(main)
