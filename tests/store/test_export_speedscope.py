"""The Chrome trace in speedscope, in a real browser: all phases of all steps on all devices.

Takes the npm package `speedscope` (its folder: $SPEEDSCOPE, as in `npm install speedscope`'s
node_modules/speedscope).
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis.summary import labels
from dpbench.records import HOST, Phase, Span, Trial
from dpbench.store import export
from tests.browsing import CHROMIUM, DRIVER, FLAGS, driven
from tests.exported import DP, STEP_S, made

PACKAGE = Path(os.environ.get("SPEEDSCOPE", "")) / "dist" / "release"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM or not DRIVER, reason="there is no chromium with its driver on this system"
    ),
    pytest.mark.skipif(
        not (PACKAGE / "index.html").is_file(),
        reason="speedscope is not there: npm install it, set $SPEEDSCOPE",
    ),
]
# the page draws with WebGL, in software here; nothing but this machine is to be reached
SHOWN = (
    *FLAGS,
    "--enable-unsafe-swiftshader",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
KEEP = (
    "window.blobs = []; URL.createObjectURL = (blob) => { window.blobs.push(blob); return"
    " 'data:,'; };"
)
"""Keeps what the page exports, its own reading of the trace."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves speedscope, and the trace as trace.json."""

    trace = b""

    def do_GET(self) -> None:
        if self.path != "/trace.json":
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.trace)
        return None

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with driven(tmp_path / "profile", SHOWN) as driver:
        yield driver


@pytest.fixture
def site() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(PACKAGE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def opened(browser: Any, site: str, trial: Trial) -> dict[str, Any]:
    """Open a trial's trace in speedscope; return how speedscope itself writes it back."""
    from selenium.webdriver.support.ui import WebDriverWait

    Quiet.trace = "".join(export.trace("f" * 32, {}, [trial], labels)).encode()
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": KEEP})
    browser.get(f"{site}/index.html#profileURL={site}/trace.json")

    def find(text: str) -> Any:
        return browser.execute_script(
            "return [...document.querySelectorAll('div')].filter(e =>"
            " e.innerText.trim().endsWith(arguments[0])).sort((a, b) => a.innerText.length -"
            " b.innerText.length)[0] || null",
            text,
        )

    WebDriverWait(browser, 30).until(lambda _: find("Export")).click()
    WebDriverWait(browser, 10).until(lambda b: b.execute_script("return window.blobs.length"))
    return json.loads(browser.execute_async_script("window.blobs[0].text().then(arguments[0])"))


def overlapping() -> Trial:
    """Return a trial whose spans of one phase and device overlap, also with the next step's."""
    trial = made(DP, steps=40, warmup=5)
    found = [s for s in trial.spans if s.phase is Phase.REDUCE]
    late = [
        Span(s.step, s.phase, s.device, s.clock, s.start_s + STEP_S / 20, s.end_s + STEP_S * 0.9)
        for s in found
    ]
    return Trial(**{**vars(trial), "spans": (*trial.spans, *late)})


def test_speedscope_shows_every_phase_of_every_step_on_every_device(
    browser: Any, site: str
) -> None:
    trial = overlapping()
    group = opened(browser, site, trial)
    frames = [frame["name"] for frame in group["shared"]["frames"]]
    process = "mlp dp[reference] x2 batch 64 round 0 [MEASURED CPU-ONLY]"
    seen: Counter[tuple[str, str]] = Counter()
    for profile in group["profiles"]:
        assert profile["unit"] == "microseconds"
        assert profile["name"].startswith(f"{process} (pid 1), ")
        track = (
            profile["name"]
            .removeprefix(f"{process} (pid 1), ")
            .partition(" (tid ")[0]
            .partition(" #")[0]
        )
        opens = [event for event in profile["events"] if event["type"] == "O"]
        seen.update((track, frames[event["frame"]]) for event in opens)
        assert len(opens) * 2 == len(profile["events"]), "each frame that opens closes"
    wanted = Counter(
        (
            f"{'host' if s.device == HOST else f'device {s.device}'} {s.phase}",
            f'{s.phase} {{"step":{s.step}}}',
        )
        for s in trial.spans
    )
    steps = Counter({key: count for key, count in seen.items() if key[0] == "steps"})
    assert seen - steps == wanted
    assert [name.partition(" {")[0] for _, name in steps] == [f"step {i}" for i in range(40)]
    complaints = [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] in ("WARNING", "SEVERE")
    ]
    assert [text for text in complaints if "GL Driver Message" not in text] == []
    body = browser.execute_script("return document.body.innerText")
    assert process in body
    assert "Something went wrong" not in body


def test_speedscope_adds_up_the_same_seconds(browser: Any, site: str) -> None:
    trial = made(steps=20)
    group = opened(browser, site, trial)
    (profile,) = [one for one in group["profiles"] if ", device 1 backward (" in one["name"]]
    ends = [(event["at"], event["type"]) for event in profile["events"]]
    total = sum(at if kind == "C" else -at for at, kind in ends)
    mine = sum(
        s.end_s - s.start_s for s in trial.spans if (s.device, s.phase) == (1, Phase.BACKWARD)
    )
    assert total == pytest.approx(mine * 1e6, rel=1e-6)
