"""``python -m kvbus.integrations.proxy``: starts the proxy.

Refuses to start without the packages of the extra ``proxy``, and says how to install them.
"""

import sys

EXTRA = ("starlette", "httpx", "uvicorn")


def main() -> None:
    """Run the command; exit status 1 when a package of the extra is missing."""
    try:
        from kvbus.integrations.proxy.command import app  # noqa: PLC0415 - it may be missing
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.stderr.write(f"error: the proxy needs {error.name}: pip install 'kvbus[proxy]'\n")
        raise SystemExit(1) from None
    app(prog_name="python -m kvbus.integrations.proxy")


if __name__ == "__main__":
    main()
