"""A lab by hand: `python -m lab up`, then `status`, `run NODE COMMAND...`, `link`, `cut`, ..., `down`.

`submit` runs an experiment on its clusters.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hetrl.describe.links import LinksFile
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import HetrlError
from lab.lab import Accounting, Lab
from lab.processes import LabError, enter, environment_of, wait_until
from lab.shape import JOB_USER, RUN_SITES, SITES, Link, Site
from lab.state import BASE, LABS, keeper_of
from lab.submission import CONFIG, submit

LAB = LABS / "by-hand"
LOG = BASE / "by-hand.log"
DOWN_SECONDS = 180.0  # on a busy machine daemons take their time
SITES_SYNTAX = "NAME:NODES[:GPU[:GPUS]][:no-gres][:second-factor]"


def main(arguments: Sequence[str]) -> int:
    """Obey one command; `run` and `submit` become theirs."""
    parser = _parser()
    options, options.more = parser.parse_known_args(arguments)
    if options.more and options.verb != "submit":
        parser.error(f"unrecognized arguments: {' '.join(options.more)}")
    verbs = {"up": _up, "keep": _keep, "status": _status, "run": _run, "submit": _submit, "down": _down}
    if options.verb in verbs:
        verbs[options.verb](options)
        return 0
    lab = Lab.attach(LAB)
    if options.verb == "link":
        lab.link(options.a, options.b, options.gbps, options.delay_ms, options.loss, options.jitter_ms)
    elif options.verb == "restore":
        lab.restore()
    elif options.verb in ("cut", "heal"):
        getattr(lab, options.verb)(options.a, options.b)
    else:
        getattr(lab, f"{options.verb}_node")(options.node)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("up", "start the lab, and leave it up"), ("keep", "start it, and keep it up until SIGTERM")):
        up = verbs.add_parser(verb, help=text)
        up.add_argument("--sites", default="", help=f"{SITES_SYNTAX} ..., instead of the three usual ones")
        up.add_argument("--links", type=Path, help="a links file, as topology/quickstart-links.yaml")
        up.add_argument("--slurm", action="store_true", help="one cluster per site")
        up.add_argument("--accounting", choices=get_args(Accounting), default="none", help="implies --slurm")
        up.add_argument("--open", action="store_true", help="no packet filter")
    verbs.add_parser("status", help="the pods, the traffic between sites, and what Slurm says")
    run = verbs.add_parser("run", help="run a command in a head or node")
    run.add_argument("--user", default=JOB_USER)
    run.add_argument("node")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    ran = verbs.add_parser(
        "submit", help="run an experiment, in a lab that it starts if none is up; takes more arguments"
    )
    ran.add_argument("config", nargs="?", default=CONFIG, help=f"of this directory (default: {CONFIG})")
    for verb, text in (("link", "shape a link"), ("cut", "let nothing pass"), ("heal", "undo cut")):
        link = verbs.add_parser(verb, help=text)
        link.add_argument("a")
        link.add_argument("b")
        if verb == "link":
            link.add_argument("gbps", type=float)
            link.add_argument("delay_ms", type=float)
            link.add_argument("--loss", type=float, default=0.0, help="fraction of the packets")
            link.add_argument("--jitter-ms", type=float, default=0.0)
    for verb, text in (("kill", "cut a node's power"), ("start", "switch it on again")):
        verbs.add_parser(verb, help=text).add_argument("node")
    verbs.add_parser("restore", help="links and nodes as they were at the start")
    verbs.add_parser("down", help="end the lab")
    return parser


def _up(options: argparse.Namespace) -> None:
    _start(sys.argv[2:])
    _status(options)


def _start(arguments: Sequence[str]) -> None:
    """Leave a process behind that keeps a lab up."""
    BASE.mkdir(parents=True, exist_ok=True)
    with LOG.open("w") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "lab", "keep", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert keeper.stdout
    if keeper.stdout.readline() != b"up\n":
        keeper.wait()
        raise LabError(LOG.read_text().strip().removeprefix("lab: "))


def _keep(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Lab(
        _sites(options.sites),
        _links(options),
        slurm=options.slurm,
        accounting=options.accounting,
        open=options.open,
        name=LAB.name,
    ):
        print("up", flush=True)
        os.close(1)
        while True:
            signal.pause()


def _sites(text: str) -> dict[str, Site]:
    sites = {}
    for word in text.split():
        name, nodes, *rest = word.split(":")
        shape = [part for part in rest if part not in ("no-gres", "second-factor")]
        more = {"gres": "no-gres" not in rest, "second_factor": "second-factor" in rest}
        sites[name] = Site(int(nodes), *shape[:1], *map(int, shape[1:]), **more)
    return sites or dict(SITES)


def _word(name: str, site: Site) -> str:
    """Return a site as `--sites` takes it."""
    more = ":no-gres" * (not site.gres) + ":second-factor" * site.second_factor
    return f"{name}:{site.nodes}:{site.gpu}:{site.gpus_per_node}{more}"


def _links(options: argparse.Namespace) -> dict[tuple[str, str], Link]:
    if options.links is None:
        return {}
    links = {entry.between: Link(entry.gbps, entry.delay_ms) for entry in read_yaml(options.links, LinksFile).links}
    unknown = {name for pair in links for name in pair} - set(_sites(options.sites))
    if unknown:
        raise LabError(f"{options.links}: no such site in the lab: {', '.join(sorted(unknown))}")
    return links


def _status(options: argparse.Namespace) -> None:
    lab, lines = Lab.attach(LAB), []
    for pod in lab.pods.values():
        note = LAB / "pods" / pod.name
        gpus = f"{pod.gpus} x {lab.sites[pod.site].gpu}" if pod.gpus else "head"
        lines.append(
            f"{pod.name:12} {pod.address:12} {gpus:10} {f'pid {note.read_text()}' if note.exists() else 'off'}"
        )
    for (sender, receiver), traffic in lab.stats().items():
        counts = f"{traffic.packets} packets, {traffic.bytes} bytes, {traffic.full} dropped at the full queue"
        lines.append(f"{sender} -> {receiver}: {counts}, {traffic.lost} lost")
    if lab.slurm:
        lines += [f"\n{site}\n{lab.run(site, ['sinfo', '--local'], check=False).stdout.rstrip()}" for site in lab.sites]
    print("\n".join(lines))


def _run(options: argparse.Namespace) -> None:
    command = [*enter(Lab.attach(LAB).pid(options.node), options.user), *(options.argv or ["bash"])]
    os.execvpe(command[0], command, environment_of(options.user, _terminal()))


def _submit(options: argparse.Namespace) -> None:
    if keeper_of(LAB) is None:
        _start(["--slurm", "--sites", " ".join(_word(*site) for site in RUN_SITES.items())])
        print("the lab is up; `make lab-down` ends it", flush=True)
    lab = Lab.attach(LAB)
    if not lab.slurm:
        raise LabError("the lab that is up has no Slurm; `make lab-down` ends it")
    submit(lab, options.config, options.more, _terminal())


def _terminal() -> dict[str, str]:
    return {"TERM": os.environ.get("TERM", "dumb")}


def _down(options: argparse.Namespace) -> None:
    keeper = keeper_of(LAB)
    if keeper is None:
        print("no lab is up")
        return
    os.kill(keeper, signal.SIGTERM)
    wait_until(lambda: not LAB.exists(), DOWN_SECONDS, lambda: f"{LAB} is still there")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (LabError, HetrlError) as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(1)
