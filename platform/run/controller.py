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
    """Train `run.total_steps` batches.

    Consumes: batches of the flow. Waits for: a batch, the trainer's step, the publish; each has a time limit.
    Generation never stops for any line below: engines sample while the trainer computes, and receive new weights while
    requests are in flight. `flow.next_batch` is what bounds the staleness of a batch.
    """
    await run.publish(run.version)  # every engine starts from the same weights
    await run.evaluate_first()
    async with run.flow() as flow:  # starts admission, and with it generation and scoring
        while run.version < run.total_steps:
            batch = await flow.next_batch()  # groups in deadline order, bounded in staleness
            report = await run.trainer.step(batch)  # logprobs → advantages → loss → optimizer
            if report.skipped:  # non-finite loss or gradient: the weights are unchanged, nothing is published
                await run.keep_bad_batch(report)
                flow.skip()
                run.observe(report)
                continue
            await run.publish(report.version)  # engines swap weights in flight and acknowledge them
            flow.advance(report.version)  # frees the credits of the trained groups
            run.observe(report)
            run.evaluate_concurrently()  # a task that shares the engines and reports the versions it sampled
            await run.maybe_checkpoint()
    await run.save_policy()  # before the last evaluation, whose failure must not lose the policy
    await run.evaluate_last()
