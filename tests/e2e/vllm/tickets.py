"""Tickets that are not right, or not for their prompt, each made of a right one.

What becomes of them is the policy's.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from kvbus.spawn import free_port

Params = Mapping[str, Any]
ROUTED = ("do_remote_prefill", "do_remote_decode")
"""What vLLM's routers look at; the other keys are the connector's."""
OF_NIXL_CONNECTOR = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "8a1b",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
NEEDED = (
    *("ticket", "remote_num_tokens", "prompt_digest"),
    *("agent_id", "agent_boot", "endpoint", "engine_id", "engine_instance", "offer_id"),
    *("request_id", "num_tokens", "secret"),
)


def _with(**fields: Any) -> Callable[[Params], Params]:
    return lambda params: {**params, "ticket": {**params["ticket"], **fields}}


def _without(missing: str) -> Callable[[Params], Params]:
    """The params without one of their keys, or the ticket's."""

    def left(params: Params) -> Params:
        ticket = {key: value for key, value in params["ticket"].items() if key != missing}
        return {k: v for k, v in {**params, "ticket": ticket}.items() if k != missing}

    return left


def of_earlier_process(params: Params) -> Params:
    """Issued by a process of the agent that has ended. Its engine has published the offer again."""
    return _with(agent_boot=uuid.uuid4().hex)(params)


def unreachable(params: Params) -> Params:
    """Of an agent that is not there: it is looked for until the fetch's deadline."""
    return _with(endpoint=f"tcp://127.0.0.1:{free_port()}")(params)


WRONG: Mapping[str, Callable[[Params], Params]] = {
    "nothing but what routers look at": lambda params: {k: params[k] for k in ROUTED},
    "values of another type": lambda params: {
        key: value if key in ROUTED else [value] for key, value in params.items()
    },
    "of vLLM's own connector": lambda _: OF_NIXL_CONNECTOR,
    "of another engine": _with(engine_id="nobody"),
    "of an engine that has restarted": _with(engine_instance=uuid.uuid4().hex),
    "with another secret": _with(secret=uuid.uuid4().hex),
    "of an unknown offer": _with(offer_id=uuid.uuid4().hex),
    "of another version": _with(kvbus=999),
    "of an endpoint that is none": _with(endpoint="no endpoint"),
    **{f"without {missing}": _without(missing) for missing in NEEDED},
}
DO_NOT_FIT: Mapping[str, tuple[int, Callable[[int], Params], int | None]] = {
    "a prompt longer by one": (1, lambda _: {}, 1),
    "a prompt longer by blocks": (90, lambda _: {}, 90),
    "a prompt shorter": (-20, lambda _: {}, None),
    "of no token": (0, lambda _: {"remote_num_tokens": 0}, None),
    "of one token": (0, lambda _: {"remote_num_tokens": 1}, None),
    "of one less": (0, lambda length: {"remote_num_tokens": length - 1}, None),
    "of one more": (0, lambda length: {"remote_num_tokens": length + 1}, None),
    "of very many": (0, lambda _: {"remote_num_tokens": 1 << 20}, None),
}
"""How much longer the prompt is, what the params say otherwise of ``length`` tokens that are
offered, and how many tokens of the prompt are computed then: all, if None."""
