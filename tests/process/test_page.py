"""The page of an agent in a real browser: what was done, what went wrong, and one request."""

import re
import shlex
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import pytest
from playwright.async_api import Page, Request, async_playwright, expect
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.keys import Role
from tests.agents import AgentProcess, Agents, until
from tests.engines import failure_of, pair, works
from tests.keyring import KeyRing, hand_over

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: run make debian-packages"),
]
Scheme = Literal["light", "dark"]
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}


@asynccontextmanager
async def visited(agent: AgentProcess, scheme: Scheme = "light") -> AsyncIterator[Page]:
    """The page of an agent that has looked twice; all that it asks for, it asks of the agent."""
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
        await expect(page.locator("body")).to_have_attribute("data-looks", re.compile("[2-9]|.."))
        yield page
        assert [text for text in said if text != "data:,"] == []
        await browser.close()


async def focused_id(page: Page) -> str:
    return str(await page.evaluate("document.activeElement.dataset.id"))


async def looked_again(page: Page) -> None:
    """Return once the page was drawn anew."""
    looks = int(str(await page.locator("body").get_attribute("data-looks")))
    await expect(page.locator("body")).not_to_have_attribute("data-looks", str(looks))


async def test_a_handoff_is_a_line_that_opens_by_the_keyboard_alone(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    name = f"page-{uuid.uuid4().hex}"
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer(name, **NOTHING)
        fetch = target.decode.fetch(offer.ticket, **NOTHING)
        await fetch.completed()
        assert await works(source, target)

        async with visited(decode) as page:
            line = page.get_by_role("button", name=name)
            await expect(line).to_contain_text("completed")
            await page.locator("#handoffs button").first.focus()
            await page.keyboard.press("ArrowDown")
            await looked_again(page)
            assert await focused_id(page) == fetch.fetch_id
            await page.keyboard.press("Enter")
            await expect(page.locator("#waterfall")).to_contain_text("confirming")
            await expect(page.locator("#request")).to_contain_text(f"--peer {decode.peer}")
            await expect(page.locator("#flows")).to_contain_text(prefill.settings["agent_id"])
            await page.keyboard.press("Escape")
            await expect(page.locator("#request")).to_be_hidden()
            assert await focused_id(page) == fetch.fetch_id


@pytest.mark.long
async def test_the_command_that_it_names_is_whole_where_there_are_keys(fresh: Agents) -> None:
    ring = KeyRing(fresh.folder)
    prefill, decode = (ring.prepare(fresh, role, role) for role in (Role.PREFILL, Role.DECODE))
    fresh.start(prefill, decode)
    await hand_over(prefill, decode)
    async with visited(decode) as page:
        await page.locator("#handoffs button").first.click()
        await expect(page.locator("#request-hint")).to_contain_text("--server-key=")
        hint = str(await page.locator("#request-hint").text_content())
    async with visited(prefill) as page:
        await page.locator("#handoffs button").first.click()
        await expect(page.locator("#request-hint")).to_contain_text("--server-key=its key")

    command = shlex.split(hint.partition("kvbus ")[2])
    done = await anyio.to_thread.run_sync(CliRunner().invoke, app, command)

    assert done.exit_code == 0, done.output
    assert "prefill prefill-0" in done.stdout
    assert "decode decode-1" in done.stdout


@pytest.mark.long
async def test_a_handoff_that_failed_is_a_fault_with_what_to_do(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target), visited(decode) as page:
        await expect(page.locator("#faults")).to_have_text("none")
        offer = await source.prefill.offer("<b>r</b>", **NOTHING, ttl_s=0.1)
        await offer.released()
        failure = await failure_of(target.decode.fetch(offer.ticket, **NOTHING))

        await expect(page.locator("#faults")).to_contain_text(failure.code.value)
        await expect(page.locator("#faults .do")).to_contain_text("offer_ttl_s")
        await expect(page.get_by_role("button", name="<b>r</b>")).to_contain_text("failed")


@pytest.mark.long
async def test_a_live_handoff_changes_as_it_goes_on(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("live", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        async with visited(prefill, "dark") as page:
            await expect(page.get_by_role("button", name="live")).to_contain_text("open")
            assert await page.locator("#handoffs").evaluate(
                "one => one.scrollWidth <= one.clientWidth + 1"
            )
            await offer.extend(16, {"full": [1]})
            await offer.seal()
            await fetch.completed()
            await expect(page.get_by_role("button", name="live")).to_contain_text("completed")


@pytest.mark.long
async def test_an_offer_that_nobody_reads_waits_and_moves_nothing(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, _):
        await source.prefill.offer("unread", num_tokens=16, block_ids={"full": [1]})

        async with visited(prefill) as page:
            line = page.get_by_role("button", name="unread")
            await line.click()
            await expect(page.locator("#waterfall")).to_contain_text("sealed")
            for bars in (line, page.locator("#waterfall .row").first):
                pieces = bars.locator(".bar i")
                kinds = await pieces.evaluate_all("all => all.map(one => one.className)")
                assert set(kinds) == {"wait"}


@pytest.mark.long
async def test_text_can_be_read_in_both_schemes(decode: AgentProcess) -> None:
    schemes: list[Scheme] = ["light", "dark"]
    for scheme in schemes:
        async with visited(decode, scheme) as page:
            text, back = [
                [int(part) for part in re.findall(r"\d+", str(await page.evaluate(js)))[:3]]
                for js in (
                    "getComputedStyle(document.body).color",
                    "getComputedStyle(document.body).backgroundColor",
                )
            ]

        lighter, darker = sorted((luminance(text), luminance(back)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 7, "WCAG 2.2, contrast (enhanced)"


def luminance(colour: list[int]) -> float:
    """WCAG 2.2's relative luminance of sRGB."""
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
