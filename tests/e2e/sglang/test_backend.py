"""Senders and receivers as SGLang's scheduler calls them, with real pools and real agents."""

import gc
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from kvbus.engine import PageView, Park
from kvbus.errors import ConfigError
from kvbus.integrations.sglang.options import Options
from kvbus.integrations.sglang.steps import process_result, run_batch
from kvbus.integrations.vllm.params import digest_of
from tests.e2e.sglang.backend import (
    NUM_TOKENS,
    PAGE,
    ROOMS,
    ROW,
    Managers,
    ends,
    key_pages,
    num_reported,
    num_tokens_of,
    pages_of,
    receiver_of,
    request,
    sender_of,
    write,
)
from tests.e2e.sglang.pooled import queue_of
from tests.support.agents import AgentProcess, Agents, agents_ended, wait_until

pytestmark = pytest.mark.filterwarnings("default")  # SGLang's imports warn


BY_ORDER = pytest.mark.parametrize("in_order", [True, False])


def launch_late(manager: Any, step: int, in_order: bool) -> Callable[[], int]:
    """Launch a step; the result is what its GPU does at its end. Without order it has no number."""
    manager.steps.launched = step if in_order else 0
    return partial(manager.link.record, 512 * step)


def num_waiting(agent: AgentProcess) -> int:
    return int(agent.status()["counts"]["waiting_requests"])


