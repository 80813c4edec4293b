"""The ``kvbus-prefill`` command."""

from kvbus.interrupt import importing


def main() -> None:
    with importing():
        from kvbus.agent.command import run_command  # noqa: PLC0415 - Ctrl-C comes before their end
        from kvbus.protocol.engine import AgentRole  # noqa: PLC0415
        from kvbus_prefill.config import PrefillConfig  # noqa: PLC0415
        from kvbus_prefill.prefill_service import PrefillService  # noqa: PLC0415

        run_command(AgentRole.PREFILL, PrefillConfig, PrefillService)


if __name__ == "__main__":
    main()
