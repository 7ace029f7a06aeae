"""Reports in a headless Chromium: the live view refreshes in place, pages fit a desktop and a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from luspo_megatron import cli
from luspo_megatron.report.compare import read_runs, write_comparison
from luspo_megatron.report.html import write_report
from tests.chromium import BINARY, DESKTOP, OVERFLOWS, OVERLAPS, PHONE, Browser
from tests.unit.test_report_compare import make_run, serving

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def append(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward_mean": 0.5, "response_length_mean": 20.0}) + "\n")


def test_the_live_view_follows_a_run(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path / "a", 30)
    with serving(run) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait("document.body.dataset.live === 'yes'")
        assert "up to step 30" in browser.evaluate("document.querySelector('.sub').textContent")
        browser.evaluate("document.querySelector('details').open = true; window.mark = 1; window.scrollTo(0, 400)")
        append(run, 31)
        browser.wait("document.querySelector('.sub').textContent.includes('up to step 31')")
        # the same page, as it was left: no reload, the details open, the scrolled position kept
        left = browser.evaluate("[window.mark, document.querySelector('details').open, window.scrollY]")
        assert left == [1, True, 400]
        (run / "summary.json").write_text(json.dumps({"finished": True, "steps": 31}))
        browser.wait("document.querySelector('.sub').textContent.includes('finished')")
        asked = browser.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert asked and all(name == f"http://127.0.0.1:{port}/" for name in asked)  # nothing from elsewhere
    browser.wait("document.body.dataset.live === 'no'")


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_pages_fit_and_nothing_overlaps(tmp_path: Path, browser: Browser, size: tuple[int, int]) -> None:
    runs = [make_run(tmp_path / f"a-rather-long-name-of-a-run-{i}", 25, ("luspo", "gspo", "grpo")[i]) for i in range(3)]
    assert cli.main(["study", "length-bias", "--steps", "10", "--prompts", "16", "--seeds", "2", "--workers", "1",
                     "--out", str(tmp_path / "study")]) == 0
    pages = [write_report(runs[0]), write_comparison(read_runs(runs), tmp_path / "c.html"),
             tmp_path / "study" / "report.html"]
    for page in pages:
        browser.open(page.as_uri(), size)
        assert browser.evaluate(OVERFLOWS) == [], page.name
        assert browser.evaluate(OVERLAPS) == [], page.name
        assert browser.evaluate("document.querySelectorAll('svg.chart').length") > 10


def test_the_checks_of_this_file_see_faults(browser: Browser) -> None:
    browser.open("data:text/html,<svg class=chart><text y=20>one</text><text y=20>two</text></svg>"
                 "<h1 style='width:3000px'>wide</h1>")
    assert len(browser.evaluate(OVERFLOWS)) >= 2 and browser.evaluate(OVERLAPS) == ["one over two"]
