"""A real vLLM server of a tiny model: what it samples is what transformers computes from the same weights."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import calibrated
from hetrl.cost.memory import BLOCK_TOKENS, least_kv_cache_gb
from hetrl.errors import HetrlError
from hetrl.runtime.run.rollout import Agent
from hetrl.runtime.vllm.idle import Idle
from hetrl.runtime.vllm.server import VllmServer, VllmSettings, last_words
from hetrl.runtime.weights.digests import version_digest
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.pieces import pieces
from hetrl.runtime.weights.tiny_model import END_ID, write_tiny_model
from hetrl.runtime.weights.weight_file import WeightFile
from hetrl.runtime.wire import (
    Done,
    Message,
    Sample,
    Sampling,
    Sleep,
    VersionSpan,
    Wake,
    WeightsApplied,
    WeightsBegin,
    WeightsEnd,
)
from hetrl.workload import Lengths, Workload, architecture_from_hf_config
from tests.runtime.weights.receivers import Receiver, Wire, publish, stepped

START_SECONDS = 120.0
CALL_SECONDS = 60.0
MAX_TOKENS = 256
PROMPT = (5, 6, 7, 8)


@dataclass
class Served:
    """The running server, the loop that it lives on and the weights of each version that it was given."""

    server: VllmServer
    loop: asyncio.AbstractEventLoop
    weights: WeightFile
    model_directory: Path
    scratch: Path

    def generate(self, prompt: tuple[int, ...] = PROMPT, **sampling: float) -> tuple[Sample, ...]:
        return self.run(self.server.generate(prompt, how(**sampling), CALL_SECONDS))

    def push(self, version: int) -> PreTrainedModel:
        policy = policy_of(self.model_directory, version)
        self.run(self.server.update_weights(version, write_version(self.weights, version, policy), CALL_SECONDS))
        return policy

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)


def settings_of(directory: Path) -> VllmSettings:
    return VllmSettings(model_directory=directory, kv_cache_bytes=2**26, max_sequences=16, max_model_tokens=MAX_TOKENS)


def how(**changes: float) -> Sampling:
    return Sampling(**{"samples": 4, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 0, **changes})


def policy_of(directory: Path, seed: int) -> PreTrainedModel:
    """Return the tiny model with weights of a seed, large enough that its distributions are far from uniform."""
    config = AutoConfig.from_pretrained(directory)
    config.initializer_range = 0.2
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def write_version(weights: WeightFile, version: int, policy: PreTrainedModel) -> Path:
    """Let the policy's weights arrive as they would over the wire."""
    weights.begin(WeightsBegin(version=version, encoding="full"))
    leaves, size = {}, 0
    for name, tensor in policy.state_dict().items():
        data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for message, buffer in pieces(version, name, "float32", tuple(tensor.shape), data, 10_000):
            if (piece := weights.admit(message, buffer.nbytes)) is not None:
                weights.write(piece, buffer)
            leaves[name, message.offset] = message.digest
        size += data.nbytes
    tensors, digest = len({name for name, _ in leaves}), version_digest(leaves)
    return weights.end(WeightsEnd(version=version, tensors=tensors, bytes=size, digest=digest))[0]


def expected_logprobs(
    policy: PreTrainedModel,
    tokens: tuple[int, ...],
    temperature: float = 1.0,
    top_p: float = 1.0,
    prompt: tuple[int, ...] = PROMPT,
) -> torch.Tensor:
    """Return the log-probs of a prompt's continuation under temperature and nucleus sampling, in plain torch."""
    with torch.no_grad():
        logits = policy(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
    ordered, index = logits.softmax(-1).sort(descending=True)
    outside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, ordered.cumsum(-1) - ordered >= top_p)
    logprobs = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


BYSTANDERS: set[int] = set()  # processes that other tests of this session keep


