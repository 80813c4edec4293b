"""Senders and receivers as SGLang's scheduler calls them, with real pools and real agents."""

import gc
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

from kvbus.errors import ConfigError
from kvbus.integrations.vllm.params import digest_of
from kvbus.spawn import free_port
from tests.e2e.sglang.test_pools import queue_of, scheduler_of
from tests.support.agents import Agents, started, wait_until

pytestmark = pytest.mark.filterwarnings("default")  # SGLang's imports warn
PAGE = 16
NUM_TOKENS = 2 * PAGE + 3
PAGES = {"prefill": [3, 1, 4], "decode": [2, 4, 1]}
ROW = 1
ROOMS = count(1)
Managers = Callable[..., Any]


class Event:
    """What SGLang records behind a step in the GPU's stream. Nobody may wait for it."""

    is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    with started("prefill", "decode") as both:
        yield both
        both.check()


@pytest.fixture
def managers(
    one_rank: dict[str, int], agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Managers]:
    """Makes the manager of a role: SGLang's part of it needs a whole server, and is set here."""
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.events import KvEventLoraNames
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from kvbus.integrations.sglang.transfer import Manager

    made: list[Any] = []
    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))
    monkeypatch.setenv("KVBUS_MODEL", "model")

    def of(role: str) -> Any:
        agent = agents.all[0] if role == "prefill" else agents.all[1]
        monkeypatch.setenv("KVBUS_ATTACH", str(agent.attach))
        monkeypatch.setenv("KVBUS_ENGINE_ID", f"{role}-{uuid.uuid4().hex}")
        manager = Manager.__new__(Manager)
        manager.__dict__.update(
            kv_args=SimpleNamespace(page_size=PAGE),
            disaggregation_mode=DisaggregationMode(role),
            server_args=None,
            attn_tp_size=1,
            is_dummy_cp_rank=False,
            bootstrap_timeout=60.0,
            waiting_timeout=60.0,
            request_status={},
            failure_records={},
            failure_lock=threading.Lock(),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _staging_outstanding=defaultdict(int),
            addr_to_rooms_tracker=defaultdict(set),
            prefill_response_tracker={},
            prefill_info_table={},
        )
        pool = MHATokenToKVPool(
            size=4 * PAGE,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=4,
            head_dim=8,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        scheduler = scheduler_of(disaggregation_mode=role)
        scheduler.kv_event_lora_names = KvEventLoraNames()
        manager.begin(queue_of(pool, scheduler=scheduler))
        assert manager.link.wait_open(30)
        manager.pool = pool
        made.append(manager)
        return manager

    yield of
    for manager in made:
        manager.link.close()


@pytest.fixture
def bootstrap(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Starts the bootstrap server of the prefill server, and returns its address."""
    from kvbus.integrations.sglang.transfer import BootstrapServer

    servers: list[Any] = []

    def address() -> str:
        monkeypatch.setenv("KVBUS_ATTACH", str(agents.all[0].attach))
        server = BootstrapServer("127.0.0.1", free_port())
        servers.append(server)
        wait_until(lambda: is_served(server.port), "a bootstrap server")
        return f"127.0.0.1:{server.port}"

    yield address
    for server in servers:
        server.close()


def is_served(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def request(room: int, lora_id: str | None = None) -> Any:
    """A request as SGLang's queues have it."""
    return SimpleNamespace(
        origin_input_ids=list(range(NUM_TOKENS)),
        sampling_params=SimpleNamespace(custom_params=None),
        bootstrap_room=room,
        lora_id=lora_id,
        return_logprob=False,
        logprob=SimpleNamespace(top_logprobs_num=0),
        return_sampling_mask=False,
    )


def sender_of(manager: Any, room: int, lora_id: str | None = None) -> Any:
    """The sender of a request, which has its pages."""
    from kvbus.integrations.sglang.transfer import Sender, note_request

    note_request(manager, request(room, lora_id))
    sender = Sender(manager, "", room)
    sender.init(len(PAGES["prefill"]), ROW)
    return sender


def receiver_of(manager: Any, room: int, address: str, lora_id: str | None = None) -> Any:
    """The receiver of a request; its pages follow."""
    from kvbus.integrations.sglang.transfer import Receiver, note_request

    note_request(manager, request(room, lora_id))
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
    layers = torch.stack([buffer.view(-1, PAGE, 4, 8) for buffer in manager.pool.k_buffer])
    return layers[:, PAGES[role]].flatten(1, 2)[:, :NUM_TOKENS]


def write(manager: Any, value: float) -> None:
    """What the step does that computes the request."""
    for buffer in manager.pool.k_buffer:
        buffer.view(-1, PAGE, 4, 8)[PAGES["prefill"]] = value


@pytest.mark.parametrize("way", ["cached prefix", "pipeline stages"])
def test_no_page_is_reported_before_its_writing_step_ends(
    managers: Managers, bootstrap: Callable[[], str], agents: Agents, way: str
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    prefill, decode, room, event = managers("prefill"), managers("decode"), next(ROOMS), Event()
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
    receiver.send_metadata(pages_of("decode"), ROW, None)
    write(prefill, 1.0)

    if way == "cached prefix":
        sender._early_send_wait_event = event
    else:
        prefill.scheduler.launch_event = event
    sender.send(pages_of("prefill")[:2])
    assert num_reported(agents, prefill, room) == 0
    sender.send(pages_of("prefill")[2:])
    assert sender.poll() != KVPoll.Success
    assert num_reported(agents, prefill, room) == 0

    write(prefill, 2.0)
    event.is_done = True
    assert ends(sender, receiver) == [KVPoll.Success] * 2
    assert (key_pages(decode, "decode") == 2.0).all()


def test_pages_whose_step_has_ended_are_reported_at_once(
    managers: Managers, agents: Agents
) -> None:
    prefill, room, event = managers("prefill"), next(ROOMS), Event()
    sender, event.is_done = sender_of(prefill, room), True

    sender._early_send_wait_event = event
    sender.send(pages_of("prefill")[:2])

    assert num_reported(agents, prefill, room) == 2 * PAGE
    sender.abort()
    ends(sender)


def test_silent_bootstrap_server_delays_only_its_own_requests(
    managers: Managers, bootstrap: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    from kvbus.integrations.sglang import transfer

    monkeypatch.setattr(transfer, "PLACE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(transfer, "RETRY_PLACE_AFTER_S", 60.0)
    prefill, decode = managers("prefill"), managers("decode")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        stuck = receiver_of(decode, next(ROOMS), address)
        stuck.send_metadata(pages_of("decode"), ROW, None)
        room = next(ROOMS)
        sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
        receiver.send_metadata(pages_of("decode"), ROW, None)
        write(prefill, 3.0)
        sender.send(pages_of("prefill"))

        assert ends(sender, receiver) == [KVPoll.Success] * 2
        assert (key_pages(decode, "decode") == 3.0).all()
        assert stuck.poll() == KVPoll.Transferring

    assert ends(stuck) == [KVPoll.Failed]
    the_next = receiver_of(decode, next(ROOMS), address)
    the_next.send_metadata(pages_of("decode"), ROW, None)
    assert the_next.poll() == KVPoll.Failed
    for failed in (stuck, the_next):
        why = decode.failure_records[failed.bootstrap_room]
        assert f"the bootstrap server {address} does not name its agent" in why


def test_an_abort_sends_no_request_to_a_bootstrap_server(
    managers: Managers, bootstrap: Callable[[], str]
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    from kvbus.integrations.sglang.transfer import Receiver

    prefill, decode, room = managers("prefill"), managers("decode"), next(ROOMS)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        receivers = [Receiver(decode, address, next(ROOMS)) for _ in range(3)]

        for receiver in receivers:
            receiver.abort()

        assert [receiver.poll() for receiver in receivers] == [KVPoll.Failed] * 3
        sender, the_next = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
        the_next.send_metadata(pages_of("decode"), ROW, None)
        sender.send(pages_of("prefill"))
        assert ends(sender, the_next) == [KVPoll.Success] * 2  # its request followed
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_adapter_is_matched_by_name_not_by_server_id(
    managers: Managers, bootstrap: Callable[[], str]
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.lora.lora_registry import LoRARef

    prefill, decode, address = managers("prefill"), managers("decode"), bootstrap()
    ids: dict[Any, dict[str, str]] = {}
    for manager in (prefill, decode):
        for name in ("sql", "chat"):
            adapter = LoRARef(lora_name=name, lora_path=f"/models/{name}")
            manager.scheduler.kv_event_lora_names.register(
                lora_id=adapter.lora_id, lora_name=adapter.lora_name
            )
            ids.setdefault(manager, {})[name] = adapter.lora_id
    outcomes = {}
    for name in ("sql", "chat"):
        room = next(ROOMS)
        sender = sender_of(prefill, room, ids[prefill]["sql"])
        receiver = receiver_of(decode, room, address, ids[decode][name])
        receiver.send_metadata(pages_of("decode"), ROW, None)
        sender.send(pages_of("prefill"))
        outcomes[name] = ends(receiver)[0]
        sender.abort()
        ends(sender)

        vllm = SimpleNamespace(
            all_token_ids=list(range(NUM_TOKENS)),
            lora_request=SimpleNamespace(lora_name="sql"),
            mm_features=[],
        )
        assert sender._offer.ticket["prompt_digest"] == digest_of(vllm, NUM_TOKENS)

    assert ids[prefill] != ids[decode]
    assert outcomes == {"sql": KVPoll.Success, "chat": KVPoll.Failed}


def test_the_link_keeps_nothing_of_a_request_that_sglang_saw_end(
    managers: Managers, bootstrap: Callable[[], str]
) -> None:
    prefill, decode, room = managers("prefill"), managers("decode"), next(ROOMS)
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
    receiver.send_metadata(pages_of("decode"), ROW, None)
    sender.send(pages_of("prefill"))
    ends(sender, receiver)
    kept = ref(sender._offer), ref(receiver._fetch)

    del sender, receiver

    wait_until(lambda: gc.collect() >= 0 and [one() for one in kept] == [None] * 2, "nothing")


def test_a_server_without_an_agent_is_told_what_to_set(
    one_rank: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbus.integrations.sglang.transfer import Manager

    monkeypatch.delenv("KVBUS_ATTACH", raising=False)

    with pytest.raises(ConfigError, match="KVBUS_ATTACH"):
        Manager.__new__(Manager).begin(queue_of(None))
