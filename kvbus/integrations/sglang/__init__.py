"""SGLang's transfer backend ``kvbus``, registered by an entry point.

Every process of the server imports this module, so it imports SGLang lazily.
"""

# ruff: noqa: PLC0415 SGLang is imported only in its own processes

from enum import Enum
from typing import Any

from kvbus.integrations.sglang.steps import process_result, run_batch

BACKEND = "kvbus"
_WHERE = "sglang.srt.disaggregation"


def register() -> None:
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([BACKEND])
    members = {one.name: one.value for one in utils.TransferBackend} | {"KVBUS": BACKEND}
    # mypy wants literal members; these come from SGLang
    backends = Enum("TransferBackend", members, module=utils.__name__)  # type: ignore[misc]
    HookRegistry.register(f"{_WHERE}.utils.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_WHERE}.utils.get_kv_class", _kv_class, HookType.AROUND)
    prefill = f"{_WHERE}.prefill.SchedulerDisaggregationPrefillMixin"
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_batch", run_batch, HookType.AROUND
    )
    HookRegistry.register(
        f"{prefill}.process_batch_result_disagg_prefill", process_result, HookType.AROUND
    )
    for queue in ("prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue"):
        HookRegistry.register(f"{_WHERE}.{queue}._init_kv_manager", _begin, HookType.AROUND)
        HookRegistry.register(f"{_WHERE}.{queue}.add", note_request, HookType.AROUND)


def _kv_class(original: Any, backend: Any, kind: Any) -> Any:
    if backend.value != BACKEND or kind.value == "kvargs":
        return original(backend, kind)
    from kvbus.integrations.sglang import transfer

    return transfer.CLASSES[kind.value]


def _begin(original: Any, queue: Any) -> Any:
    manager = original(queue)
    if queue.transfer_backend.value == BACKEND:
        manager.begin(queue)
    return manager


def note_request(original: Any, queue: Any, request: Any, *rest: Any, **named: Any) -> Any:
    """Senders and receivers get only pages, so store the tokens.

    A request without a room, or with SGLang's fake host, is never handed off.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    is_handed_off = request.bootstrap_room is not None and (
        request.bootstrap_host != FAKE_BOOTSTRAP_HOST
    )
    flags = [*rest[:1], named.get("is_retracted")]  # prefill passes a number of heads
    is_retracted = any(flag is True for flag in flags)  # decode keeps its KV
    if queue.transfer_backend.value == BACKEND and is_handed_off and not is_retracted:
        queue.kv_manager.requests.note(request)
    return original(queue, request, *rest, **named)