def family() -> set[int]:
    """Return the ids of our living descendants, bystanders apart."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE} - BYSTANDERS


@pytest.fixture(scope="module", autouse=True)
def bystanders() -> None:
    """Note who was there before any server."""
    BYSTANDERS.update(family())


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="module")
def served(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("vllm")
    loop = asyncio.new_event_loop()
    server = VllmServer(settings_of(model_directory), scratch, scratch / "vllm.log")
    loop.run_until_complete(server.start(START_SECONDS))
    yield Served(server, loop, WeightFile(scratch / "weights", 10**9), model_directory, scratch)
    loop.run_until_complete(server.stop())
    loop.close()


def test_it_names_its_version_and_refuses_to_sample_from_nothing(served: Served) -> None:
    assert served.server.versions["vllm"].startswith("0.")
    with pytest.raises(HetrlError, match="before the first weight version"):
        served.generate()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_logprobs_agree_with_transformers_after_each_update(served: Served, version: int) -> None:
    policy = served.push(version)
    for sample in served.generate(seed=version):
        assert torch.tensor(sample.logprobs) == pytest.approx(expected_logprobs(policy, sample.tokens), abs=1e-4)
        assert sample.versions == (VersionSpan(version=version, start=0, end=12),)
        assert sample.finish_reason == "length"


def test_logprobs_are_those_of_the_sampling_distribution(served: Served) -> None:
    policy = served.push(4)
    for sample in served.generate(temperature=0.7, top_p=0.8):
        expected = expected_logprobs(policy, sample.tokens, temperature=0.7, top_p=0.8)
        assert torch.isfinite(expected).all()
        assert torch.tensor(sample.logprobs) == pytest.approx(expected, abs=1e-4)


def test_greedy_takes_the_likeliest_token(served: Served) -> None:
    policy = served.push(5)
    (sample,) = served.generate(samples=1, temperature=0.0)
    with torch.no_grad():
        logits = policy(torch.tensor([[*PROMPT, *sample.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert list(sample.tokens) == logits.argmax(-1).tolist()


def test_samples_are_distinct_and_those_of_their_seed_in_any_company(served: Served) -> None:
    served.push(6)
    alone = served.generate(seed=7)
    assert len({sample.tokens for sample in alone}) == 4

    async def in_company() -> list[tuple[Sample, ...]]:
        requests = [(PROMPT, 7), *(((9, seed), seed) for seed in range(8, 12))]
        return await asyncio.gather(
            *(served.server.generate(prompt, how(seed=seed), CALL_SECONDS) for prompt, seed in requests)
        )

    together = served.run(in_company())[0]
    assert [sample.tokens for sample in together] == [sample.tokens for sample in alone]
    near = served.generate(seed=8)
    assert not {sample.tokens for sample in near} & {sample.tokens for sample in alone}


def test_the_stop_token_ends_a_sample_and_belongs_to_it(served: Served) -> None:
    served.push(1)
    samples = served.generate(samples=16, max_tokens=100, stop_tokens=(END_ID,))
    stopped = [sample.tokens for sample in samples if sample.finish_reason == "stop"]
    assert stopped
    assert all(tokens.index(END_ID) == len(tokens) - 1 for tokens in stopped)
    assert all(len(sample.tokens) == 100 for sample in samples if sample.finish_reason == "length")


def test_a_refused_update_leaves_the_old_version_serving(served: Served) -> None:
    served.push(7)
    before = served.generate()
    path = write_version(served.weights, 9, policy_of(served.model_directory, 9).model)
    with pytest.raises(HetrlError, match=r"weight version 9: .*is not as in the version before"):
        served.run(served.server.update_weights(9, path, CALL_SECONDS))
    assert served.generate() == before


def test_requests_under_way_continue_under_the_next_version(served: Served) -> None:
    policies = {version: policy_of(served.model_directory, version) for version in (10, 11)}
    served.push(10)

    async def update_after(delay_seconds: float) -> Sample:
        request = asyncio.create_task(served.server.generate(PROMPT, how(samples=1, max_tokens=240), CALL_SECONDS))
        await asyncio.sleep(delay_seconds)
        path = write_version(served.weights, 11, policies[11])
        await served.server.update_weights(11, path, CALL_SECONDS)
        return (await request)[0]

    for attempt in range(20):  # until an update meets the request half-way, however fast the machine is
        sample = served.run(update_after(delay_seconds=0.02 * (attempt + 1)))
        if len(sample.versions) == 2:
            break
        served.push(10)
    before, after = sample.versions
    assert (before.version, before.start, after.version, after.end) == (10, 0, 11, 240)
    assert before.end == after.start
    for span in sample.versions:
        expected = expected_logprobs(policies[span.version], sample.tokens)[span.start : span.end]
        assert torch.tensor(sample.logprobs[span.start : span.end]) == pytest.approx(expected, abs=1e-4)


def test_deltas_serve_what_was_published(served: Served, tmp_path: Path) -> None:
    """Each version arrives as what changed since the one before; what is sampled has the log-probs of what was sent."""
    line, kept = Wire({"a/x/0": Receiver(tmp_path / "weights")}), Kept()
    receiver, policy = line.receivers["a/x/0"], policy_of(served.model_directory, 20)
    for version in range(20, 24):
        found = publish(line, version, policy.state_dict(), kept)
        assert (found.delta_bytes is None) == (version == 20)
        assert receiver.file.held is not None
        assert receiver.file.held.digest == found.digest
        served.run(served.server.update_weights(version, receiver.file.held.path, CALL_SECONDS))
        for sample in served.generate(samples=2):
            assert sample.versions == (VersionSpan(version=version, start=0, end=12),)
            assert torch.tensor(sample.logprobs) == pytest.approx(expected_logprobs(policy, sample.tokens), abs=1e-4)
        policy.load_state_dict(stepped(policy.state_dict(), version, share=0.2))


def test_abort_answers_with_what_there_is(served: Served) -> None:
    served.push(12)

    async def abort_while_held() -> tuple[Sample, ...]:
        await served.server.pause()
        request = asyncio.create_task(served.server.generate(PROMPT, how(), CALL_SECONDS))
        while not request.done():
            await served.server.abort_all()
            await asyncio.sleep(0.05)
        await served.server.resume()
        return await request

    samples = served.run(abort_while_held())
    assert {sample.finish_reason for sample in samples} == {"abort"}


@pytest.mark.parametrize("idle_state", ["resident", "sleep", "offload"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_sleeping_server_holds_its_requests_and_wakes_with_the_newest_version(
    served: Served, idle_state: str, replaced: bool
) -> None:
    before, after = (policy_of(served.model_directory, version) for version in (40, 41))
    first = write_version(served.weights, 40, before)
    served.run(served.server.update_weights(40, first, CALL_SECONDS))
    idle = Idle(served.server, "cpu")

    async def nothing() -> None:
        pass

    async def load() -> None:
        if replaced:
            await served.server.load_weights(41, write_version(served.weights, 41, after), CALL_SECONDS)

    async def sleep_in_the_middle() -> tuple[Sample, ...]:
        for delay_seconds in (0.3, 0.1, 0.0):  # until the sleep meets the request half-way, however fast the machine is
            request = asyncio.ensure_future(served.server.generate(PROMPT, how(max_tokens=200), CALL_SECONDS))
            await asyncio.sleep(delay_seconds)
            await idle.sleep(idle_state, keep_weights=not replaced)
            assert idle.asleep
            if not request.done():
                break
            await idle.wake(nothing)
        late = asyncio.ensure_future(served.server.generate(PROMPT, how(samples=1), CALL_SECONDS))
        await asyncio.sleep(1.0)  # whoever does not sleep answers meanwhile
        assert not request.done() and not late.done()
        await idle.wake(load)
        assert not idle.asleep
        return (*await request, *await late)

    *under_way, late = served.run(sleep_in_the_middle())
    last = 41 if replaced else 40
    for sample in under_way:
        assert len(sample.tokens) == 200 and sample.versions[-1].version == last
    assert late.versions == (VersionSpan(version=last, start=0, end=12),)
    expected = expected_logprobs(after if replaced else before, late.tokens)
    assert torch.tensor(late.logprobs) == pytest.approx(expected, abs=1e-4)


class Told:
    """The member of an agent and the intake of its weights, which are whole: it is told things, and answers."""

    node, follows = "", False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._messages, self._answers = asyncio.Queue[Message](), asyncio.Queue[Message]()

    async def receive(self) -> Any:
        return SimpleNamespace(message=await self._messages.get(), buffers=())

    async def reply(self, _: Any, message: Message) -> None:
        await self._answers.put(message)

    async def end(self, end: WeightsEnd) -> tuple[Path, str]:
        return self._path, end.digest

    async def tell(self, message: Message) -> None:
        await self._messages.put(message)
        answer = await self._answers.get()
        assert isinstance(answer, Done | WeightsApplied), answer


def test_a_resident_server_draws_nothing_from_what_it_kept_of_the_version_before(served: Served) -> None:
    """A prompt is in its prefix cache, and the context of a request under way is of that version."""
    prompt = tuple(5 + place % 50 for place in range(3 * BLOCK_TOKENS))
    for delay_seconds in (0.3, 0.1, 0.0):  # until the sleep meets the request half-way, however fast the machine is
        served.push(42)
        after = policy_of(served.model_directory, 43)
        told = Told(write_version(served.weights, 43, after))

        async def sleep_in_the_middle(told: Told = told, delay_seconds: float = delay_seconds) -> tuple[Sample, ...]:
            idle = Idle(served.server, "cpu")
            agent = Agent(cast(Any, told), served.server, idle, cast(Any, told), recompute=True, goes_with_it=False)
            serving = asyncio.ensure_future(agent.serve())
            whole = how(samples=1, max_tokens=150)
            request = asyncio.ensure_future(served.server.generate(prompt, whole, CALL_SECONDS))
            await asyncio.sleep(delay_seconds)
            await told.tell(Sleep(idle_state="resident", keep_weights=True))
            late = asyncio.ensure_future(served.server.generate(prompt, how(samples=1), CALL_SECONDS))
            await told.tell(WeightsEnd(version=43, tensors=1, bytes=1, digest="d"))
            await told.tell(Wake())
            serving.cancel()
            return (*await request, *await late)

        under_way, late = served.run(sleep_in_the_middle())
        if len(under_way.versions) == 2:
            break
    assert [span.version for span in under_way.versions] == [42, 43]
    for sample in (under_way, late):
        (*_, span) = sample.versions
        expected = expected_logprobs(after, sample.tokens, prompt=prompt)[span.start : span.end]
        assert torch.tensor(sample.logprobs[span.start : span.end]) == pytest.approx(expected, abs=1e-4)


def test_more_samples_than_sequences_are_refused(served: Served) -> None:
    served.push(13)
    with pytest.raises(HetrlError, match="max_num_seqs"):
        served.generate(samples=17)


def test_without_a_gpu_the_engine_is_a_copy_of_its_server_and_ends_with_it(
    model_directory: Path, tmp_path: Path
) -> None:
    server = VllmServer(settings_of(model_directory), tmp_path, tmp_path / "vllm.log")
    before = family()

    async def killed() -> None:
        await server.start(START_SECONDS)
        try:
            (process,) = (psutil.Process(pid) for pid in family() - before if psutil.Process(pid).ppid() == os.getpid())
            (engine,) = process.children(recursive=True)  # a spawned one has a tracker of resources beside it
            process.kill()
            async with asyncio.timeout(CALL_SECONDS):
                while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.1)
        finally:
            await server.stop()

    asyncio.run(killed())
    assert family() == before


def test_stop_leaves_no_process_and_no_socket(served: Served) -> None:
    assert family()
    served.run(served.server.stop())
    served.run(served.server.stop())
    assert family() == set()
    assert {entry.name for entry in served.scratch.iterdir()} == {"vllm.log", "weights"}
    with pytest.raises(HetrlError, match="not running"):
        served.generate()


def test_a_server_that_hangs_says_where_its_threads_stand_and_is_ended(model_directory: Path, tmp_path: Path) -> None:
    settings = replace(settings_of(model_directory), load_format="auto", hang_seconds=2.0)
    policy_of(model_directory, 1).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((model_directory / name).read_bytes())
    log = tmp_path / "vllm.log"
    server = VllmServer(replace(settings, model_directory=tmp_path / "model"), tmp_path, log)

    async def stopped() -> None:
        await server.start(START_SECONDS)
        for pid in family():
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(HetrlError, match=r"vllm: no answer to /inference/v1/generate in 2 s; see .*vllm\.log"):
                await server.generate(PROMPT, how(), CALL_SECONDS)
            while family():
                await asyncio.sleep(0.1)
        finally:
            await server.stop()

    asyncio.run(stopped())
    said = re.findall(r"Fatal Python error: Aborted\s+(?:Current )?[Tt]hread .*most recent call first", log.read_text())
    assert len(said) == 2  # of the server and its engine, one after the other


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    server = VllmServer(settings_of(tmp_path), tmp_path, tmp_path / "vllm.log")
    with pytest.raises(HetrlError, match=r"vllm: the server ended with exit code 1: .*config.json.*see .*vllm\.log"):
        asyncio.run(server.start(START_SECONDS))
    assert family() == set()


def test_a_server_that_is_late_is_ended(model_directory: Path, tmp_path: Path) -> None:
    server = VllmServer(settings_of(model_directory), tmp_path, tmp_path / "vllm.log")
    with pytest.raises(HetrlError, match=r"vllm: not healthy after 0\.5 s.*see .*vllm\.log"):
        asyncio.run(server.start(0.5))
    assert family() == set()


def test_it_starts_with_the_least_cache_of_a_plan_and_not_with_a_block_less(
    model_directory: Path, tmp_path: Path
) -> None:
    model = architecture_from_hf_config(json.loads((model_directory / "config.json").read_text()), "tiny")
    shape = StageShape(model, model.layers, True, True, True, 1, calibrated().rates("cpu"), weight_bytes=4)
    response = Lengths(MAX_TOKENS - len(PROMPT), MAX_TOKENS - len(PROMPT))
    job = Workload("grpo", "sync", 0, 8, 8, len(PROMPT), response, 1, model, weight_bytes=4)
    least, block = round(least_kv_cache_gb([shape], job) * 1e9), int(BLOCK_TOKENS * shape.kv_bytes_per_token)
    enough, short = (replace(settings_of(model_directory), kv_cache_bytes=least - less) for less in (0, block))
    servers = []
    for settings in (enough, short):
        scratch = tmp_path / str(settings.kv_cache_bytes)
        scratch.mkdir()
        servers.append(VllmServer(settings, scratch, scratch / "vllm.log"))
    refused = asyncio.run(errors_of_start(servers))
    assert refused[0] is None
    assert "To serve at least one request with the model's max seq len" in str(refused[1])
    assert family() == set()


async def errors_of_start(servers: list[VllmServer]) -> list[BaseException | None]:
    """Start servers, all at once, and stop those that started; returns what each start raised."""
    ends = await asyncio.gather(*(server.start(START_SECONDS) for server in servers), return_exceptions=True)
    await asyncio.gather(*(server.stop() for server, end in zip(servers, ends, strict=True) if end is None))
    return ends


def test_last_words_are_the_root_cause() -> None:
    log = "\n".join(
        [
            "(EngineCore pid=7) INFO starting",
            "(EngineCore pid=7) ValueError: head_dim 48 is not supported",
            "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.",
            "(APIServer pid=5) bye",
        ]
    )
    assert last_words(log) == "ValueError: head_dim 48 is not supported"
    assert last_words("one\n\ntwo\n") == "two"
    assert last_words("") == "nothing"
