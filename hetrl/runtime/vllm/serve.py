"""vLLM's command line: `python -m hetrl.runtime.vllm.serve serve MODEL ...`, and what its workers import first.

Where there is a GPU, vLLM spawns the process of its engine. A spawned process imports the main module of its parent, so
that the engine's imports are made here as well
(https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from functools import partial

from hetrl.runtime.garbage import uncollected
from hetrl.runtime.parent_death import end_with_parent

with uncollected():
    import vllm.v1.engine.core  # the larger part of what `serve` imports in both processes
    import vllm.v1.engine.utils
    from vllm.entrypoints.cli.main import main
    from vllm.platforms import current_platform


def fork_engine() -> None:
    """Let the process of the engine begin as a copy of this one, with all that it imports.

    Without a GPU nothing speaks against it, but vLLM spawns whatever `VLLM_WORKER_MULTIPROC_METHOD` says, and a start
    takes twice as long: half of it is imports.
    """
    os.register_at_fork(after_in_child=_begin_as_copy)
    vllm.v1.engine.utils.get_mp_context = partial(multiprocessing.get_context, "fork")


def _begin_as_copy() -> None:
    signal.set_wakeup_fd(-1)  # else the server's event loop would take the engine's signals for its own
    end_with_parent()  # nobody shall find the server's socket open that only the engine still holds


if __name__ == "__main__":
    if current_platform.is_cpu():
        fork_engine()
    sys.exit(main())
