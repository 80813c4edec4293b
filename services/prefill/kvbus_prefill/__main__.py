"""The command ``kvbus-prefill``: runs a prefill agent until it is told to stop."""

from kvbus.agent.command import agent_command
from kvbus.agent.config import PREFILL_DEFAULTS
from kvbus.protocol.engine import AgentRole
from kvbus_prefill.agent import PrefillService
from kvbus_prefill.config import PrefillConfig

main = agent_command(
    AgentRole.PREFILL,
    PrefillConfig,
    PrefillService,
    defaults=PREFILL_DEFAULTS,
    name="kvbus-prefill",
)

if __name__ == "__main__":
    main()