@BY_ORDER
def test_no_page_is_reported_before_its_writing_step_ends(
    managers: Managers, bootstrap: Callable[[], str], agents: Agents, in_order: bool
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    prefill, decode, room = managers("prefill"), managers("decode"), next(ROOMS)
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
    receiver.send_metadata(pages_of("decode"), ROW, None)
    write(prefill, 1.0)

    end = launch_late(prefill, 1, in_order)
    sender.send(pages_of("prefill")[:2])
    assert num_reported(agents, prefill, room) == (0 if in_order else 2 * PAGE)
    sender.send(pages_of("prefill")[2:])
    if not in_order:
        assert ends(sender, receiver) == [KVPoll.Success] * 2
    assert (sender.poll() == KVPoll.Success) is not in_order

    write(prefill, 2.0)
    end()
    assert ends(sender, receiver) == [KVPoll.Success] * 2
    assert bool((key_pages(decode, "decode") == 2.0).all()) is in_order


@BY_ORDER
def test_no_page_is_fetched_while_a_step_may_write_to_it(
    managers: Managers, bootstrap: Callable[[], str], agents: Agents, in_order: bool
) -> None:
    """SGLang frees pages, and gives them to the next request, while a step that has them runs."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    prefill, decode, room = managers("prefill"), managers("decode"), next(ROOMS)
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
    write(prefill, 1.0)
    sender.send(pages_of("prefill"))

    end = launch_late(decode, 1, in_order)
    receiver.send_metadata(pages_of("decode"), ROW, None)
    if in_order:
        waiting = partial(num_waiting, agents.all[1])
        wait_until(lambda: receiver.poll() == KVPoll.Transferring and waiting(), "the fetch waits")
        assert receiver.poll() == KVPoll.Transferring
    else:
        assert ends(sender, receiver) == [KVPoll.Success] * 2

    write(decode, 3.0, "decode")
    end()
    assert ends(sender, receiver) == [KVPoll.Success] * 2
    assert bool((key_pages(decode, "decode") == 1.0).all()) is in_order


def test_last_pages_wait_for_their_own_step_alone(managers: Managers, agents: Agents) -> None:
    """With overlap scheduling, the next step is launched before SGLang processes the result."""
    prefill, room = managers("prefill"), next(ROOMS)
    sender = sender_of(prefill, room)
    ends_of = [launch_late(prefill, step, True) for step in (1, 2)]
    ends_of[0]()

    def send(*_: Any) -> None:
        sender.send(pages_of("prefill")[:2])

    process_result(send, prefill.scheduler, SimpleNamespace(forward_iter=1))
    assert num_reported(agents, prefill, room) == 2 * PAGE
    sender.abort()
    ends(sender)


def test_each_launched_batch_is_recorded(managers: Managers) -> None:
    prefill = managers("prefill")
    scheduler = prefill.scheduler
    (page,) = prefill.link.sequence_pages
    view = PageView.open(page)
    assert view is not None
    for step in (1, 2, 3):
        scheduler.forward_ct = step
        assert run_batch(lambda _, batch: batch, scheduler, "result") == "result"
        assert view[0] == step * 512
    assert prefill.steps.in_flight == 3 * 512


def test_silent_bootstrap_server_delays_only_its_own_requests(
    managers: Managers, bootstrap: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    from kvbus.integrations.sglang import places

    monkeypatch.setattr(places, "PLACE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(places, "RETRY_PLACE_AFTER_S", 60.0)
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


@pytest.mark.kind("data-parallel attention", on="memory")
@pytest.mark.parametrize("kind", ["replicas", "attention"])
def test_data_parallel_replicas_are_engines_of_their_own(
    managers: Managers, bootstrap: Callable[[], str], one_rank: dict[str, int], kind: str
) -> None:
    """Their processes have one parent, and one name in the environment."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    sizes = {"dp_size": 2} if kind == "replicas" else {"attn_dp_size": 2}
    one_rank |= {"num_dp_ranks": 2, **sizes}
    sides: dict[str, list[Any]] = {"prefill": [], "decode": []}
    for role, number in product(sides, range(2)):
        place = (number, 0) if kind == "replicas" else (0, number)
        one_rank |= dict(zip(("dp_rank", "attn_dp_rank"), place, strict=True))
        sides[role].append(managers(role, name=f"{role}-{kind}"))
    address = bootstrap()

    for value, (prefill, decode) in enumerate(product(*sides.values()), start=1):
        room = next(ROOMS)
        sender, receiver = sender_of(prefill, room), receiver_of(decode, room, address)
        receiver.send_metadata(pages_of("decode"), ROW, None)
        write(prefill, float(value))
        sender.send(pages_of("prefill"))
        assert ends(sender, receiver) == [KVPoll.Success] * 2
        assert (key_pages(decode, "decode") == value).all()
    names = [manager.link.engine.engine_id for manager in sides["prefill"]]
    assert names == [f"prefill-{kind}-dp0", f"prefill-{kind}-dp1"]


@pytest.mark.parametrize("is_polled", [True, False])
def test_request_that_waits_for_pages_holds_its_offer(
    managers: Managers, bootstrap: Callable[[], str], is_polled: bool
) -> None:
    """SGLang polls the requests in its queue. Without that, nothing keeps the offer."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    prefill, decode, room = managers("prefill"), managers("decode"), next(ROOMS)
    prefill.bootstrap_timeout = 2.0
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())
    write(prefill, 1.0)
    sender.send(pages_of("prefill"))
    prefill.bootstrap_timeout = 4.0
    without_reader = sender_of(prefill, next(ROOMS))
    without_reader.send(pages_of("prefill"))

    def is_later() -> bool:
        assert not is_polled or receiver.poll() == KVPoll.WaitingForInput
        return bool(without_reader.poll() == KVPoll.Failed)

    wait_until(is_later, "the end of an offer that nothing holds")
    assert sender.poll() == (KVPoll.Transferring if is_polled else KVPoll.Failed)
    receiver.send_metadata(pages_of("decode"), ROW, None)
    assert ends(receiver) == [KVPoll.Success if is_polled else KVPoll.Failed]
    if is_polled:
        assert ends(sender) == [KVPoll.Success]
        assert (key_pages(decode, "decode") == 1.0).all()


def test_request_that_decode_retracted_has_its_room_again(
    managers: Managers, bootstrap: Callable[[], str]
) -> None:
    """Decode has the tokens of its output, too; prefill gets all of them as a prompt."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    prefill, decode, room, address = managers("prefill"), managers("decode"), 999, bootstrap()
    tokens = list(range(num_tokens_of(prefill)))
    for value, length in enumerate((len(tokens) - 2, len(tokens) - 1, len(tokens)), start=1):
        cut = min(length, len(tokens) - 2)
        sender = sender_of(prefill, room, origin_input_ids=tokens[:length])
        receiver = receiver_of(
            decode,
            room,
            address,
            origin_input_ids=tokens[:cut],
            output_ids=tokens[cut:length],
            pd_rebootstrap_in_progress=value > 1,
        )
        receiver.send_metadata(pages_of("decode"), ROW, None)
        write(prefill, float(value))
        sender.send(pages_of("prefill"))

        assert ends(sender, receiver) == [KVPoll.Success] * 2
        assert (key_pages(decode, "decode")[:, :length] == value).all()


@pytest.mark.parametrize(
    ("given", "named", "is_noted"),
    [
        ((), {}, True),
        ((1,), {}, True),
        ((True,), {}, False),
        ((), {"is_retracted": True}, False),
        ((), {"bootstrap_room": None}, False),
        ((), {"bootstrap_host": "2.2.2.2"}, False),
    ],
)
def test_request_without_a_handoff_is_not_noted(
    managers: Managers, given: tuple[Any, ...], named: dict[str, Any], is_noted: bool
) -> None:
    """No receiver follows to take the facts: decode has a copy, or there is no room."""
    from kvbus.integrations import sglang

    manager, room = managers("decode"), next(ROOMS)
    backend = SimpleNamespace(value=sglang.BACKEND)
    queue = SimpleNamespace(kv_manager=manager, transfer_backend=backend)

    one = request(manager, room)
    for name in named.keys() & {"bootstrap_room", "bootstrap_host"}:
        setattr(one, name, named.pop(name))

    sglang.note_request(lambda *_, **__: None, queue, one, *given, **named)

    assert (manager.requests.take(room) is not None) == is_noted


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


def test_an_unknown_wish_to_park_is_refused_with_the_known_ones() -> None:
    wrong = {"KVBUS_ATTACH": "attach.sock", "KVBUS_PARK": "often"}
    with pytest.raises(ConfigError, match=r"KVBUS_PARK is 'often': .* never, when_full, always"):
        Options.of_environment(wrong)


@pytest.fixture(scope="module")
def parking() -> Iterator[Agents]:
    with agents_ended(Agents) as both:
        both.both(prefill={"park_bytes": 16 << 20, "park_after_s": 3600.0})
        yield both


PARKED_WHEN: dict[str, Callable[[Any], Any]] = {
    "few tokens are free": lambda scheduler: setattr(scheduler.free, "remaining_total", 9),
    "the next request does not fit": lambda scheduler: scheduler.waiting_queue.append(
        SimpleNamespace(origin_input_ids=range(101))
    ),
}


class TestParked:
    """SGLang has its pages back, and says so, before decode reads."""

    @pytest.fixture
    def agents(self, parking: Agents) -> Agents:
        return parking

    @pytest.mark.parametrize("option", Park)
    @pytest.mark.parametrize("when", PARKED_WHEN)
    def test_pages_are_free_before_decode_reads(
        self,
        managers: Managers,
        bootstrap: Callable[[], str],
        monkeypatch: pytest.MonkeyPatch,
        option: str,
        when: str,
    ) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        monkeypatch.setenv("KVBUS_PARK", option)
        prefill, decode, room = managers("prefill"), managers("decode"), next(ROOMS)
        sender = sender_of(prefill, room)
        write(prefill, 1.0)
        sender.send(pages_of("prefill"))
        if option == "always":
            assert ends(sender) == [KVPoll.Success]
        else:
            assert stays_transferring(sender)
        PARKED_WHEN[when](prefill.scheduler)
        if option == "never":
            assert stays_transferring(sender)
        else:
            assert ends(sender) == [KVPoll.Success]
            write(prefill, 2.0)

        receiver = receiver_of(decode, room, bootstrap())
        receiver.send_metadata(pages_of("decode"), ROW, None)
        assert ends(sender, receiver) == [KVPoll.Success] * 2
        assert bool((key_pages(decode, "decode") == 1.0).all())


def stays_transferring(sender: Any) -> bool:
    from sglang.srt.disaggregation.base.conn import KVPoll

    until_s = time.monotonic() + 0.3
    while time.monotonic() < until_s:
        if sender.poll() != KVPoll.Transferring:
            return False
    return True
