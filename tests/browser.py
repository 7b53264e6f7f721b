"""A headless Chromium that tests drive over its DevTools protocol: open, evaluate, wait, look for complaints."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.programs import program

TIMEOUT_S = 60.0
POLL_S = 0.05
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--disable-extensions", "--hide-scrollbars", "--mute-audio", "--remote-debugging-port=0", "about:blank"),
)


class Page:
    """One tab. `complaints` are errors on its console: exceptions, refused resources, broken policies."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Takes what the browser says, until the connection ends."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    async def attach(self) -> None:
        """Opens the tab."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; its result. Raises AssertionError with the browser's words if it fails."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(command)
        async with asyncio.timeout(TIMEOUT_S):
            told = await self._waiting[number]
        assert "error" not in told, f"{method}: {told['error']}"
        result: dict[str, Any] = told["result"]
        return result

    async def open(self, url: str) -> None:
        """Goes there and waits until it is loaded."""
        told = await self.call("Page.navigate", url=url)
        assert not told.get("errorText"), told["errorText"]
        await self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is now; promises are awaited."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str, timeout_s: float = TIMEOUT_S) -> None:
        """Returns once the expression is true; else fails and names it."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.value(expression):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            text = await self.value("document.body?.innerText")
            raise AssertionError(f"not within {timeout_s:g} s: {expression}\non the page:\n{text}") from None

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "assert", "warning"}:
            self.complaints.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")


@contextlib.asynccontextmanager
async def browser_page(width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """A tab of a fresh Chromium; skips the test where there is none (see `programs`)."""
    path = program("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            *_FLAGS,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with _connected(await _address(process)) as page:
                yield page
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its helpers too
            await process.communicate()


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.attach()
            yield page
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(TIMEOUT_S):
        async for line in process.stderr:
            said += line
            if found := re.search(rb"DevTools listening on (\S+)", line):
                return found[1].decode()
    raise AssertionError(f"chromium did not start:\n{said.decode(errors='replace')}")
