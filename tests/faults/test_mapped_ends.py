"""Memory that a decode agent has mapped ends with its engine, and with either agent."""

from pathlib import Path

import pytest

from tests.agents import AgentProcess, until
from tests.engines import pair, works
from tests.faults.conftest import Started
from tests.namespaces import HAVE_NAMESPACES

pytestmark = pytest.mark.anyio
ONE_USER = pytest.mark.skipif(not HAVE_NAMESPACES, reason="only root makes mount namespaces")


def socket_file(prefill: AgentProcess) -> Path:
    return Path(prefill.status()["sharing"]["path"])


def why_closed(decode: AgentProcess) -> list[str]:
    return [line["reason"] for line in decode.logged("mapped.closed")]


async def test_a_killed_decode_agent_lets_go_of_what_it_was_lent(fresh: Started) -> None:
    prefill, decode = fresh.prefill(), fresh.decode(mapped=True)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        assert prefill.metric("memory_readers") == 1

        decode.kill()
        await until(lambda: prefill.metric("memory_readers") == 0)


async def test_without_the_socket_file_memory_is_read_with_nixl_and_the_log_says_so_once(
    fresh: Started,
) -> None:
    prefill, decode = fresh.prefill(), fresh.decode(mapped=True)
    fresh.start(prefill, decode)
    socket_file(prefill).unlink()
    async with pair(prefill.attach, decode.attach) as (source, target):
        for _ in range(3):
            assert await works(source, target)

        (reason,) = why_closed(decode)
        assert "no agent at" in reason
        assert list(decode.status()["sharing"]["engines"].values()) == [reason]


def in_own_mounts(agent: AgentProcess, *mount: object) -> None:
    """Have the agent start in a mount namespace of its own, where this was mounted."""
    line = " ".join(["mount", *map(str, mount), "&&", 'exec "$@"'])
    agent.runner = ("unshare", "--mount", "sh", "-c", line, "sh")


@ONE_USER
async def test_an_agent_in_another_mount_namespace_that_has_no_such_folder_reads_with_nixl(
    fresh: Started,
) -> None:
    prefill, decode = fresh.prefill(), fresh.decode(mapped=True)
    fresh.start(prefill)
    in_own_mounts(decode, "-t", "tmpfs", "-o", "mode=0700", "none", prefill.settings["runtime_dir"])
    fresh.start(decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

        assert "no agent at" in why_closed(decode)[0]
        namespaces = {one.status()["sharing"]["mount_namespace"] for one in (prefill, decode)}
        assert len(namespaces) == 2


@ONE_USER
async def test_another_agent_at_the_same_path_of_another_namespace_is_not_believed(
    fresh: Started,
) -> None:
    prefill, other, decode = fresh.prefill(), fresh.prefill(), fresh.decode(mapped=True)
    fresh.start(prefill, other)
    folders = [one.settings["runtime_dir"] for one in (other, prefill)]
    in_own_mounts(decode, "--bind", *folders)
    fresh.start(decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

        assert "another process of the agent" in why_closed(decode)[0]
        assert other.metric("refusals_total", code="stale") == 1
        assert other.metric("memory_readers") == 0
