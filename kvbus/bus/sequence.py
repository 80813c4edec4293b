"""The seqs of one publisher's topics, and whether something is missing between them.

Refuses to count topics without end: a publisher has at most `MAX_TOPICS`.
"""

from collections.abc import Iterable, Mapping

from kvbus.errors import ProtocolError

MAX_TOPICS = 256


class TopicSequence:
    """What was seen of one boot of a publisher, as a subscriber with some or all topics."""

    def __init__(self, topics: frozenset[str]) -> None:
        self._topics = topics
        self._last: dict[str, int] = {}
        self._based = False

    def see(self, topic: str, seq: int) -> int:
        """Take note of an event; returns how many before it are missing.

        Raises `ProtocolError` for a seq that is not larger than the last, or a topic too many.
        """
        last = self._last.get(topic)
        if last is None:
            # Without a heartbeat seen, it is not known what was sent before we listened.
            self._require_room((topic,))
            last = 0 if self._based else seq - 1
        if seq <= last:
            raise ProtocolError(f"seq {seq} of topic '{topic}' after {last}")
        self._last[topic] = seq
        return seq - last - 1

    def see_heartbeat(self, seqs: Mapping[object, object]) -> list[str]:
        """Take note of the last seqs of all topics; returns the topics whose tail is missing."""
        checked = self._checked(seqs)
        self._require_room(topic for topic, _ in checked)
        missing = []
        for topic, seq in checked:
            last = self._last.get(topic, 0 if self._based else seq)
            if seq > last:
                missing.append(topic)
            self._last[topic] = max(seq, last)
        self._based = True
        return missing

    def _checked(self, seqs: Mapping[object, object]) -> list[tuple[str, int]]:
        """The seqs of our topics, all of them plausible: half a heartbeat must change nothing."""
        checked = []
        for topic, seq in seqs.items():
            if not isinstance(topic, str) or type(seq) is not int or seq < 0:
                raise ProtocolError("heartbeat's seqs must map topics to unsigned integers")
            if not self._topics or topic in self._topics:
                checked.append((topic, seq))
        return checked

    def _require_room(self, topics: Iterable[str]) -> None:
        num_new = sum(topic not in self._last for topic in topics)
        if num_new and len(self._last) + num_new > MAX_TOPICS:
            raise ProtocolError(f"publisher has more than {MAX_TOPICS} topics")
