"""The command ``kvbus plan``: what it prints, its exit status.

Refuses a bad spec with one line and exit status 2, engines that do not fit with exit status 1.
"""

from kvbus.console import Console
from kvbus.errors import ErrorCode, KVBusError
from kvbus.options import with_options
from kvbus.output import fail, write_json
from kvbus.plan.picture import picture
from kvbus.plan.plan import PlanOptions, make_plan
from kvbus.plan.report import as_json, print_plan


@with_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show what a handoff would read from whom, on which path, and how long it would take.

    A SPEC is a text such as `tp=4,layout=HND,block=16,kv_heads=8,head=128,layers=32,dtype=bf16`,
    or the path of a TOML file with the same keys. Needed are `layers`, `head` and, but for
    `attention=mla`, `kv_heads`.

    * `tp`, `pp`: tensor parallel ranks and pipeline stages (1); with fewer `kv_heads`, replicas
    * `layout`: `NHD`, `HND`, or all axes as `block.kv.token.head.dim` (NHD); `cross_layer=true`
      puts all layers into one region
    * `block`: tokens in a block (16)
    * `kv_heads`, `head`, `layers`, `dtype`: of the model (`dtype=bf16`)
    * `attention`: `gqa`, or `mla` with one latent of `head` elements (gqa)
    * `window`: every other layer has a sliding window of so many tokens (none)
    * `model`: both sides' must be equal (unnamed)

    In a file, `[[groups]]` may have `name`, `layers` (a list, or how many come next) and keys of
    their own; a group with `parts = [{name = "conv", units = 8, bytes = 4096}]` is an opaque state.

    Exit status 1: the KV of these two cannot be exchanged; 2: a mistake in a spec or an option.
    """
    try:
        found = make_plan(options)
        if options.svg is not None:
            options.svg.write_text(picture(found), encoding="utf-8")
    except KVBusError as error:
        status = 1 if error.code is ErrorCode.INCOMPATIBLE else 2
        fail(error.message, status=status, cause=error)
    except OSError as error:
        message = f"--svg: cannot write {str(options.svg)!r}: {error.strerror}"
        fail(message, status=2, cause=error)
    print_plan(found, Console())
    if options.as_one_json:
        write_json(as_json(found))
