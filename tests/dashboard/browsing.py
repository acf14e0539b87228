"""A browser that records the errors and requests of a page, and reads its content."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route, sync_playwright

# As root there is no sandbox; the browser itself must not contact other hosts.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@contextmanager
def start_browser() -> Iterator[Browser]:
    """Yield Debian's Chromium, headless and with a new profile. The test is skipped without it."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page in its own context, which has its own storage."""

    def __init__(self, browser: Browser, address: str, *, token: str = "") -> None:
        self.errors: list[str] = []
        self.requests: list[Request] = []
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.goto(address)
        if token:
            self.sign_in(token)

    def _note_console(self, message: ConsoleMessage) -> None:
        # A run is training once it has a plan, before the pservers have the initial values.
        is_early = "503" in message.text and "/v1/statistics/" in message.location["url"]
        if message.type == "error" and not is_early:
            self.errors.append(message.text)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.add_note(f"console: {self.errors}\n{self.page.inner_text('body')[:3000]}")
        self.context.close()

    @property
    def hosts(self) -> set[str]:
        """The hosts that the page has contacted."""
        return {urlsplit(request.url).netloc for request in self.requests}

    def sign_in(self, token: str) -> None:
        self.page.wait_for_selector("#sign-in[open]")
        self.page.fill("#token", token)
        self.page.keyboard.press("Enter")

    def wait_until_live(self) -> None:
        self.page.wait_for_selector("#connection[data-state=live]")

    def wait_for_parameters(self) -> None:
        self.page.wait_for_selector("#parameter-list > :nth-child(4)", state="attached")

    def wait_until(self, expression: str, *arguments: Any) -> None:
        """Wait until a JavaScript expression is true."""
        self.page.wait_for_function(expression, arg=arguments[0] if arguments else None)

    def exact(self, selector: str) -> Any:
        """Return the value of the API that an element shows."""
        return json.loads(self.page.get_attribute(selector, "data-value") or "null")

    def table(self, selector: str) -> list[list[Any]]:
        """Return the values of all cells of a table's body; None for text without a value."""
        cells = "rows => rows.map(row => [...row.cells].map(cell => cell.dataset.value ?? 'null'))"
        rows = self.page.eval_on_selector_all(f"{selector} tbody tr", cells)
        return [[json.loads(cell) for cell in row] for row in rows]

    def see(self, selector: str) -> None:
        self.page.locator(selector).first.scroll_into_view_if_needed()

    def hold_answers(self, *paths: str) -> list[Any]:
        """Return the next answers of the API, and repeat them from now on, to be compared with the page."""
        held: dict[str, Any] = {}

        def answer(route: Route) -> None:
            path = urlsplit(route.request.url).path
            if path not in held:
                reply = route.fetch()
                assert reply.ok, reply.text()
                held[path] = reply.json()
            route.fulfill(json=held[path])

        for path in paths:
            self.page.route(re.compile(re.escape(path) + r"(\?|$)"), answer)
        for path in (*paths, paths[0]):
            with self.page.expect_response(lambda reply, path=path: urlsplit(reply.url).path == path):  # type: ignore[misc]
                pass
        return [held[path] for path in paths]
