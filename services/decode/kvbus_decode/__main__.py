"""The command ``kvbus-decode``: runs a decode agent until it is told to stop."""

from kvbus.agent.command import agent_command
from kvbus.agent.config import DECODE_DEFAULTS
from kvbus.protocol.engine import AgentRole
from kvbus_decode.agent import DecodeService
from kvbus_decode.config import DecodeConfig

main = agent_command(
    AgentRole.DECODE, DecodeConfig, DecodeService, defaults=DECODE_DEFAULTS, name="kvbus-decode"
)

if __name__ == "__main__":
    main()
