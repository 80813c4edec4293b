"""What another thread hands to an agent's event loop runs in the context of the agent."""

import asyncio
from contextvars import ContextVar
from threading import Thread

import anyio

from kvbus.agent.loop import AgentLoop

WHOSE: ContextVar[str] = ContextVar("WHOSE", default="a thread's")


async def seen_from_a_thread() -> list[str]:
    loop, done, seen = asyncio.get_running_loop(), asyncio.Event(), []

    def look() -> None:
        seen.append(WHOSE.get())
        if len(seen) == 1:
            loop.call_soon(look)
        else:
            done.set()

    thread = Thread(target=loop.call_soon_threadsafe, args=(look,))
    thread.start()
    await done.wait()
    thread.join()
    return seen


def test_it_and_what_it_schedules_run_as_the_agent() -> None:
    token = WHOSE.set("the agent's")
    try:
        seen = anyio.run(
            seen_from_a_thread, backend_options={"loop_factory": AgentLoop}, backend="asyncio"
        )
    finally:
        WHOSE.reset(token)
    assert seen == ["the agent's", "the agent's"]
