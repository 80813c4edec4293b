"""The program ``kvbus``."""

from kvbus.interrupt import importing


def main() -> None:
    """Run the command that the arguments name."""
    with importing():
        from kvbus.cli import app  # noqa: PLC0415 - Ctrl-C comes before the end of this import

        app()


if __name__ == "__main__":
    main()
