"""Measures vLLM's handover with kvbus when decode reads along, beside one after the prefill.

Run it from the repository's root, in an environment that has vLLM: ``python
benchmarks/vllm_overlap.py``. Prompts are computed in chunks; requests of all kinds take turns on
one pair of servers. A handover is from the prefill response to the first token of decode. The
second token of an answer is measured, too: decode has made both, or goes on behind that of prefill.
With ``--nixl`` another pair with vLLM's own connector hands over after the prefill, as it must.
"""

import argparse
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from handover.client import Client
from handover.model import ModelShape, Prompts, write_model
from handover.pairs import Pair, pair
from handover.servers import Recipe

TARGET, TARGET_OF_NIXL = 0.30, 0.20
NUM_TOKENS, CHECKED, WARM_UP, KV_SPACE_GIB = 4, 4, 3, 2
BOTH = "to the second token, with both of decode, after"
BEHIND = "to the second token, behind that of prefill, after"
Series = dict[str, list[float]]


def after(prefill: Client, decode: Client, prompt: str) -> list[float]:
    """Prefill, then decode: seconds until each token."""
    prefilled = prefill.prefill(prompt, offer=True)
    streamed = decode.stream(prompt, NUM_TOKENS, params=prefilled.kv_transfer_params)
    return [at_s - prefilled.received_s for at_s in streamed.at_s]


def behind(prefill: Client, decode: Client, prompt: str) -> tuple[float, list[int]]:
    """Decode goes on behind the token of prefill: seconds until the second one; all tokens, too."""
    prefilled = prefill.prefill(prompt, offer=True)
    more, params = f"{prompt[:-1]},{prefilled.token}]", prefilled.kv_transfer_params
    streamed = decode.stream(more, NUM_TOKENS - 1, params=params, with_tokens=True)
    return streamed.at_s[0] - prefilled.received_s, [prefilled.token, *streamed.all_tokens]


def beside(
    prefill: Client, decode: Client, prompt: str, ticket: dict[str, Any]
) -> tuple[float, list[int]]:
    """Both at once, at the agent that ``ticket`` names; the tokens, too."""
    name = uuid.uuid4().hex
    meets = {"transfer_id": name, "endpoint": ticket["endpoint"]}
    params = {"do_remote_prefill": True, "do_remote_decode": False, "rendezvous": meets}
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(decode.stream, prompt, NUM_TOKENS, params=params, with_tokens=True)
        prefilled = prefill.prefill(prompt, offer=True, transfer_id=name)
        streamed = streaming.result()
    return streamed.at_s[0] - prefilled.received_s, streamed.all_tokens


def check(prefill: Client, decode: Client, prompts: list[str], ticket: dict[str, Any]) -> None:
    """Tokens are those of the server that computed the prompt, one token longer than blocks."""
    for prompt in prompts:
        expected = prefill.stream(prompt, NUM_TOKENS, with_tokens=True).all_tokens
        got = beside(prefill, decode, prompt, ticket)[1]
        if got == expected:
            got = behind(prefill, decode, prompt)[1]
        if got != expected:
            raise SystemExit(f"error: decode said {got}, the server that prefilled it {expected}")


def measure(servers: Pair, prompts: Prompts, num_requests: int, num_tokens: int) -> Series:
    """Milliseconds of handovers of both kinds, and until second tokens, in turns."""
    series: Series = {"after": [], "beside": [], BOTH: [], BEHIND: []}
    with (
        closing(servers.prefill.client()) as prefill,
        closing(servers.decode.client()) as decode,
    ):
        (first,) = prompts.several(1, num_tokens)
        ticket = (prefill.prefill(first, offer=True).kv_transfer_params or {})["ticket"]
        check(prefill, decode, prompts.several(CHECKED, num_tokens + 1), ticket)
        for number in range(num_requests + WARM_UP):
            one, other, third = prompts.several(3, num_tokens)
            first_s, second_s, *_ = after(prefill, decode, one)
            took_s = {
                "after": first_s,
                "beside": beside(prefill, decode, other, ticket)[0],
                BOTH: second_s,
                BEHIND: behind(prefill, decode, third)[0],
            }
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
            took_ms.append(after(prefill, decode, prompt)[0] * 1e3)
    return {"by NixlConnector after": took_ms[WARM_UP:]}


def show_ratio(series: Series, other: str, target: float) -> None:
    """What reading along leaves of another kind of handover."""
    ratio = median(series["beside"]) / median(series[other])
    verdict = "met" if ratio <= target else "MISSED"
    print(f"beside, of a handover {other} the prefill: {ratio:.2f}, target {target}: {verdict}")


def main() -> None:
    """Measure, and print the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--chunks", type=int, default=8, help="that a prompt is computed in")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of 128, in bf16")
    parser.add_argument("--nixl", action="store_true", help="measure vLLM's own connector, too")
    options = parser.parse_args()
    shape, max_tokens = ModelShape(options.layers, options.heads), 2 * options.tokens
    with tempfile.TemporaryDirectory(prefix="kvo-") as name:
        folder = Path(name)
        write_model(folder / "model", shape, max_tokens=max_tokens)
        flags = ["--max-num-batched-tokens", str(options.tokens // options.chunks)]
        recipe = Recipe(folder / "model", folder, KV_SPACE_GIB, max_tokens, flags)
        with pair("kvbus", recipe, nixl_extra={}) as servers:
            series = measure(servers, Prompts(0), options.requests, options.tokens)
        if options.nixl:
            series |= measure_nixl(recipe, Prompts(1), options.requests, options.tokens)
    size_mb = shape.token_bytes * options.tokens / 1e6
    print(f"{size_mb:.0f} MB a request in {options.chunks} chunks, {options.requests} of each kind")
    for kind, each in series.items():
        print(f"{kind} the prefill: p50 {median(each):.1f} ms, longest {max(each):.1f}")
    ratio = median(series[BEHIND]) / median(series[BOTH])
    print(f"second token behind that of prefill, of one behind decode's: {ratio:.2f}")
    for other, target in (("after", TARGET), ("by NixlConnector after", TARGET_OF_NIXL)):
        if other in series:
            show_ratio(series, other, target)


main()
