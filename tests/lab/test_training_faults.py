"""A training over three sites whose middle rank is killed, stopped, cut off, or without a gateway.

With replicas or stages at the sites, whatever that rank does when it happens (`lab.worlds.in_faults`): the worlds
of all these cells are there at once, and no two of them share anything but gateways and links.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import permutations
from pathlib import Path
from subprocess import Popen

import pytest

from lab.available import skip_unless_available
from lab.lab import Lab
from lab.worlds.gateways import SITES, LabSites, Shape, open_lab
from lab.worlds.in_faults import CELLS, COMPUTED, GO, VICTIM, World, worlds_of

FAST, SLOW = Shape(1.0, 5.0, 0.0), Shape(0.02, 5.0, 0.0)
CUT = (SITES[:2], SITES[1:])  # the victim's links
START_SECONDS = 120.0
PIECES_SECONDS = 1.0  # in which the first pieces are under way
SILENCE_SECONDS = 12.0  # of a rank, docs/process-groups.md; a link counts as out before
SOON_SECONDS = 15.0  # after such a deadline
PATIENCE_SECONDS, SHORT_PATIENCE_SECONDS = 60.0, 12.0

Who = tuple[World, str]  # a member and its world
Servers = tuple[dict[str, Popen[str]], "queue.Queue[list[str]]"]


class Faults:
    """The worlds of all cells, in the middle of their work once `begin` has returned, and what befalls them."""

    def __init__(self, sites: LabSites, run: Path, servers: Servers) -> None:
        self.sites, self._run = sites, run
        self._processes, self._said = servers
        self._worlds = worlds_of(run)
        self.victims: list[Who] = [(world, world.ranks[VICTIM]) for world in self._worlds]
        self.ranks: list[Who] = [(world, rank) for world in self._worlds for rank in world.ranks]
        self.survivors: list[Who] = [who for who in self.ranks if who not in self.victims]
        self.words: dict[Who, list[str]] = {}
        self.pids: dict[Who, int] = {}

    def begin(self) -> None:
        """Start all members, let the ranks meet, and begin over slow links."""
        self.sites.shape(FAST)
        for process in self._processes.values():
            process.stdin.writelines(json.dumps([world.cell, str(self._run)]) + "\n" for world in self._worlds)
            process.stdin.flush()
        controllers = [(world, world.controller) for world in self._worlds]
        self.until([*self.ranks, *controllers], lambda who: "ready", START_SECONDS)
        self._until_links_are_up()
        self.sites.shape(SLOW)
        (self._run / GO).touch()
        self.until(self.ranks, lambda who: "begins", START_SECONDS)
        time.sleep(PIECES_SECONDS)

    def _until_links_are_up(self) -> None:
        """Wait until each gateway knows that the others answer: before that a link counts as one that never was up."""
        deadline = time.monotonic() + START_SECONDS
        for site, other in permutations(SITES, 2):
            while f"{site}: the link to {other} is up" not in (self._run / f"{site}.log").read_text():
                assert time.monotonic() < deadline, f"the link from {site} to {other} is not up"
                time.sleep(0.05)

    def compute_on(self) -> None:
        """Let the victims that compute be done with it."""
        (self._run / COMPUTED).touch()

    def go_on(self) -> None:
        """Let the work end: over links that are fast again."""
        self.compute_on()
        self.sites.shape(FAST)

    def signal(self, number: signal.Signals, whom: Sequence[Who]) -> None:
        """Send a signal to members that are there."""
        for who in whom:
            with suppress(ProcessLookupError):
                os.kill(self.pids[who], number)

    def until(self, whom: Sequence[Who], words: Callable[[Who], str], seconds: float) -> None:
        """Wait until each has said the words for it, be it in a sentence; fails after so many seconds."""
        deadline = time.monotonic() + seconds
        while waiting := [who for who in whom if not any(words(who) in said for said in self.words.get(who, []))]:
            try:
                self._hear(max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                heard = [f"{CELLS[who[0].cell]} {who[1]}: {self.words.get(who)}" for who in waiting]
                logs = [f"{path}: {path.read_text()[-2000:]}" for path in sorted(self._run.glob("*.log"))]
                pytest.fail(f"not within {seconds:g} s: {words(waiting[0])!r} of " + "\n".join(heard + logs))

    def _hear(self, seconds: float) -> None:
        run, cell, who, pid, word = self._said.get(timeout=seconds)
        if run == str(self._run):  # else it is of a test before
            known = self._worlds[int(cell)], who
            self.pids[known] = int(pid)
            self.words.setdefault(known, []).append(word)


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Lab, ExitStack]]:
    skip_unless_available()
    with open_lab() as found:
        yield found


@pytest.fixture(scope="module")
def servers(opened: tuple[Lab, ExitStack], tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """Give the process of each site that forks members, and what all of these say: torch is imported once per site."""
    sites = LabSites(opened[0], tmp_path_factory.mktemp("servers"), opened[1], gateways=False)
    processes = {
        site: sites.start(site, [sys.executable, "-m", "lab.worlds.in_faults", site], OPENBLAS_NUM_THREADS="1")
        for site in SITES
    }
    said: queue.Queue[list[str]] = queue.Queue()

    def listen(process: Popen[str]) -> None:
        for line in process.stdout:
            said.put(json.loads(line))

    for process in processes.values():
        threading.Thread(target=listen, args=(process,), daemon=True).start()
    return processes, said


@pytest.fixture
def faults(opened: tuple[Lab, ExitStack], servers: Servers, request: pytest.FixtureRequest) -> Iterator[Faults]:
    """Give worlds in the middle of their work, with gateways of their own; what is left of them ends with the test."""
    lab, _ = opened
    members = [member for world in worlds_of(Path()) for member in world.members]
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        patience_seconds = getattr(request, "param", PATIENCE_SECONDS)
        sites = LabSites(lab, Path(work), stack, members=members, patience_seconds=patience_seconds)
        found = Faults(sites, Path(work), servers)
        try:
            found.begin()
            yield found
        finally:
            for pair in CUT:
                lab.heal(*pair)
            found.signal(signal.SIGKILL, [*found.pids])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_is_named_by_every_survivor(faults: Faults, number: signal.Signals) -> None:
    faults.signal(number, faults.victims)
    faults.until(faults.survivors, lambda who: who[0].ranks[VICTIM], SILENCE_SECONDS + SOON_SECONDS)
    for who in faults.survivors:
        word, victim = faults.words[who][-1], who[0].ranks[VICTIM]
        silent = f"{victim} has been silent for {SILENCE_SECONDS:g} s (its last word: in "
        gone = f"{victim} has not been connected for "  # its gateway knows, and tells those who send to it
        assert silent in word or (number == signal.SIGKILL and gone in word)


def test_links_that_are_back_in_time_cost_time_only(faults: Faults) -> None:
    for pair in CUT:
        faults.sites.cut(*pair)
    time.sleep(SILENCE_SECONDS)
    for pair in CUT:
        faults.sites.heal(*pair)
    faults.go_on()
    faults.until(faults.ranks, lambda who: "done", PATIENCE_SECONDS)


@pytest.mark.parametrize("faults", [SHORT_PATIENCE_SECONDS], indirect=True)
def test_links_that_stay_out_are_given_up_and_named_on_both_sides(faults: Faults) -> None:
    for pair in CUT:
        faults.sites.cut(*pair)
    given_up = f"no connection for {SHORT_PATIENCE_SECONDS:g} s"
    faults.until(faults.survivors, lambda who: given_up, SHORT_PATIENCE_SECONDS + SOON_SECONDS)
    faults.compute_on()
    faults.until(faults.victims, lambda who: given_up, SOON_SECONDS)
    for world, rank in faults.survivors:
        assert f"{world.ranks[VICTIM]} cannot be reached" in faults.words[world, rank][-1]


def test_a_gateway_that_is_started_again_costs_time_only(faults: Faults) -> None:
    faults.sites.gateways[VICTIM].kill()
    faults.sites.gateways[VICTIM].wait()
    faults.sites.start_gateway(SITES[VICTIM])
    faults.go_on()
    faults.until(faults.ranks, lambda who: "done", PATIENCE_SECONDS)


@pytest.mark.parametrize("faults", [SHORT_PATIENCE_SECONDS], indirect=True)
def test_a_gateway_that_is_gone_for_good_is_named_by_the_other_sites(faults: Faults) -> None:
    faults.sites.gateways[VICTIM].kill()
    given_up = f"{SITES[VICTIM]}: no connection for {SHORT_PATIENCE_SECONDS:g} s"
    faults.until(faults.survivors, lambda who: given_up, SHORT_PATIENCE_SECONDS + SOON_SECONDS)
