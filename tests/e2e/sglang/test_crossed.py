"""A prompt that SGLang prefills and vLLM decodes, and the other way round.

Pages and ranks differ; the tokens are those of either alone.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.sglang.clusters import CHUNK_TOKENS, prompt_of
from tests.e2e.sglang.conftest import Alone, Launched
from tests.e2e.sglang.crossed import PYTHON, TO_SGLANG, TO_VLLM, Crossed, crossed
from tests.e2e.sglang.servers import RefusedError

CLUSTER = "ranks"
LENGTHS = (2, 15, 16, 33, 64, 65, CHUNK_TOKENS, CHUNK_TOKENS + 1, 700)
WAYS = pytest.mark.parametrize("way", [TO_VLLM, TO_SGLANG])


@pytest.fixture(scope="module")
def _servers(
    launched: Launched, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crossed]:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here: make venv-vllm does it")
    with crossed(launched(CLUSTER), models, tmp_path_factory.mktemp("crossed")) as servers:
        yield servers


@pytest.fixture
def servers(_servers: Crossed) -> Iterator[Crossed]:
    """The module's servers, which must hold nothing afterwards."""
    yield _servers
    _servers.check()


@pytest.mark.kind("vLLM on the other side", on="servers")
@WAYS
def test_decode_says_what_either_engine_says_alone(
    servers: Crossed, alone: Alone, way: str
) -> None:
    prompts = [prompt_of(length, seed=300 + length) for length in LENGTHS]
    before = servers.completed()

    said = [servers.handoff(way, prompt) for prompt in prompts]
    again = [servers.handoff(way, [*prompt, 7, 8, 9]) for prompt in prompts]

    assert said == [alone(prompt) for prompt in prompts]
    assert said == [servers.alone(prompt) for prompt in prompts]
    assert again == [alone([*prompt, 7, 8, 9]) for prompt in prompts]
    assert servers.completed() == before + 2 * len(prompts)


@WAYS
def test_many_at_once_do_not_disturb_each_other(servers: Crossed, alone: Alone, way: str) -> None:
    prompts = [prompt_of(25 * number + 2, seed=400 + number) for number in range(12)]

    said = list(servers.pair.threads.map(lambda prompt: servers.handoff(way, prompt), prompts))

    assert said == [alone(prompt) for prompt in prompts]


def test_request_without_ticket_of_other_engine_fails_by_name(servers: Crossed) -> None:
    room = {"bootstrap_host": "kvbus", "bootstrap_room": 77}

    with pytest.raises(RefusedError, match="custom_params"):
        servers.pair.decode.generate(prompt_of(20, seed=1), 4, **room)


def test_request_lacking_wanted_first_logprob_fails_and_releases(
    servers: Crossed,
) -> None:
    prompt = prompt_of(40, seed=2)
    params = {"do_remote_decode": True}
    ticket = servers.vllm.complete(prompt, 1, kv_transfer_params=params)
    assert ticket.params is not None
    given = {"ticket": ticket.params["ticket"], "first_token": ticket.tokens[0]}
    room = {"bootstrap_host": "kvbus", "bootstrap_room": 78, "return_logprob": True}
    sampling = {"max_new_tokens": 4, "custom_params": {"kvbus": given}}

    with pytest.raises(RefusedError, match="first_logprob"):
        servers.pair.decode.generate(prompt, 4, sampling_params=sampling, **room)
