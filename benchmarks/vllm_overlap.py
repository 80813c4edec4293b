"""Measures vLLM's handover with kvbus when decode reads along, beside one after the prefill.

Run it from the repository's root, in an environment that has vLLM: ``python
benchmarks/vllm_overlap.py``. Prompts are computed in chunks; requests of all kinds take turns on
one pair of servers. A handover is from the prefill response to the first token of decode. The
second token of an answer is measured, too: decode has made both, or goes on behind that of prefill.
Of each handover the part that is kvbus' own is told, see ``handover/own_part.py``.
With ``--nixl`` another pair with vLLM's own connector hands over after the prefill, as it must.
"""

import argparse
import os
import signal
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from handover.client import Client, Prefilled, Streamed
from handover.model import ModelShape, Prompts, write_model
from handover.own_part import AFTER, BESIDE, STAMPS, OwnParts, copy_ms
from handover.pairs import Pair, pair
from handover.servers import Recipe

TARGET, TARGET_OF_NIXL, TARGET_WITHOUT_STEP = 0.30, 0.20, 0.25
NUM_TOKENS, CHECKED, WARM_UP, KV_SPACE_GIB = 4, 4, 3, 2
BOTH = "to the second token, with both of decode, after"
BEHIND = "to the second token, behind that of prefill, after"
BY_NIXL = "by NixlConnector after"
STEP = "from token to token, of a handover after"
Series = dict[str, list[float]]


def after(prefill: Client, decode: Client, prompt: str) -> tuple[Prefilled, Streamed]:
    """Prefill, then decode."""
    prefilled = prefill.prefill(prompt, offer=True)
    return prefilled, decode.stream(prompt, NUM_TOKENS, params=prefilled.kv_transfer_params)


def behind(prefill: Client, decode: Client, prompt: str) -> tuple[float, list[int]]:
    """Decode goes on behind the token of prefill: seconds until the second one; all tokens, too."""
    prefilled = prefill.prefill(prompt, offer=True)
    more, params = f"{prompt[:-1]},{prefilled.token}]", prefilled.kv_transfer_params
    streamed = decode.stream(more, NUM_TOKENS - 1, params=params, with_tokens=True)
    return streamed.at_s[0] - prefilled.received_s, [prefilled.token, *streamed.all_tokens]


def beside(
    prefill: Client, decode: Client, prompt: str, ticket: dict[str, Any]
) -> tuple[Prefilled, Streamed]:
    """Both at once, at the agent that ``ticket`` names."""
    name = uuid.uuid4().hex
    rendezvous = {"transfer_id": name, "endpoint": ticket["endpoint"]}
    params = {"do_remote_prefill": True, "do_remote_decode": False, "rendezvous": rendezvous}
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(decode.stream, prompt, NUM_TOKENS, params=params, with_tokens=True)
        prefilled = prefill.prefill(prompt, offer=True, transfer_id=name)
        return prefilled, streaming.result()


def check(prefill: Client, decode: Client, prompts: list[str], ticket: dict[str, Any]) -> None:
    """Tokens are those of the server that computed the prompt, one token longer than blocks."""
    for prompt in prompts:
        expected = prefill.stream(prompt, NUM_TOKENS, with_tokens=True).all_tokens
        got = beside(prefill, decode, prompt, ticket)[1].all_tokens
        if got == expected:
            got = behind(prefill, decode, prompt)[1]
        if got != expected:
            raise SystemExit(f"error: decode said {got}, the server that prefilled it {expected}")


