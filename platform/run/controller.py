"""The training loop: synchronous, one-step-off-policy and fully asynchronous RL are this loop with other configs.

task source ─▶ admission gate ─▶ group runs ──▶ filters ─▶ consumption gate       Flow (in the driver)
                     ▲             │ ▲  │ ▲        │              │
             credits │     prompts │ │  │ │ scores │ payloads     │ batch: GroupRefs in deadline order
                     │             ▼ │  ▼ │        ▼              ▼
                     │       engines  reward    object ────▶ trainer ranks ─▶ StepReport ─▶ metrics hub
                     │          ▲     workers   store             │             (JSONL, console, W&B, …)
                     │          │                                 │ weights of version v
                     │          └─────── weight transport ◀───────┘
                     └─── advance(v), once the engines have acknowledged version v
"""

from __future__ import annotations

from penstock.platform.run.run import Run


async def train(run: Run) -> None:
    """Train `run.total_steps` batches. Words: docs/architecture.md, "Vocabulary".

    Consumes: batches of the flow. Waits for: a batch, the trainer's step, the publish; each has a time limit.
    No line below stops generation: engines sample while the trainer computes, and receive new weights while requests
    are in flight. `flow.next_batch` bounds the staleness of a batch. With `dataflow.max_staleness=0` there are no
    credits between a batch and its `flow.advance`, so that the engines run empty: the synchronous algorithm.
    """
    await run.publish(run.version)  # every engine starts from the same weights
    await run.evaluate_first()  # unless it is resumed
    async with run.flow() as flow:  # generates and scores until it is left
        while run.version < run.total_steps:
            batch = await flow.next_batch()  # groups in deadline order, bounded in staleness
            report = await run.trainer.step(batch)  # logprobs → advantages → loss → optimizer
            if report.skipped:  # non-finite loss or gradient: the weights are unchanged, nothing is published
                await run.dump_bad_batch(report)
                flow.skip()
                run.observe(report)  # fails after trainer.max_bad_steps of them in a row
                continue
            await run.publish(report.version)  # engines swap weights in flight; sets `run.version`
            flow.advance(report.version)  # frees the credits of the trained groups
            run.observe(report)
            run.evaluate_concurrently()  # shares the engines; `evaluation.patience` may end the run
            await run.maybe_checkpoint()
    await run.save_policy()  # before the last evaluation, whose failure must not lose the policy
    await run.evaluate_last()
