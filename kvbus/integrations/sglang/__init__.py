"""SGLang's transfer backend ``kvbus``, by its own registrations: an entry point of its plug-ins.

`--disaggregation-transfer-backend kvbus` on both servers, and in the environment of each
`KVBUS_ATTACH`, the attach socket of the agent beside it: see docs/sglang.md. The module is found
by its entry point, in each process of the server; SGLang's code is imported by `register` alone.
"""

# ruff: noqa: PLC0415  SGLang's code is imported where SGLang is

from enum import Enum
from typing import Any

BACKEND = "kvbus"
_WHERE = "sglang.srt.disaggregation"


def register() -> None:
    """Make the backend known; SGLang calls it once in each of its processes."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([BACKEND])
    members = {one.name: one.value for one in utils.TransferBackend} | {"KVBUS": BACKEND}
    # mypy wants the members as a literal, and SGLang has them
    backends = Enum("TransferBackend", members, module=utils.__name__)  # type: ignore[misc]
    HookRegistry.register(f"{_WHERE}.utils.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_WHERE}.utils.get_kv_class", _kv_class, HookType.AROUND)
    for queue in ("prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue"):
        HookRegistry.register(f"{_WHERE}.{queue}._init_kv_manager", _begin, HookType.AROUND)
        HookRegistry.register(f"{_WHERE}.{queue}.add", _note_request, HookType.AROUND)


def _kv_class(original: Any, backend: Any, kind: Any) -> Any:
    """The class of a manager, sender, receiver or bootstrap server; the arguments are SGLang's."""
    if backend.value != BACKEND or kind.value == "kvargs":
        return original(backend, kind)
    from kvbus.integrations.sglang import transfer

    return transfer.CLASSES[kind.value]


def _begin(original: Any, queue: Any) -> Any:
    """The manager is told of addresses alone; its queue has the pools."""
    manager = original(queue)
    if queue.transfer_backend.value == BACKEND:
        manager.begin(queue)
    return manager


def _note_request(original: Any, queue: Any, request: Any, *rest: Any, **named: Any) -> Any:
    """Senders and receivers are told of pages alone: here the tokens are at hand."""
    from kvbus.integrations.sglang import transfer

    if queue.transfer_backend.value == BACKEND:
        transfer.note_request(queue.kv_manager, request)
    return original(queue, request, *rest, **named)
