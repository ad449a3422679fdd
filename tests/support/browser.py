"""Debian's Chromium, driven through the pipe of its DevTools protocol: no driver, no port."""

import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_PACKAGE = find_spec("axe_core_python")
AXE = Path(_PACKAGE.origin).with_name("axe.min.js") if _PACKAGE and _PACKAGE.origin else None
"""The checker of accessibility, which that package carries beside drivers of browsers."""
WAIT_S = 60.0
_FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-dev-shm-usage
    --remote-debugging-pipe"""


class Tab:
    """One page. `errors` holds what its console and its scripts complained of."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._rest = to, answers, b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._loaded: set[str] = set()
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command of the protocol."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0, deadline - time.monotonic())
            )
            assert ready, f"Chromium said nothing for {WAIT_S:g} s"
            some = os.read(self._answers, 1 << 16)
            assert some, "Chromium ended"
            self._rest += some
        message, _, self._rest = self._rest.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(json.dumps(told["entry"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(json.dumps(told["args"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Page.lifecycleEvent" and told["name"] == "load":
            self._loaded.add(told["loaderId"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited where it is a promise."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def open(
        self, page: Path | str, width: int = 1000, *, dark: bool = False, still: bool = False
    ) -> None:
        """Show a file or URL, at a width in CSS pixels, in a colour scheme, with motion or not."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        wanted = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        url = page if isinstance(page, str) else page.as_uri()
        loader = self.call("Page.navigate", url=url)["loaderId"]
        while loader not in self._loaded:  # until then a script may still run in the page before
            answer = self._next()
            self._note(answer.get("method", ""), answer.get("params", {}))

    def faults(self) -> list[list[str]]:
        """What axe finds wrong with the page: the rule, and the first element that breaks it."""
        assert AXE is not None
        self.run(AXE.read_text("utf-8") + ";0")
        found: list[list[str]] = self.run(
            "axe.run().then(found => found.violations.map(v => [v.id, v.nodes[0].html]))"
        )
        return found

    def fine(self, page: Path | str) -> None:
        """The page is, on phones and desks, light and dark, without an error or a fault."""
        url = page if isinstance(page, str) else page.as_uri()
        for width, dark in ((360, False), (390, True), (1200, True)):
            self.errors.clear()
            self.requests.clear()
            self.open(page, width, dark=dark)
            assert [url for url in self.requests if not url.startswith("data:")] == [url]
            over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert self.run(over) == 0
            if AXE is not None:
                assert self.faults() == []
            assert self.errors == []

    def until(self, condition: str) -> None:
        """Wait for an expression in the page to be true; it is tried at every frame."""
        poll = f"""new Promise(done => {{
          const end = performance.now() + {1000 * WAIT_S / 2};
          (function look() {{
            if ({condition}) done(true);
            else if (performance.now() > end) done(false);
            else requestAnimationFrame(look);
          }})();
        }})"""
        assert self.run(poll), condition

    def press(self, key: str) -> None:
        """Press a key and let go of it."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "PageUp": 33, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowRight": 39}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, windowsVirtualKeyCode=codes[key],
                **({"text": text} if text and kind == "keyDown" else {}),
            )  # fmt: skip

    def click(self, selector: str, across: float = 0.5) -> None:
        """Click an element in the middle of its height, `across` of its width from the left."""
        x, y = self.run(
            f"""(() => {{ const it = document.querySelector({json.dumps(selector)});
            it.scrollIntoView({{block: "center"}}); const box = it.getBoundingClientRect();
            return [box.x + box.width * {across}, box.y + box.height / 2]; }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own."""
    with contextlib.ExitStack() as stack:

        def pipe() -> list[int]:
            """Both ends above the numbers 3 and 4, which Chromium wants for itself."""
            low = os.pipe()
            high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
            for end in low:
                os.close(end)
            return high

        def close(*ends: int) -> Callable[[], None]:
            return lambda: [os.close(end) for end in ends] and None

        (theirs, ours), (answers, told) = pipe(), pipe()
        stack.callback(close(ours, answers))
        line = [CHROMIUM or "", *_FLAGS.split(), f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{told}', "chromium", *line],
            pass_fds=(theirs, told),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        stack.callback(process.wait)
        stack.callback(os.killpg, process.pid, signal.SIGKILL)
        close(theirs, told)()
        yield Tab(ours, answers)
