"""A vLLM server as a child process, spoken to over its HTTP API on a unix socket that nobody else can open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from hetrl.errors import GangTimeoutError, HetrlError
from hetrl.runtime import wire
from hetrl.runtime.parent_death import end_with_parent
from hetrl.runtime.vllm.answers import last_words, reason_of, sample_of, spread_seed
from hetrl.runtime.vllm.command import MODEL_NAME, VllmSettings, command_of, environment_of
from hetrl.runtime.vllm.processes import end_with_stacks, terminate
from hetrl.runtime.weights.safetensors_file import places_of
from hetrl.stopwatch import Stopwatch

__all__ = ["VllmServer", "VllmSettings"]

# unix(7): sun_path holds 108 bytes; vLLM's own sockets are named by a uuid of 36 characters.
DIRECTORY_BYTES = 108 - 1 - 37
POLL_SECONDS = 0.5
CONTROL_SECONDS = 60.0
LOOK_SECONDS = 5.0  # between two looks whether a request hangs: how long requests are held is not known before
GENERATE = "/inference/v1/generate"
HOLDS, GOES_ON = ("/pause", "/sleep"), ("/resume", "/wake_up?tags=kv_cache")  # what holds requests, and lets them go on


class SilentError(HetrlError):
    """The server did not answer in time."""


class VllmServer:
    """One `vllm serve` with its workers; call `start` from a thread that lives as long as the server is wanted.

    The server belongs to the caller's process group and is terminated when the thread that started it dies.
    `directory` holds its sockets (a short one in the system's temporary directory is made where its path is too long),
    `log_path` receives what it prints.
    """

    def __init__(self, settings: VllmSettings, directory: Path, log_path: Path) -> None:
        self._settings, self._directory, self._log_path = settings, directory, log_path
        self._private: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()
        self._client: httpx.AsyncClient | None = None
        self._versions: dict[str, str] = {}
        self._has_weights = settings.load_format != "dummy"
        self._updating = asyncio.Lock()
        self._loaded = 0  # version
        self._specs: dict[str, wire.TensorSpec] = {}  # of the last file that was loaded
        self._going = Stopwatch(time.monotonic)  # stands still while requests are held

    @property
    def versions(self) -> dict[str, str]:
        """The engine and its version as the server reports it; empty before `start`."""
        return dict(self._versions)

    @property
    def ended(self) -> bool:
        """Return whether the server's process has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    async def start(self, timeout_seconds: float) -> None:
        """Start the server and wait until it is healthy; on every failure nothing of it is left running.

        Raises HetrlError with the exit code when the server ends early, or when the deadline passes; both quote the
        last meaningful line of the log and its path.
        """
        if self._process is not None:
            raise HetrlError(f"vllm: the server is already running (process {self._process.pid})")
        deadline = time.monotonic() + timeout_seconds
        try:
            self._spawn()
            while not await self._is_healthy():
                if time.monotonic() > deadline:
                    raise GangTimeoutError(
                        f"vllm: not healthy after {timeout_seconds:g} s, last said {self._last_words()}; "
                        f"see {self._log_path}, or raise launch.gang_timeout"
                    )
                await asyncio.sleep(POLL_SECONDS)
            answer = await self._call("GET", "/version", CONTROL_SECONDS)
            self._versions = {"vllm": str(answer["version"])}

            await self.call("/init_weight_transfer_engine", {"init_info": {}})
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server and all of its workers: SIGTERM, then SIGKILL after 10 seconds; may be called again."""
        client, self._client = self._client, None
        process, self._process = self._process, None
        private, self._private = self._private, None
        if client is not None:
            await client.aclose()
        if process is not None:
            self._adopt(process)
            await asyncio.to_thread(terminate, process, self._family)
            self._family = set()
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)

    async def generate(
        self, prompt: Sequence[int], sampling: wire.Sampling, timeout_seconds: float, since: int | None = None
    ) -> tuple[wire.Sample, ...]:
        """Return `sampling.samples` continuations of a prompt of token ids.

        Log-probs are those of the distribution that was sampled from (after temperature and top_p). Sample k depends on
        the seed, k, prompt and weights only; the stop token is the last token of a sample that it ended. Of one that
        goes on, the prompt's last tokens were drawn `since` a version. Weights that the server started with are version
        0. Raises HetrlError when there are no weights yet, more samples are asked than `max_sequences`, the server
        refuses, or it does not answer in time, of which that does not count in which requests are held: then it hangs,
        and is ended.
        """
        if not self._has_weights:
            raise HetrlError("vllm: asked to generate before the first weight version arrived")
        parameters = {
            "n": sampling.samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": spread_seed(sampling.seed),
            "logprobs": 0,
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_tokens),
        }
        # What is drawn anew finds no keys and values of an older version: prompts that begin alike would keep them for
        # ever. A sample that goes on finds its own.
        salt = {"cache_salt": str(self._loaded if since is None else since)}
        body = {"model": MODEL_NAME, "token_ids": list(prompt), "sampling_params": parameters, **salt}
        try:
            answer = await self._unless_it_hangs(self._call("POST", GENERATE, timeout_seconds, body))
        except SilentError:
            if self._process is not None and not self.ended:  # other requests may hang as well
                end_with_stacks(self._process.pid, self._family)
            raise
        return tuple(sample_of(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"]))

    async def _unless_it_hangs(self, asked: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the answer; SilentError where requests went on for `hang_seconds` without it."""
        limit, begun = self._settings.hang_seconds, self._going.seconds
        asking = asyncio.create_task(asked)
        try:
            while (left := limit - (self._going.seconds - begun)) > 0:
                if (await asyncio.wait([asking], timeout=min(left, LOOK_SECONDS)))[0]:
                    return asking.result()
            raise SilentError(f"vllm: no answer to {GENERATE} in {limit:g} s; see {self._log_path}")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def update_weights(self, version: int, path: Path, timeout_seconds: float, *, recompute: bool = True) -> None:
        """Load a version from a safetensors file, whose digest was proven before, then serve it.

        Requests under way are held, then continue under the new weights, with `recompute` after their context was
        computed anew (https://docs.vllm.ai/en/latest/training/weight_transfer/). Raises HetrlError as `load_weights`
        does; after a refusal the old version is served on.
        """
        async with self._updating:
            await self.pause(forget=recompute)
            try:
                await self.load_weights(version, path, timeout_seconds)
            finally:
                if not self.ended:
                    await self.resume()

    async def load_weights(self, version: int, path: Path, timeout_seconds: float) -> None:
        """Load a version as `update_weights` does, into a server that is paused.

        Raises HetrlError where the file is refused, for a tensor that is not as in the version before; and where it
        cannot be loaded, by which the model may be of two versions, so that a server with weights is ended.
        """
        specs = self._specs_of(version, path)
        update = {"update_info": {"path": str(path.absolute())}}
        try:
            await self.call("/start_weight_update")
            await self.call("/update_weights", update, timeout_seconds)
            await self.call("/finish_weight_update", {"weight_version": str(version)})
        except HetrlError as error:
            if self._has_weights and self._process is not None:
                await asyncio.to_thread(terminate, self._process, self._family)
            raise HetrlError(f"weight version {version}: {error}") from None
        self._has_weights, self._loaded, self._specs = True, version, specs

    def _specs_of(self, version: int, path: Path) -> dict[str, wire.TensorSpec]:
        """Return what the tensors of a file are; HetrlError where they are not those of the version before."""
        try:
            specs = {name: spec for name, (spec, _) in places_of(path).items()}
        except OSError as error:
            raise HetrlError(f"weight version {version}: {path}: {error.strerror}") from None
        if self._specs and specs != self._specs:
            differing = sorted(name for name, _ in specs.items() ^ self._specs.items())
            raise HetrlError(f"weight version {version}: {path}: {differing[0]} is not as in the version before")
        return specs

    async def pause(self, *, forget: bool = True) -> None:
        """Hold all requests where they are; with `forget` the keys and values of all contexts are dropped."""
        await self.call(f"/pause?mode=keep&clear_cache={str(forget).lower()}")

    async def resume(self) -> None:
        """Let held requests continue."""
        await self.call("/resume")

    async def abort_all(self) -> None:
        """End every request: each answers with the tokens that it has, as finished by abort."""
        await self.call("/abort_requests", {})

    async def call(
        self, route: str, body: Mapping[str, object] | None = None, timeout_seconds: float = CONTROL_SECONDS
    ) -> dict[str, Any]:
        """Post to a route and return its JSON; HetrlError when the server is gone, silent or answers with an error."""
        if route.startswith(HOLDS):
            self._going.stop()
        answer = await self._call("POST", route, timeout_seconds, body)
        if route in GOES_ON:
            self._going.go_on()
        return answer

    def _spawn(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        short = len(str(self._directory.absolute()).encode()) + len("/vllm-12345678") <= DIRECTORY_BYTES
        # mkdtemp makes the directory 0700: the socket in it is open to this user alone, on every route.
        self._private = Path(tempfile.mkdtemp(prefix="vllm-", dir=self._directory.absolute() if short else None))
        socket = self._private / "http"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command_of(self._settings, socket),
                env={**os.environ, **environment_of(self._settings, self._private)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,  # on SIGTERM the server ends its workers itself
            )
        # The server closes the connection after an error answer: a kept one would fail the next request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://vllm")

    async def _is_healthy(self) -> bool:
        process, client = self._process, self._client
        assert process is not None and client is not None
        self._adopt(process)
        self._raise_if_ended(process)
        try:
            return (await client.get("/health", timeout=CONTROL_SECONDS)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _adopt(self, process: subprocess.Popen[bytes]) -> None:
        """Remember the workers while the server lives: those of a server that was killed have no parent to ask."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(process.pid).children(recursive=True))

    def _raise_if_ended(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise HetrlError(
                f"vllm: the server ended with exit code {process.returncode}: {self._last_words()}; "
                f"see {self._log_path}"
            )

    def _last_words(self) -> str:
        try:
            return last_words(self._log_path.read_text(errors="replace"))
        except OSError:
            return "nothing"

    async def _call(
        self, method: str, path: str, timeout_seconds: float, body: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        process, client = self._process, self._client
        if process is None or client is None:
            raise HetrlError(f"vllm: {path} asked of a server that is not running")
        route = path.split("?")[0]
        try:
            response = await client.request(method, path, json=body, timeout=timeout_seconds)
        except httpx.TimeoutException:
            raise SilentError(f"vllm: no answer to {route} in {timeout_seconds:g} s; see {self._log_path}") from None
        except httpx.TransportError as error:
            await asyncio.sleep(POLL_SECONDS)  # a server that crashed needs a moment until its exit code is known
            self._raise_if_ended(process)
            raise HetrlError(f"vllm: {route} failed: {error}; see {self._log_path}") from None
        if response.status_code != httpx.codes.OK:
            raise HetrlError(f"vllm: {route} answered {response.status_code}: {reason_of(response)}")
        content: dict[str, Any] = response.json()
        return content
