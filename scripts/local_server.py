"""A launch_server process: start it, wait until it answers, ask it, stop it with its children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

START_SECONDS = 300
ANSWER_SECONDS = 180


class ServerDidNotStart(RuntimeError):
    """The process ended, or did not answer in time; the message has the end of its log."""


def environment(**defaults: str) -> dict[str, str]:
    """For child processes: no network, and OpenMP threads that soon sleep while they wait.

    On a busy machine threads that spin for long make CPU work many times slower.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **defaults, **os.environ, "HF_HUB_OFFLINE": "1"}


class Server:
    """A launch_server process that is stopped, with its children, when the block ends.

    Args:
        model: --model-path.
        log: file for its output.
        extra: more flags.
        start_seconds: how long it may take until it answers.
    """

    def __init__(
        self, model: Path | str, log: Path, extra: list[str], start_seconds: float = START_SECONDS
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        self.start_seconds = start_seconds
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *extra]

    def __enter__(self) -> Server:
        # A short spin between small operations is faster than sleep; a long one starves others.
        threads = min(4, len(os.sched_getaffinity(0)))
        variables = environment(OMP_NUM_THREADS=str(threads), GOMP_SPINCOUNT="20000")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health", timeout=5)
                return
            except OSError:
                time.sleep(1)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        raise ServerDidNotStart(f"the server did not start; the end of {self.log}:\n{tail}")

    def open(
        self, path: str, body: dict | None = None, timeout: float = ANSWER_SECONDS
    ) -> HTTPResponse:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout)

    def get(self, path: str, timeout: float = ANSWER_SECONDS) -> dict:
        with self.open(path, timeout=timeout) as response:
            text = response.read()
        return json.loads(text) if text else {}
