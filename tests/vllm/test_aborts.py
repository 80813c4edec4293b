"""A client that hangs up leaves nothing behind on either side, whenever it does so."""

from tests.agents import wait_until
from tests.vllm.clusters import FOR_DECODE, Cluster, prompt_of
from tests.vllm.halting import halted
from tests.vllm.shapes import UP

SHAPE = UP
LONG = 3000


def test_a_prefill_given_up_before_it_has_begun_leaves_nothing(pair: Cluster) -> None:
    with halted(pair.prefill.pids("EngineCore")):
        call = pair.prefill.begin(prompt_of(LONG, seed=1), 1, kv_transfer_params=FOR_DECODE)
        call.abort()

    pair.check()


def test_a_prefill_given_up_between_two_chunks_leaves_nothing(pair: Cluster) -> None:
    prompt = prompt_of(LONG, seed=2)
    call = pair.prefill.begin(prompt, 1, kv_transfer_params=FOR_DECODE)
    wait_until(pair.reading, "prefill has begun")

    call.abort()

    pair.check()


def test_a_decode_given_up_before_its_fetch_releases_the_prefill_side(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=3)
    ticket = pair.ticket(prompt)

    with halted(pair.decode.pids("EngineCore")):
        pair.begin(prompt, ticket).abort()

    pair.check()


def test_a_decode_given_up_during_its_fetch_releases_both_sides(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=4)
    ticket = pair.ticket(prompt)

    with halted([pair.prefill_agent.pid]):
        call = pair.begin(prompt, ticket)
        wait_until(pair.under_way, "the fetch has begun")
        call.abort()

    pair.check()


def test_a_decode_given_up_during_its_fetch_does_not_disturb_another(pair: Cluster) -> None:
    prompts = [prompt_of(400, seed=5), prompt_of(400, seed=6)]
    tickets = [pair.ticket(prompt) for prompt in prompts]

    with halted([pair.prefill_agent.pid]):
        calls = [pair.begin(*each) for each in zip(prompts, tickets, strict=True)]
        wait_until(lambda: pair.under_way() == len(calls), "both fetches have begun")
        calls[0].abort()
    tokens = calls[1].completion().tokens

    assert tokens == pair.alone(prompts[1])


def test_a_decode_given_up_after_its_fetch_leaves_nothing(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=7)
    call = pair.decode.begin(
        prompt, 3000, kv_transfer_params=pair.ticket(prompt), stream=True, min_tokens=3000
    )
    stream = call.stream()
    next(stream)

    stream.close()

    pair.check()


def test_many_given_up_while_others_are_served_leave_nothing(pair: Cluster) -> None:
    prompts = [prompt_of(1000, seed=100 + number) for number in range(12)]
    calls = [pair.begin(prompt, pair.ticket(prompt)) for prompt in prompts]

    for call in calls[::2]:
        call.abort()
    said = [call.completion().tokens for call in calls[1::2]]

    assert said == [pair.alone(prompt) for prompt in prompts[1::2]]
