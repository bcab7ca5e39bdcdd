"""Does the byte budget bound what is held, in order, whatever is cancelled?"""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.transfer.byte_budget import ByteBudget

CAPACITY = 10
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "release", "cancel"]), st.integers(1, 15)), max_size=40
)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_budget_is_bounded_fair_and_returns_to_zero(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        budget = ByteBudget(CAPACITY)
        order: list[int] = []
        holders: dict[int, tuple[asyncio.Task[None], asyncio.Event]] = {}
        tasks: list[asyncio.Task[None]] = []

        async def hold(number: int, num_bytes: int, done: asyncio.Event) -> None:
            async with budget.hold(num_bytes):
                order.append(number)
                await done.wait()

        for number, (action, value) in enumerate(steps):
            if action == "take":
                done = asyncio.Event()
                tasks.append(asyncio.create_task(hold(number, value, done)))
                holders[number] = (tasks[-1], done)
            elif holders:
                task, done = holders.pop(sorted(holders)[value % len(holders)])
                if action == "cancel":
                    task.cancel()
                else:
                    done.set()
            for _ in range(3):
                await asyncio.sleep(0)  # lets every task that can go on do so
            assert 0 <= budget.held_bytes <= CAPACITY
            assert order == sorted(order), "first come, first served"
        for _, done in holders.values():
            done.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(o is None or isinstance(o, asyncio.CancelledError) for o in outcomes)
        assert budget.held_bytes == 0
        assert budget.num_waiting == 0

    asyncio.run(run())
