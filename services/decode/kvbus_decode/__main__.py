"""The command ``kvbus-decode``: runs a decode agent until it is told to stop."""

from kvbus.agent.command import run_command
from kvbus.protocol.engine import AgentRole
from kvbus_decode.agent import DecodeService
from kvbus_decode.config import DecodeConfig


def main() -> None:
    run_command(AgentRole.DECODE, DecodeConfig, DecodeService)


if __name__ == "__main__":
    main()
