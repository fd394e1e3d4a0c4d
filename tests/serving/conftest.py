"""Real CPU servers for end-to-end tests, and checkpoints with random rotations."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

START_TIMEOUT = 420  # seconds; a start takes about 25 on an idle machine
REQUEST_TIMEOUT = 300


class Answer:
    """What /generate returned.

    Attributes:
        tokens: generated token ids.
        logprobs: fp32 [num_new_tokens], of the generated tokens.
        top: for every step, the five best tokens and their logprobs.
        cached_tokens: prompt tokens taken from the prefix cache.
    """

    def __init__(self, answer: dict) -> None:
        meta = answer["meta_info"]
        self.meta = meta
        self.tokens = [token for _, token, _ in meta["output_token_logprobs"]]
        self.logprobs = torch.tensor([value for value, _, _ in meta["output_token_logprobs"]])
        self.top = [
            {token: value for value, token, _ in step} for step in meta["output_top_logprobs"]
        ]
        self.cached_tokens = meta["cached_tokens"]


class Server:
    """A `python -m sglang.launch_server` on CPU that ends with its test.

    Args:
        model: model directory.
        arguments: added to the command line.
        log: file for its output.
        launcher: what to run in place of ``-m sglang.launch_server``.
        env: added to the environment.
    """

    def __init__(
        self,
        model: Path,
        arguments: list[str],
        log: Path,
        launcher: tuple[str, ...] = ("-m", "sglang.launch_server"),
        env: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        command = [sys.executable, *launcher, "--model-path", str(model), "--device", "cpu"]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-total-tokens", "4096", "--skip-server-warmup", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.call("/health", timeout=2)
                return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.5)
        self.close()
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-6000:]}")

    def call(self, path: str, body: dict | None = None, timeout: float = REQUEST_TIMEOUT) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()

    def generate(self, tokens: list[int], max_new_tokens: int, **fields) -> Answer:
        """Greedy decoding; logprobs of the output with the five best at every step."""
        body = {
            "input_ids": tokens,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": 5,
            "logprob_start_len": -1,
            **fields,
        }
        return Answer(json.loads(self.call("/generate", body)))

    def generate_all(self, prompts: list[list[int]], max_new_tokens: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda p: self.generate(p, max_new_tokens), prompts))

    def flush(self) -> None:
        """Empty the prefix cache; SGLang refuses unless nothing is running or leaked."""
        for _ in range(40):
            try:
                self.call("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                time.sleep(0.25)
        raise AssertionError(f"flush_cache kept failing:\n{self.log.read_text()[-3000:]}")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """``start_server(model, *arguments, launcher=…, env=…)``; one at a time, the last one stops
    when another starts and at the end of the module."""
    running: list[Server] = []

    def start(model: Path, *arguments: str, **options) -> Server:
        stop()
        log = tmp_path_factory.mktemp("server") / "log.txt"
        running.append(Server(model, list(arguments), log, **options))
        return running[-1]

    def stop() -> None:
        while running:
            running.pop().close()

    yield start
    stop()


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """An optr checkpoint of a model with random rotations and means, different in every head."""
    from sglang_kvquant.checkpoint import Checkpoint, LayerRotations, save_checkpoint
    from sglang_kvquant.config import QuantizerConfig, WindowConfig
    from sglang_kvquant.manifest import Manifest
    from sglang_kvquant.model_info import ModelInfo

    def make(model: Path) -> Path:
        info = ModelInfo.from_model_path(str(model))
        generator = torch.Generator().manual_seed(7)

        def rotation() -> torch.Tensor:
            shape = (info.num_kv_heads, info.head_dim, info.head_dim)
            return torch.linalg.qr(torch.randn(shape, generator=generator).double())[0].float()

        layers = {
            layer: LayerRotations(
                rotation(),
                rotation(),
                torch.randn(info.num_kv_heads, info.head_dim, generator=generator),
            )
            for layer in range(info.num_layers)
        }
        manifest = Manifest(
            method="optr",
            base="quarot",
            model=info,
            quantizer=QuantizerConfig.for_method("optr", info.head_dim),
            windows=WindowConfig(),
            calibration={},
            objective=None,
        )
        path = tmp_path_factory.mktemp("checkpoint") / "optr.safetensors"
        save_checkpoint(Checkpoint(manifest, layers), path)
        return path

    return make
