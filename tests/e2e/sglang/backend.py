"""Senders and receivers of requests, as SGLang's scheduler has them."""

import socket
import uuid
from collections.abc import Callable
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.agents import Agents, wait_until

PAGE = 16
NUM_TOKENS = 2 * PAGE + 3
PAGES = {"prefill": [3, 1, 4], "decode": [2, 4, 1]}
ROW = 1
ROOMS = count(1)
Managers = Callable[..., Any]


def is_served(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def num_tokens_of(manager: Any) -> int:
    """Of a request that fills two pages, and begins a third."""
    return 2 * int(manager.kv_args.page_size) + 3


def request(manager: Any, room: int, lora_id: str | None = None, **different: Any) -> Any:
    """A request as SGLang's queues have it."""
    fields = {
        "origin_input_ids": list(range(num_tokens_of(manager))),
        "sampling_params": SimpleNamespace(custom_params=None),
        "bootstrap_room": room,
        "bootstrap_host": "127.0.0.1",
        "lora_id": lora_id,
        "return_logprob": False,
        "logprob": SimpleNamespace(top_logprobs_num=0),
        "return_sampling_mask": False,
    }
    return SimpleNamespace(**{**fields, **different})


def sender_of(manager: Any, room: int, lora_id: str | None = None, **different: Any) -> Any:
    """The sender of a request, which has its pages."""
    from kvbus.integrations.sglang.transfer import Sender

    manager.requests.note(request(manager, room, lora_id, **different))
    sender = Sender(manager, "", room)
    sender.init(len(PAGES["prefill"]), ROW)
    return sender


def receiver_of(
    manager: Any, room: int, address: str, lora_id: str | None = None, **different: Any
) -> Any:
    """The receiver of a request; its pages follow."""
    from kvbus.integrations.sglang.transfer import Receiver

    manager.requests.note(request(manager, room, lora_id, **different))
    receiver = Receiver(manager, address, room)
    assert manager.try_ensure_parallel_info(address)
    receiver.init(0)
    return receiver


def pages_of(role: str) -> Any:
    return np.array(PAGES[role], np.int32)


def num_reported(agents: Agents, manager: Any, room: int) -> int:
    """Tokens of a room that the prefill agent knows. Its engine's requests so far are handled."""
    last = manager.link.offer(f"last-{uuid.uuid4()}", num_tokens=0, block_ids={}, sealed=False)
    assert last.ticket
    last.withdraw().wait(30)
    spans = agents.all[0].trace(request_id=f"room-{room}")
    return int(next(span for span in spans if span["name"] == "offer")["attributes"]["num_tokens"])


def ends(*of: Any) -> list[Any]:
    """The states in which SGLang, which polls all of them, sees them end."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    over = {KVPoll.Success, KVPoll.Failed}
    wait_until(lambda: {one.poll() for one in of} <= over, "the end")
    return [one.poll() for one in of]


def key_pages(manager: Any, role: str) -> torch.Tensor:
    """The keys of all tokens in the pages of a request, in their order."""
    layers = torch.stack(
        [buffer.view(-1, PAGE, *buffer.shape[1:]) for buffer in manager.pool.k_buffer]
    )
    return layers[:, PAGES[role]].flatten(1, 2)[:, :NUM_TOKENS]


def write(manager: Any, value: float, role: str = "prefill") -> None:
    """What the step does that computes the request, or had its pages before."""
    for buffer in manager.pool.k_buffer:
        buffer.view(-1, PAGE, *buffer.shape[1:])[PAGES[role]] = value
