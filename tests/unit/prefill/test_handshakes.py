"""The NIXL backends that a reader offers at its handshake."""

from typing import Any

import pytest

from kvbus.errors import ErrorCode, RequestRefused
from tests.unit.prefill.leases import Case

pytestmark = pytest.mark.anyio


async def test_prefill_agent_takes_first_backend_that_it_has(case: Case) -> None:
    done = await case.shake(nixl_backends=("LIBFABRIC", "UCX", "UCX"))
    with pytest.raises(RequestRefused, match="has LIBFABRIC, Mooncake, the prefill") as refused:
        await case.shake(nixl_backends=("LIBFABRIC", "Mooncake"))

    assert done.nixl_backend == "UCX"
    assert refused.value.code is ErrorCode.INCOMPATIBLE
    assert refused.value.detail == {
        **{"field": "nixl_backends", "prefill": "UCX", "decode": "LIBFABRIC, Mooncake"}
    }


HOSTILE: list[Any] = [(), ("UCX",) * 9, ("",), ("U" * 33,), (7,), "UCX", None]


@pytest.mark.parametrize("offered", HOSTILE, ids=str)
async def test_malformed_list_of_backends_is_refused(case: Case, offered: Any) -> None:
    with pytest.raises(RequestRefused, match="nixl_backends") as refused:
        await case.shake(nixl_backends=offered)

    assert refused.value.code is ErrorCode.INVALID
    assert (await case.shake()).nixl_backend == "UCX"
