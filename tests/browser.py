"""A real browser on the admin: Chromium, headless, driven by its chromedriver."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore

from tests.concurrency import wait_until

if TYPE_CHECKING:
    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--force-prefers-reduced-motion",
    "--hide-scrollbars",
    "--window-size=1280,900",
)


class Browser:
    """A window of the browser, for somebody who is logged in on the live server."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def log_in(self, user: User) -> None:
        """Be this user from now on: by a session's cookie, without the form."""
        session = SessionStore()
        session[SESSION_KEY] = str(user.pk)
        session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
        session[HASH_SESSION_KEY] = user.get_session_auth_hash()
        session.save()
        self.driver.get(f"{self.url}/static/admin/img/search.svg")  # a cookie needs a page of ours
        self.driver.delete_all_cookies()
        self.driver.add_cookie(
            {"name": settings.SESSION_COOKIE_NAME, "value": session.session_key, "path": "/"}
        )

    def open(self, path: str) -> None:
        self.driver.get(self.url + path)

    @property
    def text(self) -> str:
        """What is to be read on the page."""
        return str(self.find("body").text)

    @property
    def path(self) -> str:
        return str(self.driver.current_url.removeprefix(self.url))

    def find(self, css: str) -> WebElement:
        return self.driver.find_element("css selector", css)

    def count(self, css: str) -> int:
        return len(self.driver.find_elements("css selector", css))

    def click(self, css: str) -> None:
        """Click, and wait for the page that follows."""
        old = self.find("html")
        self.find(css).click()
        wait_until(lambda: self._is_gone(old) and self._is_loaded())

    def wait_for(self, text: str, timeout: float = 20) -> None:
        wait_until(lambda: self._is_loaded() and text in self.text, timeout)

    def problems(self) -> list[str]:
        """What the browser has complained about since the last call: errors, policy violations."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")  # type: ignore[no-untyped-call]
            if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
        ]

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system of the viewer has it."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def save_screenshot(self, path: Path, *, width: int = 1280, height: int | None = None) -> None:
        """The page down to its end, or to `height`."""
        self.driver.set_window_size(width, 900)
        full = self.driver.execute_script("return document.documentElement.scrollHeight")
        self.driver.set_window_size(width, height or min(full + 20, 4000))
        self.driver.save_screenshot(str(path))
        self.driver.set_window_size(1280, 900)

    def is_wider_than_the_window(self) -> bool:
        return bool(
            self.driver.execute_script(
                "return document.documentElement.scrollWidth > window.innerWidth"
            )
        )

    def _is_gone(self, element: WebElement) -> bool:
        try:
            element.is_enabled()
        except Exception:  # stale, in one of its several ways
            return True
        return False

    def _is_loaded(self) -> bool:
        try:
            return bool(self.driver.execute_script("return document.readyState") == "complete")
        except Exception:  # between two pages
            return False


def the_browser() -> tuple[str, str]:
    """The paths of Chromium and of its driver; skips, or fails in CI, where they are not there."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    reason = "no Chromium with its driver: apt-get install chromium chromium-driver"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """One browser for all tests; each gets a fresh session's cookie."""
    binary, driver = the_browser()
    from selenium import webdriver  # by those tests only that need it

    options: Any = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        started = webdriver.Chrome(options, webdriver.ChromeService(driver))
        yield started
        started.quit()


@pytest.fixture
def browser(transactional_db: None, live_server: Any, chromium: webdriver.Chrome) -> Browser:
    """A browser in which an administrator is logged in."""
    browser = Browser(chromium, live_server.url)
    browser.log_in(User.objects.create_superuser("ada"))
    browser.prefer("light")
    browser.problems()
    return browser
