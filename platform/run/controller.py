"""The loop. Synchronous GRPO, one-step-off and fully asynchronous training are this loop with other configs."""

from __future__ import annotations

from penstock.platform.run.run import Run


async def train(run: Run) -> None:
    """Train `run.total_steps` batches.

    Generation never stops for any line below: engines sample while the trainer computes, and swap
    weights under requests in flight. `flow.next_batch` is what bounds how stale a batch may be.
    """
    await run.publish(run.version)  # every engine starts at the same weights
    await run.evaluate_first()
    async with run.flow() as flow:  # generators and reward workers start
        while run.version < run.total_steps:
            batch = flow.next_batch()  # a stream of groups, deadline order, bounded
            report = await run.trainer.step(batch)  # logprobs → advantages → loss → optimizer
            if report.skipped:  # bad numbers: nothing was learned, nothing is published
                await run.keep_bad_batch(report)
                flow.skip()
                run.observe(report)
                continue
            await run.publish(report.version)  # in flight: swap, acknowledge
            flow.advance(report.version)  # frees the credits of what was trained
            run.observe(report)
            run.evaluate_concurrently()  # spawned; shares the engines, reports its version span
            await run.maybe_checkpoint()
    await run.save_policy()  # first: nothing that happens from here on can lose it
    await run.evaluate_last()
