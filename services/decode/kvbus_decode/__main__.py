"""The ``kvbus-decode`` command."""

from kvbus.interrupt import importing


def main() -> None:
    with importing():
        from kvbus.agent.command import run_command  # noqa: PLC0415 - Ctrl-C may come meanwhile
        from kvbus.protocol.engine import AgentRole  # noqa: PLC0415
        from kvbus_decode.config import DecodeConfig  # noqa: PLC0415
        from kvbus_decode.decode_service import DecodeService  # noqa: PLC0415

        run_command(AgentRole.DECODE, DecodeConfig, DecodeService)


if __name__ == "__main__":
    main()
