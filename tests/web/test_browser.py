"""Chromium walks the pages by keyboard, in both schemes and at both widths; axe and the console find nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.serving import serving
from tests.web.test_pages import HOSTILE, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog

__all__ = ["stored"]

pytestmark = pytest.mark.matrix

#: An installation of axe-core by npm: `bash tests/engines/install_browser.sh`.
AXE = Path(os.environ.get("UCFORMAT_AXE", Path(__file__).parents[2] / ".engines/browser"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    program, axe = shutil.which("chromium"), AXE / "node_modules/axe-core/axe.min.js"
    how = "apt-get install chromium npm; bash tests/engines/install_browser.sh"
    if program is None or not axe.is_file():
        pytest.skip(f"Chromium or axe-core is not here: {how}")
    playwright = pytest.importorskip("playwright.sync_api", reason=how)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Walk:
    """A page in a browser, and all that is said against it."""

    def __init__(self, browser: Any, scheme: str, width: int, **options: Any) -> None:
        self.context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, **options
        )
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on(
            "console",
            lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))

    def check(self) -> None:
        """What is shown now is right for everybody."""
        self.page.evaluate((AXE / "node_modules/axe-core/axe.min.js").read_text())
        violations = self.page.evaluate("axe.run()")["violations"]
        assert not [(v["id"], v["nodes"][0]["html"]) for v in violations]
        assert not self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not self.problems

    def focus(self, selector: str) -> None:
        """Reach an element by the key Tab alone, and see where the focus is."""
        for _ in range(80):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(f"document.activeElement.matches({selector!r})"):
                outline = "getComputedStyle(document.activeElement).outlineStyle"
                assert self.page.evaluate(outline) != "none"
                return
        raise AssertionError(f"the key Tab does not lead to {selector}")

    def enter(self) -> None:
        """Press Enter where it leads to another page."""
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_walk_by_keyboard(stored: Catalog, chromium: Any, scheme: str, width: int) -> None:
    with serving(stored) as ask:
        walk = Walk(chromium, scheme, width)
        page = walk.page
        page.goto(ask.url)
        assert page.url == f"{ask.url}/ui/"
        walk.check()
        walk.focus(".skip")
        assert page.locator(".skip").bounding_box()["x"] >= 0  # is shown when it has the focus
        walk.focus("#where")
        page.keyboard.type("run = 'run7' and metric.l")
        page.wait_for_selector("#offers option", state="attached")
        offers = page.eval_on_selector_all("#offers option", "all => all.map(o => o.value)")
        assert offers == ["run = 'run7' and metric.loss"]
        page.keyboard.press("Enter")
        page.wait_for_selector("#error")
        assert "^" in page.locator("#error").inner_text()
        walk.check()
        page.goto(f"{ask.url}/ui/?where=run+%3D+%27run7%27+and+step+%3C+3")
        for _ in range(2):
            walk.focus("input[type=checkbox]")
            page.keyboard.press("Space")
        walk.enter()
        assert "run7@2" in page.locator("h1").inner_text()
        walk.check()
        walk.focus("a[href*='values=sample']")
        walk.enter()
        assert page.locator("[aria-labelledby=distances] tr").count() == 5
        walk.check()
        page.goto(f"{ask.url}/ui/run/run7")
        assert page.locator("svg .curve").count() == 1
        walk.check()
        page.goto(f"{ask.url}/ui/checkpoint/run7@2")
        walk.check()
        walk.focus("ul.tree > li:first-child > details > summary")
        page.keyboard.press("Enter")
        page.wait_for_selector("ul.tree details details")
        walk.check()
        assert HOSTILE in page.content().replace("&lt;", "<").replace("&gt;", ">")
        page.goto(f"{ask.url}/ui/tensor/run7@2/model.layers.1.w")
        walk.focus("#layout")
        page.keyboard.type("0:4")
        walk.enter()
        assert page.locator("svg rect[fill-opacity]").count() == 4
        walk.check()
        walk.focus("a[href*='along=run']")
        walk.enter()
        assert page.locator("[aria-labelledby=along] tr").count() == 3
        walk.check()
        page.goto(f"{ask.url}/ui/plan/run7@2")
        walk.check()
        walk.focus("#layout")
        page.keyboard.type(
            '{"version": 1, "mesh": {"tp": 2}, "rules": [{"match": "*", "place": ["replicate"]}]}'
        )
        walk.focus("input[name=rank]")
        page.keyboard.type("1")
        walk.enter()
        assert page.locator("svg rect[fill-opacity]").count() == 1
        walk.check()
        page.goto(f"{ask.url}/ui/saves/run7")
        walk.check()
        walk.focus("header nav a[href='/ui/retention']")
        walk.enter()
        walk.focus("#policy")
        page.keyboard.type("{version: 1, keep: {last: 1}}")
        walk.focus("form.filter button")
        walk.enter()
        assert page.locator("[aria-labelledby=kept] tr").count() > 1
        walk.check()
        page.goto(f"{ask.url}/ui/jobs")
        walk.check()
        walk.context.close()


def test_without_scripts(stored: Catalog, chromium: Any) -> None:
    with serving(stored) as ask:
        walk = Walk(chromium, "light", 400, java_script_enabled=False)
        page = walk.page
        page.goto(f"{ask.url}/ui/checkpoint/run7@2")
        page.locator("ul.tree > li:first-child > details > summary").click()
        for label in ("model", "layers"):
            with page.expect_navigation():
                if label == "layers":
                    page.locator("ul.tree summary").first.click()
                page.locator(f"ul.tree a >> text=what is in {label}").click()
        assert page.locator("ul.tree summary").count() == 3
        assert not walk.problems
        walk.context.close()


def test_nothing_is_asked_elsewhere(stored: Catalog, chromium: Any) -> None:
    with serving(stored) as ask:
        walk, asked = Walk(chromium, "dark", 1600), []
        walk.page.on("request", lambda request: asked.append(request.url))
        for path in ("/ui/", "/ui/checkpoint/run7@2", "/ui/run/run7"):
            walk.page.goto(ask.url + path)
        assert all(url.startswith(ask.url) for url in asked)
        walk.context.close()
