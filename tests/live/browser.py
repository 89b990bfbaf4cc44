# SPDX-License-Identifier: Apache-2.0
"""A real browser, without a screen: Chromium, controlled over pipes by the DevTools protocol."""

import base64
import json
import os
import selectors
import shutil
import subprocess
import time
from itertools import count

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
ANSWER_S = 100.0


class Browser:
    """Chromium with one page. A context manager.

    Attributes
    ----------
    requests
        The address of whatever the page asked for.
    complaints
        What the page's console and its exceptions say.
    """

    def __init__(self, profile):
        self.requests, self.complaints = [], []
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "chromium"]
        self._process = subprocess.Popen(
            [*command, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._from, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from, selectors.EVENT_READ)
        self._unread, self._ids, self._session = b"", count(1), None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._selector.close()

    def call(self, method, **parameters):
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        message = json.dumps({"id": number, "method": method, "params": parameters, **session})
        os.write(self._to, message.encode() + b"\0")
        end_s = time.monotonic() + ANSWER_S
        while True:
            for answer in self._read(end_s):
                if answer.get("id") == number:
                    assert "error" not in answer, answer["error"]
                    return answer["result"]

    def _read(self, end_s):
        assert self._selector.select(max(0.0, end_s - time.monotonic())), "the browser does not answer"
        found = os.read(self._from, 1 << 20)
        assert found, f"the browser has ended with {self._process.wait(10)}"
        *messages, self._unread = (self._unread + found).split(b"\0")
        answers = [json.loads(message) for message in messages]
        for answer in answers:
            self._note(answer.get("method"), answer.get("params"))
        return answers

    def _note(self, event, about):
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"])
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(about)
        elif event == "Log.entryAdded":
            self.complaints.append(about["entry"])

    def look_like(self, width, height, dark):
        """Have a window of a size, and a reader who prefers light or dark pages."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def evaluate(self, expression):
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path):
        """Write the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))
