"""The command line ``kvbus``. A command's module is imported when it is called."""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvbus.errors import ConfigError, KVBusError, plain_message
from kvbus.interrupt import raise_at_ctrl_c
from kvbus.output import fail

COMMANDS = {
    "demo": (
        "kvbus.demo.run",
        "Hand requests from a prefill engine to a decode engine; compare with the model run alone.",
    ),
    "bench": (
        "kvbus.bench.command",
        "Measure handoffs beside bare NIXL on this machine, with agents and engines of its own.",
    ),
    "bench-prefill": (
        "kvbus.bench.command",
        "Offer blocks at this machine's prefill agent; print their tickets, for bench-decode.",
    ),
    "bench-decode": (
        "kvbus.bench.command",
        "Fetch what bench-prefill offers, by the lines on stdin; compare bytes, and show speeds.",
    ),
    "plan": (
        "kvbus.planning.command",
        "Show what a handoff would read from whom, on which path, and how long it would take.",
    ),
    "doctor": (
        "kvbus.doctor.command",
        "Check what works on this machine for kvbus, and explain how to fix the rest.",
    ),
    "conform": (
        "kvbus.conform.command",
        "Check whether an engine keeps to the protocol, by playing its agent.",
    ),
    "status": (
        "kvbus.lab.status.command",
        "Show what agents hold and do now, or what happens at one.",
    ),
    "trace": (
        "kvbus.trace.command",
        "Show one request over all agents, on one clock, and where its time went.",
    ),
    "keys": (
        "kvbus.keys.command",
        "Make, show, trust and revoke the CURVE keys of agents, routers and tools.",
    ),
}
"""Module of each command, and the first line of its help."""
PANELS = {
    "Run": ("demo",),
    "Inspect": ("status", "trace", "plan", "doctor", "keys"),
    "Develop": ("bench", "bench-prefill", "bench-decode", "conform"),
}
HELP_STYLE: dict[str, Any] = {"rich_markup_mode": "markdown", "pretty_exceptions_enable": False}


class Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        found = command and _load_command(str(name))
        if found:
            _hide_types(found, ctx)
        raise_at_ctrl_c()
        return name, found, rest

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Print errors as one line. Usage errors exit with status 2."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = plain_message(error.message)
            raise
        except KVBusError as error:
            fail(error.message, status=2 if isinstance(error, ConfigError) else 1, cause=error)


def _load_command(name: str) -> Any:
    loaded = getattr(import_module(COMMANDS[name][0]), name.replace("-", "_"))
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    wrapper = typer.Typer(add_completion=False, **HELP_STYLE)
    wrapper.command(name)(loaded)
    return typer.main.get_command(wrapper)


def _hide_types(command: Any, ctx: Any) -> None:
    _without_types(command.get_params(ctx))
    for inner in getattr(command, "commands", {}).values():
        _hide_types(inner, ctx)


def _nothing(**_: Any) -> None: ...


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", param.param_type_name == "argument"):
            param.display_type_rich = _nothing
    return params


app = typer.Typer(
    cls=Commands,
    help="Moves the KV cache of LLM requests from a prefill engine to a decode engine.",
    no_args_is_help=True,
    **HELP_STYLE,
)
for _panel, _names in PANELS.items():
    for _name in _names:
        app.command(_name, help=COMMANDS[_name][1], rich_help_panel=_panel)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvbus {version('kvbus')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The options before a command."""
