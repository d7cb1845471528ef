"""`hetrl rehearse` as a user asks for it, of large experiments on this machine: how long it takes, and what it finds.

paper-multi-continent: PPO over 64 GPUs in eight regions
a thousand: GRPO over 1,024 GPUs, 16 sites of 64 GPUs of four types in turn, links of 5 to 50 ms and 20 to 100 Gbps;
    three steps, of which two count
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from _results import ROOT, write_result

GOAL_SECONDS = 180.0
SITES, NODES, GPUS = 16, 8, 8
TYPES = ("a100-80gb", "h100", "l40s", "a100-40gb")
NIC_GBPS, LINK_GBPS = 400, 20  # with links so fast all sites are worth their weights
SAMPLES, SAMPLES_PER_PROMPT, RESPONSE_TOKENS = 4096, 8, 2048
STEPS, SPEED = 3, 1


def thousand(work: Path) -> Path:
    """Write the experiment over 1,024 GPUs; return its file."""
    names = [f"s{number:02}" for number in range(SITES)]
    sites = [
        {
            "name": name,
            "nodes": [
                {
                    "name": "n",
                    "gpu": TYPES[number % len(TYPES)],
                    "gpus": GPUS,
                    "count": NODES,
                    "host_memory_gb": 1024,
                    "nic_gbps": NIC_GBPS,
                }
            ],
        }
        for number, name in enumerate(names)
    ]
    links = [
        {"between": [a, b], "delay_ms": 5 + 45 * ((i * 7 + j * 3) % 10) / 9, "gbps": LINK_GBPS * (1 + (i + j) % 5)}
        for (i, a), (j, b) in itertools.combinations(enumerate(names), 2)
    ]
    (work / "thousand-sites.yaml").write_text(yaml.safe_dump({"sites": sites, "links": links}))
    document = {
        "name": "thousand",
        "model": {"architecture": "qwen3-8b"},
        "algorithm": {"kind": "grpo", "samples_per_prompt": SAMPLES_PER_PROMPT, "kl_coefficient": 0.0},
        "reward": {"kind": "rule"},
        "data": {"kind": "gsm8k", "path": "/data/gsm8k"},
        "batch": {"samples": SAMPLES, "prompt_tokens": 512, "response_tokens": RESPONSE_TOKENS},
        "steps": 100,
        "topology": {"scenario": "thousand-sites.yaml"},
        "planner": {"solver": "sha-ea", "budget_seconds": 20, "seed": 0},
    }
    path = work / "thousand.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def rehearse(config: Path, work: Path, *words: str) -> dict[str, Any]:
    """Return what a rehearsal prints, and how long all of it took, planning included."""
    command = [sys.executable, "-m", "launch.cli", "rehearse", str(config), "--json", *words]
    began = time.monotonic()
    done = subprocess.run(command, cwd=work, text=True, capture_output=True)
    seconds = time.monotonic() - began
    if done.returncode:
        sys.exit(f"{config.name}: {done.stderr}")
    said = next(line for line in done.stderr.splitlines() if line.startswith("rehearsing"))
    return {"config": config.name, "seconds": seconds, "said": said, **json.loads(done.stdout)}


def row(found: Mapping[str, Any]) -> str:
    """Return the line of a rehearsal in the table."""
    iteration = found["tasks"]["iteration"]
    predicted, rehearsed = iteration["predicted_seconds"], iteration["rehearsed_seconds"]
    return (
        f"| {found['config']} | {found['seconds']:.0f} s | {found['steps']} | {found['speed']:g} | {predicted:.1f} s "
        f"| {rehearsed:.1f} s | {len(found['findings'])} | {found['said']} |"
    )


def main() -> None:
    """Rehearse both, write the result."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "topology").symlink_to(ROOT / "topology")
        found = [
            rehearse(ROOT / "configs" / "paper-multi-continent.yaml", work),
            rehearse(thousand(work), work, "--steps", str(STEPS), "--speed", str(SPEED)),
        ]
    worst = max(one["seconds"] for one in found)
    lines = [
        f"The longest takes {worst:.0f} s, planning included (goal: at most {GOAL_SECONDS:.0f} s). An iteration is "
        "longer than predicted by what controller, gateways and this machine take at that speed.",
        "",
        "| experiment | all of it | steps | speed | an iteration, predicted | rehearsed | findings | what it said |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(row, found),
    ]
    write_result("rehearsals", {"rehearsals": found}, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
