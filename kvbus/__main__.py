"""The program ``kvbus``."""

import io
import sys

from kvbus.interrupt import importing


def main() -> None:
    with importing():
        from kvbus.cli import app  # noqa: PLC0415 - Ctrl-C comes before the end of this import

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for typer's help
        app()


if __name__ == "__main__":
    main()
