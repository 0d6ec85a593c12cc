"""The page of clients/web, served by docs/proxies/envoy.yaml, in a real browser."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from service_chassis.scripted import ScriptedOptions, scripted_model
from support.browser import Browser, browser
from support.envoy import envoys, recommended
from support.mesh_calls import FLAGS, LONG, STEP_S, is_idle
from support.serve_process import Caller, serving

NEWEST = "[...document.querySelectorAll('#said .assistant')].at(-1)"
pytestmark = pytest.mark.usefixtures("page")


async def test_page_streams_stops_and_shows_errors(tmp_path: Path) -> None:
    # It says as much as it may: by itself it might be done after a word.
    talker = scripted_model(ScriptedOptions(step_time_s=STEP_S, sampler="numpy", forced=(ord("a"),) * LONG))
    with serving(*FLAGS, "--model", talker, "--executor", "mp") as server, browser(tmp_path) as page:
        async with asyncio.timeout(110), envoys(tmp_path, recommended(server.address)) as [envoy]:
            await asyncio.to_thread(_opens, page, f"http://{envoy.address()}/")
            # Streams: text grows while the model speaks.
            await asyncio.to_thread(_asks, page, "Say something long.")
            first = await asyncio.to_thread(page.until, _longer_than(3))
            more = await asyncio.to_thread(page.until, _longer_than(len(first) + 3))
            assert more.startswith(first)
            assert page.evaluate("document.getElementById('go').textContent") == "Stop"
            # Stops: the server frees at once what the request held.
            async with Caller(server) as caller:
                assert (await caller.status()).groups[0].num_running == 1
                await asyncio.to_thread(page.click, "#go")
                await is_idle(server)
                await asyncio.to_thread(page.until, "document.getElementById('facts').textContent === 'stopped'")
                # An error after the first token has its words and its reason.
                await asyncio.to_thread(_asks, page, "Again.")
                await asyncio.to_thread(page.until, _longer_than(3))
                os.kill((await caller.status()).groups[0].ranks[0].pid, signal.SIGKILL)
                said = await asyncio.to_thread(page.until, "document.querySelector('#said .error')?.textContent")
            assert "rank 0" in said
            assert said.endswith("(GROUP_LOST)")


def _longer_than(length: int) -> str:
    return f"{NEWEST}?.textContent.length > {length} && {NEWEST}.textContent"


def _opens(page: Browser, url: str) -> None:
    page.open(url)
    page.until("document.getElementById('model').textContent.includes('tokens')")


def _asks(page: Browser, prompt: str) -> None:
    page.evaluate("document.getElementById('prompt').focus()")
    page.type(prompt)
    page.press("Enter")
    page.until("document.getElementById('go').textContent === 'Stop'")


async def test_pages_from_elsewhere_are_let_in_where_the_proxy_says_so(tmp_path: Path) -> None:
    async with asyncio.timeout(60), envoys(tmp_path, recommended("127.0.0.1:1")) as [envoy]:
        url = f"http://{envoy.address()}/maniple.v1.InferenceService/Generate"
        asks = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,x-grpc-web",
        }
        async with httpx.AsyncClient() as http:
            here = await http.options(url, headers={"origin": "http://localhost:5173", **asks})
            assert here.headers["access-control-allow-origin"] == "http://localhost:5173"
            assert "x-grpc-web" in here.headers["access-control-allow-headers"]
            other = await http.options(url, headers={"origin": "http://elsewhere.example", **asks})
            assert "access-control-allow-origin" not in other.headers
