"""One block of the benchmark: every phase on one pair of servers, as named series of samples.

Refuses to measure before the tokens are right: a handover that moves garbage is fast.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from .client import Client
from .handovers import Handed, Sides, closed_loop, connected
from .model import Prompts
from .pairs import Pair
from .steps import BACKGROUND_PROMPT_TOKENS, beside_prefills, quiet_steps, steps_beside
from .turns import decode_steps, prefills

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 8
IDLE_CPU_S, QUIET_STREAMS, MOVING_SIDES = 3.0, 3, 2
Series = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured in each block."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    decode_tokens: int
    only_turns: bool = False


def measure(pair: Pair, plan: Plan, prompts: Prompts) -> Series:
    """All series of one pair: milliseconds, or percent of a core."""
    with _clients(pair) as (prefill, decode):
        cached = _cache(decode, plan, prompts)
        _check(pair, prefill, decode, plan, prompts)
    series: Series = {}
    if not plan.only_turns:
        series |= _handovers(pair, plan, prompts, cached)
        series |= _steps(pair, plan, prompts, cached)
    return series | _in_turns(pair, plan, prompts, cached)


def _handovers(pair: Pair, plan: Plan, prompts: Prompts, cached: Iterator[str]) -> Series:
    with (
        _clients(pair) as (_, decode),
        connected(pair, cached, num_sides=plan.concurrency, num_tokens=plan.decode_tokens) as sides,
    ):
        closed_loop(sides, prompts.several(plan.concurrency, plan.prompt_tokens))
        series = _idle_cpu(pair)
        moved_before = _moved_tokens(decode)
        for name, used in (("idle", sides[:1]), ("load", sides)):
            before, start_s = pair.cpu_s(), time.perf_counter()
            handed = closed_loop(used, prompts.several(plan.num_requests, plan.prompt_tokens))
            wall_s = time.perf_counter() - start_s
            series |= _of_handed(name, handed)
            series[f"{name} requests/s"] = [len(handed) / wall_s]
            after = pair.cpu_s()
            for who, used_s in after.items():
                each = (used_s - before[who]) / len(handed)
                series[f"{name} CPU ms a request, {who}"] = [each * 1e3]
        _check_moved(pair, plan, _moved_tokens(decode) - moved_before)
        _cache_again(decode, plan, cached)
        series["idle local hit ms"] = _ms(
            [sides[0].local_hit_s() for _ in range(plan.num_requests)]
        )
        return series


def _steps(pair: Pair, plan: Plan, prompts: Prompts, cached: Iterator[str]) -> Series:
    background = prompts.several(QUIET_STREAMS, BACKGROUND_PROMPT_TOKENS)
    with (
        _clients(pair) as (prefill, decode),
        connected(pair, cached, num_sides=MOVING_SIDES, num_tokens=1) as sides,
    ):
        quiet = quiet_steps(decode, background)
        before = _token_latency(decode)
        with steps_beside(decode, background) as moving:
            moving.handed = beside_prefills(
                prefill,
                sides,
                prompts.several(plan.num_requests, plan.prompt_tokens),
                Sides.finish,
                offer=pair.moves,
            )
        total_s, count = (
            now - then for now, then in zip(_token_latency(decode), before, strict=True)
        )
    return {
        "step alone ms": _ms(quiet.all_s()),
        "step beside handovers ms": _ms(moving.all_s()),
        "step during a handover ms": _ms(moving.in_handovers_s()),
        "step beside handovers, vLLM's own mean, ms": [total_s / max(1, count) * 1e3],
        "prefill beside handovers ms": _ms([one.prefill_s for one in moving.handed[1:]]),
        "handover beside a stream ms": _ms([one.handover_s for one in moving.handed]),
    }


def _in_turns(pair: Pair, plan: Plan, prompts: Prompts, cached: Iterator[str]) -> Series:
    if not pair.works_stopped:
        return {}
    background = prompts.several(QUIET_STREAMS, BACKGROUND_PROMPT_TOKENS)
    wanted = partial(prompts.several, plan.num_requests, plan.prompt_tokens)
    with (
        _clients(pair) as (prefill, decode),
        connected(pair, cached, num_sides=MOVING_SIDES, num_tokens=1) as sides,
    ):
        _cache_again(decode, plan, cached)
        steps = decode_steps(
            decode, background, prefill, sides[0], wanted(), server=pair.prefill.group
        )
        prefilled = prefills(prefill, sides, wanted())
    series: Series = {}
    for kind, of_steps, of_prefills in (
        ("moved", steps.moved, prefilled.moved),
        ("cached", steps.cached, prefilled.cached),
    ):
        series |= {
            f"step in turns, KV {kind}, ms": _ms([s for one in of_steps for s in one.all_s()]),
            f"step during a load in turns, KV {kind}, ms": _ms(
                [s for one in of_steps for s in one.in_handovers_s()]
            ),
            f"prefill in turns, KV {kind}, ms": _ms([s for one in of_prefills for s in one]),
        }
    return series


def _check(pair: Pair, prefill: Client, decode: Client, plan: Plan, prompts: Prompts) -> None:
    """Tokens after a handover are those of the server that computed the prompt.

    The prompt is one token longer than whole blocks, so that both sides compute one token over the
    same cached blocks: in bf16 other shapes give other sums.
    """
    outcomes = set()
    for prompt in prompts.several(CHECKED_PROMPTS, plan.prompt_tokens + 1):
        prefill.stream(prompt, 1)
        expected = prefill.stream(prompt, CHECKED_TOKENS, with_tokens=True).all_tokens
        params = prefill.prefill(prompt, offer=pair.moves).kv_transfer_params
        got = decode.stream(prompt, CHECKED_TOKENS, params=params, with_tokens=True).all_tokens
        if got != expected:
            raise SystemExit(
                f"error: {pair.connector}: after a handover the decode server said {got}, "
                f"the server that prefilled it said {expected}"
            )
        outcomes.add(tuple(got))
    if len(outcomes) < CHECKED_PROMPTS:
        raise SystemExit(f"error: the model says the same for different prompts: {outcomes}")


def _check_moved(pair: Pair, plan: Plan, tokens: float) -> None:
    """The decode server counts the tokens that a connector brought it; it computed none of them."""
    expected = 2 * plan.num_requests * (plan.prompt_tokens - 1) if pair.moves else 0
    if tokens < expected:
        raise SystemExit(
            f"error: {pair.connector}: {tokens:.0f} tokens came from the connector, not "
            f"{expected}: the decode server computed the rest by itself"
        )


def _cache(decode: Client, plan: Plan, prompts: Prompts) -> Iterator[str]:
    """Prompts that the decode server has computed, over and over: all but one token cached."""
    texts = prompts.several(plan.concurrency, plan.prompt_tokens + 1)
    for text in texts:
        decode.stream(text, 1)
    return itertools.cycle(texts)


def _cache_again(decode: Client, plan: Plan, cached: Iterator[str]) -> None:
    for text in itertools.islice(cached, plan.concurrency):
        decode.stream(text, 1)


def _idle_cpu(pair: Pair) -> Series:
    before = pair.cpu_s()
    time.sleep(IDLE_CPU_S)
    after = pair.cpu_s()
    return {
        f"nothing to do, CPU %, {who}": [(after[who] - before[who]) / IDLE_CPU_S * 100]
        for who in after
    }


def _of_handed(name: str, handed: list[Handed]) -> Series:
    return {
        f"{name} handover ms": _ms([one.handover_s for one in handed]),
        f"{name} prefill ms": _ms([one.prefill_s for one in handed]),
    }


def _ms(seconds: list[float]) -> list[float]:
    return [second * 1e3 for second in seconds]


def _moved_tokens(decode: Client) -> float:
    return _metric(decode, "vllm:external_prefix_cache_hits_total")


def _token_latency(decode: Client) -> tuple[float, float]:
    name = "vllm:inter_token_latency_seconds"
    return _metric(decode, f"{name}_sum"), _metric(decode, f"{name}_count")


def _metric(server: Client, name: str) -> float:
    families = text_string_to_metric_families(server.get("/metrics"))
    return sum(s.value for family in families for s in family.samples if s.name == name)


@contextlib.contextmanager
def _clients(pair: Pair) -> Iterator[tuple[Client, Client]]:
    with (
        contextlib.closing(pair.prefill.client()) as prefill,
        contextlib.closing(pair.decode.client()) as decode,
    ):
        yield prefill, decode
