"""A real server in a process of its own, and short ways to talk to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 60
_SERVING = re.compile(r"serving .* at (http\S+) \(pid (\d+)\)")


class Server:
    """`vllm serve` with these words; `url` once it serves."""

    def __init__(self, *words: str, **environment: str) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
        env = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | environment
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_SECONDS) or not self.url:
            self.kill()
            raise RuntimeError("the server did not come up:\n" + "".join(self.log))
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = _SERVING.search(line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def ok(self, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text[:500]
        found: dict[str, Any] = response.json()
        return found

    def error(self, path: str, body: Any = None, status: int = 400, **options: Any) -> dict[str, Any]:
        """The error object of a refused request."""
        response = self.post(path, body, **options)
        assert response.status_code == status, (response.status_code, response.text[:500])
        found: dict[str, Any] = response.json()["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["code"] == status
        return found

    def events(self, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        """A stream's events; it must end with one [DONE]."""
        with self.client.stream("POST", path, json=body | {"stream": True}, **options) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(read_events(response.iter_lines()))

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        values = re.findall(rf"^{re.escape(name)}(?:{{.*?}})? (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert values, name
        return sum(map(float, values))

    def wait_idle(self, seconds: float = 20) -> None:
        """Until nothing runs and all tables are empty."""
        deadline = time.monotonic() + seconds
        while True:
            response = self.post("/check_integrity")
            if response.status_code == 200:
                return
            assert time.monotonic() < deadline, response.text
            time.sleep(0.02)

    @property
    def engine_pid(self) -> int:
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def stop(self, seconds: float = 20) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 20) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        if hasattr(self, "client"):
            self.client.close()


def read_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    done = False
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: "), line
        assert not done, "an event after [DONE]"
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line[len("data: ") :])
    assert done, "no [DONE]"


def by_index(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The choices of a stream, by index."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        for choice in event.get("choices", ()):
            found[choice["index"]].append(choice)
    return dict(found)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [entry for one in lists for entry in one]


def tiny_server(folder: Path, *words: str, **environment: str) -> Server:
    return Server(
        str(folder), "--host", "127.0.0.1", "--port", "0", "--num-threads", "1", "--served-model-name", "tiny", *words,
        **environment,
    )  # fmt: skip
