"""Tickets that are not right, each made of a right one.

Refuses to say what becomes of them: that is the policy's.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbus.protocol import Ticket
from kvbus.spawn import free_port

Params = Mapping[str, Any]
ROUTED = ("do_remote_prefill", "do_remote_decode")
"""What vLLM's routers look at; the other keys are the connector's."""

NEEDED = ("ticket", "remote_num_tokens", "prompt_digest")
OPTIONAL = {field.name for field in msgspec.structs.fields(Ticket) if not field.required}
"""Of the ticket: one without is right, too."""


def _with(**fields: Any) -> Callable[[Params], Params]:
    return lambda params: {**params, "ticket": {**params["ticket"], **fields}}


def _only_routed(ticket: Params) -> Params:
    return {"do_remote_prefill": True}


def _of_another_type(params: Params) -> Params:
    return {key: value if key in ROUTED else [value] for key, value in params.items()}


def _unreachable(params: Params) -> Params:
    return _with(endpoint=f"tcp://127.0.0.1:{free_port()}")(params)


def _of_nixl_connector(_: Params) -> Params:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "8a1b",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
        "tp_size": 1,
    }


def lacking(params: Params) -> list[Params]:
    """The params without one of their keys, or of the ticket's, for each that is needed."""
    ticket = params["ticket"]
    tickets = [_without(ticket, missing) for missing in ticket if missing not in OPTIONAL]
    return [
        *(_without(params, missing) for missing in NEEDED),
        *({**params, "ticket": incomplete} for incomplete in tickets),
    ]


def _without(fields: Params, missing: str) -> Params:
    return {key: value for key, value in fields.items() if key != missing}


WRONG: Mapping[str, Callable[[Params], Params]] = {
    "nothing but what routers look at": _only_routed,
    "values of another type": _of_another_type,
    "of vLLM's own connector": _of_nixl_connector,
    "of another engine": _with(engine_id="nobody"),
    "of an engine that has restarted": _with(engine_instance=uuid.uuid4().hex),
    "of an agent that has restarted": _with(agent_boot=uuid.uuid4().hex),
    "with another secret": _with(secret=uuid.uuid4().hex),
    "of an unknown offer": _with(offer_id=uuid.uuid4().hex),
    "of another version": _with(kvbus=999),
    "of an agent that is not there": _unreachable,
    "of an endpoint that is none": _with(endpoint="no endpoint"),
}
