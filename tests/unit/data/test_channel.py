"""The channel of two processes: frames, descriptors, and what the kernel does not take at once."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvbus.data.channel import MAX_MESSAGE_FDS, Channel, channel_to_control, channel_to_data
from kvbus.data.messages import AddPeer, Barrier, DataReply, FromData, ToData
from kvbus.errors import ClosedError, ProtocolError

Ends = tuple[Channel[ToData, FromData], Channel[FromData, ToData]]
MANY = """
import os, resource, socket
from kvbus.data.channel import channel_to_control, channel_to_data
from kvbus.data.messages import Barrier
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 8192))
if os.geteuid() == 0:
    os.setuid(65534)  # the kernel lets root have any number of descriptors on their way
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sender, receiver = channel_to_data(ours), channel_to_control(theirs)
for number in range(22):
    sender.send(Barrier(id=number), [0] * 64)
was_kept, found = sender.has_unsent, []
while len(found) < 22:
    message, fds = receiver.receive() or (None, [])
    for fd in fds:
        os.close(fd)
    if message is not None:
        found.append(message.id)
    sender.flush()
print(was_kept, found == list(range(22)), sender.has_unsent)
"""


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The control process's end, and the data process's."""
    with ExitStack() as closing:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = channel_to_data(ours), channel_to_control(theirs)
        for end in made:
            closing.callback(end.close)
        yield made


@pytest.mark.parametrize("num_bytes", [0, (64 << 10) - 40, 200_000, 4 << 20])
def test_a_message_of_any_size_arrives_whole_and_in_order(ends: Ends, num_bytes: int) -> None:
    control, data = ends
    sent: list[ToData] = [AddPeer(id=1, peer="p", metadata=(os.urandom(num_bytes),)), Barrier(id=2)]
    for message in sent:
        control.send(message)
    received: list[ToData] = []
    while len(received) < 2:
        control.flush()
        if (found := data.receive()) is not None:
            received.append(found[0])
    assert (received, data.receive(), control.has_unsent) == (sent, None, False)


def test_descriptors_come_with_their_message_and_are_duplicates(ends: Ends) -> None:
    control, data = ends
    pipes = [os.pipe() for _ in range(70)]
    control.send(Barrier(id=1), [read for read, _ in pipes])
    control.send(Barrier(id=2))
    for read, write in pipes:
        os.close(read)
        os.write(write, b"x")
        os.close(write)

    (first, fds), second = (data.receive() or (None, [])), data.receive()

    assert (first, second) == (Barrier(id=1), (Barrier(id=2), []))
    assert [os.read(fd, 2) for fd in fds] == [b"x"] * 70
    for fd in fds:
        os.close(fd)


def test_descriptors_in_flight_over_process_limit_wait() -> None:
    command = [sys.executable, "-c", MANY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("True True False\n", "")


@pytest.mark.parametrize("has_unread", [False, True])
def test_closed_end_is_found_after_its_last_message(ends: Ends, has_unread: bool) -> None:
    control, data = ends
    if has_unread:
        control.send(Barrier(id=1))
    data.send(DataReply(to=7))
    data.close()
    assert control.receive() == (DataReply(to=7), [])
    with pytest.raises(ClosedError):
        control.receive()
    with pytest.raises(ClosedError):
        control.send(Barrier())


def test_oversized_frame_or_backlog_is_refused(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.data.channel.MAX_MESSAGE_BYTES", 1 << 20)
    monkeypatch.setattr("kvbus.data.channel.MAX_UNSENT_BYTES", 4 << 20)
    control, _ = ends
    with pytest.raises(ProtocolError):
        control.send(AddPeer(peer="p", metadata=(bytes(1 << 20),)))
    with pytest.raises(ProtocolError):
        control.send(Barrier(), [0] * (MAX_MESSAGE_FDS + 1))
    with pytest.raises(ClosedError, match="has not read"):  # noqa: PT012  # one of many
        for _ in range(64):
            control.send(AddPeer(peer="p", metadata=(bytes(1 << 19),)))


def test_an_end_with_room_is_writable(ends: Ends) -> None:
    control, data = ends
    control.send(AddPeer(peer="p", metadata=(bytes(8 << 20),)))
    assert not select.select([], [control], [], 0)[1]
    while data.receive() is None:
        control.flush()
    assert select.select([], [control], [], 0)[1]
