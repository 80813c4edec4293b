"""The command ``kvbus-prefill``: runs a prefill agent until it is told to stop."""

from kvbus.agent.command import run_command
from kvbus.protocol.engine import AgentRole
from kvbus_prefill.agent import PrefillService
from kvbus_prefill.config import PrefillConfig


def main() -> None:
    run_command(AgentRole.PREFILL, PrefillConfig, PrefillService)


if __name__ == "__main__":
    main()
