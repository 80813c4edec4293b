"""Prompts of all lengths, between pages of all sizes."""

from pathlib import Path

import pytest

from tests.e2e.sglang.clusters import NUM_TOKENS, RADIX, Shape, Side, cluster, prompt_of
from tests.e2e.sglang.conftest import ServerAlone

pytestmark = pytest.mark.long
LENGTHS = range(1, 701, 9)
PAGES = ((1, 1), (16, 16), (64, 64), (1, 64), (64, 1), (16, 64), (64, 16))


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("model", ["gqa", "mellum"])
def test_many_at_once_say_what_sglang_says_alone_and_again(
    models: Path,
    server_alone: ServerAlone,
    model: str,
    pages: tuple[int, int],
    tmp_path: Path,
) -> None:
    shape = Shape(Side(pages[0]), Side(pages[1], flags=RADIX), model)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    one = server_alone(model)

    with cluster(shape, models, tmp_path) as pair:
        pair.wait_started()
        said = list(pair.threads.map(pair.handoff, prompts))
        again = list(pair.threads.map(pair.handoff, prompts))
        pair.check()

    one.wait_started()
    assert said == again == [one.generate(prompt, NUM_TOKENS) for prompt in prompts]
