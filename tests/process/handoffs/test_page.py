"""The page of an agent in a real browser: what was done, what went wrong, and one request."""

import re
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
from playwright.async_api import Page, Request, async_playwright, expect

from tests.support.agents import AgentProcess, Agents
from tests.support.engines import NOTHING, failure_of, pair, works

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: run make debian-packages"),
]
Scheme = Literal["light", "dark"]
COLOURS = [
    f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3).map(Number)"
    for name in ("color", "backgroundColor")
]


@asynccontextmanager
async def visited(agent: AgentProcess, scheme: Scheme = "light") -> AsyncIterator[Page]:
    """The page of an agent after two updates; it is readable, and requests only its agent."""
    page_url = f"http://{agent.settings['http_bind']}/"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(color_scheme=scheme)
        said: list[str] = []

        def note(asked: Request) -> None:
            if not asked.url.startswith(page_url):
                said.append(asked.url)

        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", note)
        await page.goto(page_url)
        await expect(page.locator("body")).to_have_attribute("data-polls", re.compile("[2-9]|.."))
        yield page
        darker, lighter = sorted([luminance(await page.evaluate(js)) for js in COLOURS])
        assert (lighter + 0.05) / (darker + 0.05) >= 7, "WCAG 2.2, contrast (enhanced)"
        assert [text for text in said if text != "data:,"] == []
        await browser.close()


async def focused_id(page: Page) -> str:
    return str(await page.evaluate("document.activeElement.dataset.id"))


async def test_a_handoff_is_a_line_that_opens_by_the_keyboard_alone(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    name = f"page-{uuid.uuid4().hex}"
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer(name, **NOTHING)
        fetch = target.decode.fetch(offer.ticket, **NOTHING)
        await fetch.ended
        assert await works(source, target)
        async with visited(decode) as page:
            line = page.get_by_role("button", name=name)
            await expect(line).to_contain_text("completed")
            await page.locator("#handoffs button").first.focus()
            await page.keyboard.press("ArrowDown")
            looks = str(await page.locator("body").get_attribute("data-polls"))
            await expect(page.locator("body")).not_to_have_attribute("data-polls", looks)
            assert await focused_id(page) == fetch.fetch_id
            await page.keyboard.press("Enter")
            await expect(page.locator("#waterfall")).to_contain_text("committing")
            await expect(page.locator("#request")).to_contain_text(f"--peer {decode.peer}")
            await expect(page.locator("#flows")).to_contain_text(prefill.settings["agent_id"])
            await page.set_viewport_size({"width": 420, "height": 900})
            wide = await page.locator(".bar").evaluate_all("all => all.map(one => one.clientWidth)")
            assert min(wide) > 200, "on a telephone a bar has a line of its own"
            await page.keyboard.press("Escape")
            await expect(page.locator("#request")).to_be_hidden()
            assert await focused_id(page) == fetch.fetch_id


@pytest.mark.long
async def test_page_shows_failure_with_advice_and_updates_live_offers(fresh: Agents) -> None:
    prefill, decode = fresh.both()
    async with pair(prefill.attach, decode.attach) as (source, target):
        async with visited(decode) as page:
            await expect(page.locator("#faults")).to_have_text("none")
            gone = await source.prefill.offer("<b>r</b>", **NOTHING, ttl_s=0.1)
            await gone.ended
            failure = await failure_of(target.decode.fetch(gone.ticket, **NOTHING))
            await expect(page.locator("#faults")).to_contain_text(failure.code.value)
            await expect(page.locator("#faults .do")).to_contain_text("offer_ttl_s")
            await expect(page.get_by_role("button", name="<b>r</b>")).to_contain_text("failed")
        offer = await source.prefill.offer("live", **NOTHING, sealed=False)
        async with visited(prefill, "dark") as page:
            line = page.get_by_role("button", name="live")
            await expect(line).to_contain_text("open")
            await line.click()
            for bars in (line, page.locator("#waterfall .row").first):
                pieces = bars.locator(".bar i")
                kinds = await pieces.evaluate_all("all => all.map(one => one.className)")
                assert set(kinds) == {"wait"}, "an offer that nobody reads moves nothing"
            assert await page.locator("#handoffs").evaluate(
                "one => one.scrollWidth <= one.clientWidth + 1"
            )
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
            await offer.extend(16, {"full": [1]})
            await offer.seal()
            await fetch.ended
            await expect(line).to_contain_text("completed")


def luminance(colour: list[int]) -> float:
    """WCAG 2.2's relative luminance of sRGB."""
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
