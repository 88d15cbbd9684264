"""A real browser, driven as its own developer tools drive it: over a pipe, without a library."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Any

from browser import CHROMIUM, FLAGS


class Browser:
    """One page of a headless Chromium. ``with Browser(folder, width) as page: page.open(address)``."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 900) -> None:
        # it reads from file 3 and writes to file 4
        ours = os.pipe()
        theirs = os.pipe()
        flags = [
            *(flag for flag in FLAGS if "virtual-time" not in flag),
            f"--user-data-dir={folder / 'profile'}",
            "--remote-debugging-pipe",
        ]
        start = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", start, "bash", str(CHROMIUM), *flags],
            pass_fds=(ours[0], theirs[1]),
            env=os.environ | {"HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.out, self.into = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self.number, self.session, self.console = count(1), "", []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.into.close()

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a command of the DevTools protocol."""
        number = next(self.number)
        said = {"id": number, "method": method, "params": parameters}
        said |= {"sessionId": self.session} if self.session else {}
        self.out.write(json.dumps(said).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.into.read(1)) != b"\0":
            assert byte, "the browser is gone"
            text += byte
        said = json.loads(text)
        if said.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
            self.console.append(json.dumps(said["params"]))
        return said

    def open(self, address: str) -> None:
        """Go there."""
        self("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, patience: float = 120.0) -> Any:
        """The value of an expression once it is true; says what the page showed where it never is."""
        end = time.monotonic() + patience
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body && document.body.innerText"))
            time.sleep(0.05)
        return value

    def picture(self, path: Path, height: int = 0) -> None:
        """Write a .png of the window, or of so much of the page from its top."""
        width = self.run("innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height else {}
        found = self("Page.captureScreenshot", captureBeyondViewport=bool(height), **clip)
        path.write_bytes(base64.b64decode(found["data"]))
