"""vLLM's command line: `python -m hetrl.runtime.vllm.serve serve MODEL ...`, and what its workers import first.

vLLM spawns the process of its engine. A spawned process imports the main module of its parent, so that the engine's
imports are made here as well (https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods).
"""

from __future__ import annotations

import sys

from hetrl.runtime.garbage import uncollected

with uncollected():
    import vllm.v1.engine.core  # noqa: F401  (the larger part of what `serve` imports in both processes)
    from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
