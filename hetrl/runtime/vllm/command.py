"""How a vLLM server is started: its settings, command line and environment."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

EXTENSION = "hetrl.runtime.vllm.extension.WorkerExtension"
BACKEND = "hetrl_file"
MODEL_NAME = "policy"


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """What one rollout replica serves and how large it may grow; the launcher sets CUDA_VISIBLE_DEVICES."""

    model_directory: Path
    kv_cache_bytes: int
    max_sequences: int
    max_model_tokens: int
    dtype: str = "float32"
    tensor_parallel: int = 1
    stage_layers: tuple[int, ...] = ()  # of each pipeline stage; empty: one stage
    load_format: str = "dummy"  # dummy: weights come by the first update | auto: from model_directory
    device: str = "cpu"  # cpu | cuda
    seed: int = 0
    cpu_threads: int = 1
    hang_seconds: float = 1800.0  # until a request that nobody answers has the server end
    idle_state: str = "resident"  # what it keeps on its devices between its turns, as in the plan


def command_of(settings: VllmSettings, socket: Path) -> list[str]:
    """Return the command line of the server (https://docs.vllm.ai/en/latest/cli/serve/)."""
    command = [sys.executable, "-m", "hetrl.runtime.vllm.serve", "serve", str(settings.model_directory)]
    options: dict[str, object] = {
        "uds": socket,
        "served-model-name": MODEL_NAME,
        "load-format": settings.load_format,
        "dtype": settings.dtype,
        "tensor-parallel-size": settings.tensor_parallel,
        "pipeline-parallel-size": max(len(settings.stage_layers), 1),
        "kv-cache-memory-bytes": settings.kv_cache_bytes,
        "max-num-seqs": settings.max_sequences,
        "max-model-len": settings.max_model_tokens,
        "seed": settings.seed,
        # The log-probs of the distribution that was sampled from, temperature and top_p included.
        "logprobs-mode": "processed_logprobs",
        # Nothing of the model's generation_config.json may change how the policy is sampled.
        "generation-config": "vllm",
        "worker-extension-cls": EXTENSION,
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
    }
    if settings.device == "cuda":
        # The plan has added memory up. vLLM only asks at its start whether so much is free, and others may be there.
        options["gpu-memory-utilization"] = 0.05
    else:
        # CPU attention has blocks of 32. Seeded requests whose prompt is split fail on the CPU in vLLM 0.32.0.
        options |= {"block-size": 32, "max-num-batched-tokens": max(settings.max_model_tokens, 2048)}
    flags = ["--tokens-only", "--enable-scale-out", "--disable-uvicorn-access-log", "--disable-log-stats"]
    if settings.device == "cuda" and settings.idle_state != "resident":
        flags.append("--enable-sleep-mode")
    if settings.device == "cpu":
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*command, *(word for key, value in options.items() for word in (f"--{key}", str(value))), *flags]


def environment_of(settings: VllmSettings, directory: Path) -> dict[str, str]:
    """Return what the server's environment adds to ours (https://docs.vllm.ai/en/latest/configuration/env_vars/)."""
    environment = {
        "PYTHONFAULTHANDLER": "1",  # SIGABRT has each process say where its threads stand
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and that update weights
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if len(settings.stage_layers) > 1:
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, settings.stage_layers))
    if settings.device == "cpu":
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than it saves
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single worker shares the process of the engine: starts faster
            # Servers that share a machine must not bind their threads to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.cpu_threads),
        }
    return environment
