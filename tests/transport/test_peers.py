"""Registrations that come and go while peers know each other."""

from kvbus.transport import ReadStatus
from tests.transport.conftest import MIB, WITHIN_S, Meet


def test_memory_is_readable_once_its_metadata_is_added_also_of_an_address_or_peer_that_was_known(
    meet: Meet,
) -> None:
    reader, place = meet()
    later = reader.told(place.peer, MIB, seed=2)
    later.name = place.name

    not_added = reader.read(later)
    reader.add(later)
    assert not_added.status is ReadStatus.FAILED
    assert later.name == place.name == "peer/1"
    assert reader.can_read(later)

    place.seed, place.metadata = 6, place.peer.metadata("refill", index=0, seed=6)
    reader.add(place)
    assert reader.can_read(place)

    place.metadata = place.peer.metadata("everything")
    reader.transport.remove_peer(place.name).result(WITHIN_S)
    removed = reader.read(place)
    reader.add(place)
    assert removed.status is ReadStatus.FAILED
    assert reader.can_read(place)


def test_metadata_may_be_added_while_a_read_is_in_flight(over_tcp: None, meet: Meet) -> None:
    reader, place = meet(128 * MIB, connected=True)
    later = reader.told(place.peer, MIB, seed=2)

    place.peer.stop()
    _, ended = reader.start(place)
    reader.add(later)
    in_flight = not ended.done()
    place.peer.go_on()

    assert in_flight
    assert ended.result(WITHIN_S).status is ReadStatus.DONE
    assert (reader.memory == place.content).all()
    assert reader.can_read(later)