def measure(
    servers: Pair, own: OwnParts, prompts: Prompts, num_requests: int, num_tokens: int
) -> Series:
    """Milliseconds of handovers of both kinds, and until second tokens, in turns."""
    series: Series = {AFTER: [], BESIDE: [], BOTH: [], BEHIND: [], STEP: []}
    with (
        closing(servers.prefill.client()) as prefill,
        closing(servers.decode.client()) as decode,
    ):
        (first,) = prompts.several(1, num_tokens)
        ticket = (prefill.prefill(first, offer=True).kv_transfer_params or {})["ticket"]
        check(prefill, decode, prompts.several(CHECKED, num_tokens + 1), ticket)
        for number in range(num_requests + WARM_UP):
            one, other, third = prompts.several(3, num_tokens)
            done = {
                AFTER: after(prefill, decode, one),
                BESIDE: beside(prefill, decode, other, ticket),
            }
            took_s = {kind: each.at_s[0] - told.received_s for kind, (told, each) in done.items()}
            prefilled, streamed = done[AFTER]
            took_s[BOTH] = streamed.at_s[1] - prefilled.received_s
            took_s[BEHIND] = behind(prefill, decode, third)[0]
            took_s[STEP] = median(end - start for start, end in pairwise(streamed.at_s))
            for kind, handed in done.items() if number >= WARM_UP else ():
                own.add(kind, *handed)
            for kind, each in series.items() if number >= WARM_UP else ():
                each.append(took_s[kind] * 1e3)
    return series


def measure_nixl(recipe: Recipe, prompts: Prompts, num_requests: int, num_tokens: int) -> Series:
    """Milliseconds of handovers by vLLM's own connector, with fewer threads than its default."""
    took_ms = []
    with (
        pair("nixl-tuned", recipe, nixl_extra={}) as servers,
        closing(servers.prefill.client()) as prefill,
        closing(servers.decode.client()) as decode,
    ):
        for prompt in prompts.several(num_requests + WARM_UP, num_tokens):
            prefilled, streamed = after(prefill, decode, prompt)
            took_ms.append((streamed.at_s[0] - prefilled.received_s) * 1e3)
    return {BY_NIXL: took_ms[WARM_UP:]}


def show_ratio(what: str, ratio: float, target: float) -> None:
    """Beside its target."""
    print(f"{what}: {ratio:.2f}, target {target}: {'met' if ratio <= target else 'MISSED'}")


def main() -> None:
    """Measure, and print the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--chunks", type=int, default=8, help="that a prompt is computed in")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of 128, in bf16")
    parser.add_argument("--copy-threads", type=int, default=1, help="of each agent")
    parser.add_argument("--nixl", action="store_true", help="measure vLLM's own connector, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by a signal"))
    shape, max_tokens = ModelShape(options.layers, options.heads), 2 * options.tokens
    with tempfile.TemporaryDirectory(prefix="kvo-") as name:
        folder = Path(name)
        write_model(folder / "model", shape, max_tokens=max_tokens)
        flags = ["--max-num-batched-tokens", str(options.tokens // options.chunks)]
        stamps = folder / "stamps"
        env = {STAMPS: str(stamps), "PYTHONPATH": os.pathsep.join(sys.path)}
        recipe = Recipe(folder / "model", folder, KV_SPACE_GIB, max_tokens, flags, env)
        settings = {"copy_threads": options.copy_threads}
        with pair("kvbus", recipe, nixl_extra={}, settings=settings) as servers:
            own = OwnParts(servers.agents, stamps)
            series = measure(servers, own, Prompts(0), options.requests, options.tokens)
        if options.nixl:
            series |= measure_nixl(recipe, Prompts(1), options.requests, options.tokens)
    num_bytes = shape.token_bytes * options.tokens
    size = f"{num_bytes / 1e6:.0f} MB a request in {options.chunks} chunks"
    print(f"{size}, {options.requests} of each kind")
    for kind, each in series.items():
        print(f"{kind} the prefill: p50 {median(each):.1f} ms, longest {max(each):.1f}")
    print(*own.lines(), sep="\n")
    print(f"a bare copy of all of it takes {copy_ms(num_bytes):.1f} ms")
    ratio = median(series[BEHIND]) / median(series[BOTH])
    print(f"second token behind that of prefill, of one behind decode's: {ratio:.2f}")
    p50 = {kind: median(each) for kind, each in series.items()}
    for other, target in ((AFTER, TARGET), (BY_NIXL, TARGET_OF_NIXL)):
        if other in p50:
            what = f"beside, of a handover {other} the prefill"
            show_ratio(what, p50[BESIDE] / p50[other], target)
    ratio = (p50[BESIDE] - p50[STEP]) / (p50[AFTER] - p50[STEP])
    show_ratio("both without the step of decode", ratio, TARGET_WITHOUT_STEP)


main()
