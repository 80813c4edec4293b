"""What goes wrong: processes that stop, crash, restart, and engines that end."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvbus_prefill.offer.events import DrainStarted, Stopped
from kvbus_prefill.slots.events import Stopped as SlotsStopped
from tests.simulator.decode import DecodeAgent
from tests.simulator.prefill import PrefillAgent

if TYPE_CHECKING:
    from tests.simulator.world import World

Agent = PrefillAgent | DecodeAgent
NUM_SIGNS = 3


class Faults:
    """All faults of a world; each agent meets them at times of its own."""

    def __init__(self, world: "World") -> None:
        self.world, self._settings, self._random = world, world.settings.faults, world.random

    def start(self) -> None:
        """From now on."""
        settings = self._settings
        for agent in (*self.world.prefill, *self.world.decode):
            self._again(settings.stop_every_s, self._stop, agent)
            self._again(settings.crash_every_s, self._crash, agent)
            self._again(settings.engine_loss_every_s, self._lose_engine, agent)

    def _again(self, every_s: float, fault: Callable[[Any], None], agent: Agent) -> None:
        if every_s:
            self._later(self._random.expovariate(1 / every_s), fault, agent)

    def _later(self, elapsed_s: float, call: Callable[..., None], *args: Any) -> None:
        self.world.clock.at(self.world.clock.now + elapsed_s, call, *args)

    def _stop(self, agent: Agent) -> None:
        """SIGSTOP, and SIGCONT after a while that is short more often than long."""
        if self.world.is_ending:
            return
        self._again(self._settings.stop_every_s, self._stop, agent)
        process = agent.process
        if process.up and not process.stopped:
            self.world.counts["stops"] += 1
            process.stop()
            share = self._random.random() ** 3
            self._later(share * self._settings.longest_stop_s, self._resume, agent, process.life)

    def _resume(self, agent: Agent, life: int) -> None:
        if agent.process.life == life and agent.process.stopped:
            agent.resume()

    def _crash(self, agent: Agent) -> None:
        """SIGKILL or SIGTERM; a new process comes after a while."""
        if self.world.is_ending:
            return
        self._again(self._settings.crash_every_s, self._crash, agent)
        if not agent.process.up:
            return
        self.world.counts["crashes"] += 1
        if self._random.random() < 0.3 and not agent.process.stopped:
            self._shut_down(agent)
        agent.end()
        if isinstance(agent, PrefillAgent) and self._random.random() < 0.5:
            for reader in self.world.decode:
                if reader.process.up and reader.known_client(agent):
                    lost = reader.lose_peer
                    reader.process.after(0.5 * self._random.random(), lost, agent)
        self._later(2.0 * self._random.random(), self._begin, agent)

    def _shut_down(self, agent: Agent) -> None:
        if isinstance(agent, PrefillAgent):
            agent.tell(DrainStarted())
            agent.meeting.dispatch(DrainStarted())
            agent.gathering.tell(SlotsStopped())
            agent.tell(Stopped())
        else:
            agent.shut_down()

    def _begin(self, agent: Agent) -> None:
        agent.process.begin()
        agent.start()
        if isinstance(agent, PrefillAgent):
            self._give_sign(agent, agent.boot, NUM_SIGNS)

    def _give_sign(self, agent: PrefillAgent, boot: str, num_left: int) -> None:
        """A heartbeat, or the answer to a ping, tells readers that another process is there."""
        if agent.boot != boot or not num_left:
            return
        for reader in self.world.decode:
            client = reader.known_client(agent)
            if client is not None and agent.process.up and not agent.process.stopped:
                self.world.network.send(reader.process, reader.hear_sign, agent, boot)
        self._later(1.0, self._give_sign, agent, boot, num_left - 1)

    def _lose_engine(self, agent: Agent) -> None:
        if self.world.is_ending:
            return
        self._again(self._settings.engine_loss_every_s, self._lose_engine, agent)
        if agent.process.up and not agent.process.stopped:
            self.world.counts["engines lost"] += 1
            agent.lose_engine()
