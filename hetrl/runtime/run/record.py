"""What a run leaves behind: a row per step in metrics.jsonl, events, and summary.json at the end."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec

from hetrl.describe.launching import link_name
from hetrl.errors import HetrlError
from hetrl.files import EventLog, append_line, read_lines, replace_json
from hetrl.goodput import fault_costs, goodput
from hetrl.plan.plan import Plan
from hetrl.runtime import wire
from hetrl.runtime.data.rewards import tally
from hetrl.runtime.rl.sampling import PromptGroup, mean_of
from hetrl.runtime.rl.stretches import BEFORE, Stretch
from hetrl.runtime.run.context import Context
from hetrl.workload import ITERATION

METRICS = "metrics.jsonl"
LAST_STEPS = 5  # reward_last is the mean over so many steps


class Record:
    """Writes one run's files into the controller's directory; the summary is made from them."""

    def __init__(self, directory: Path, site: str) -> None:
        self.events = EventLog(directory / "events.jsonl", site)
        self._directory, self._site = directory, site
        self.began = time.time()
        self._start, self._spent_seconds = time.monotonic(), 0.0  # the latter until then, since the first start of all
        self._rows_before = 0  # of metrics, of another run
        self._open, self._met = dict[str, str](), dict[str, str]()  # faults that go on; those since the last step
        self._named = set[str]()  # all faults so far
        self._engines: dict[str, str] = {}
        self._warm_start: dict[str, Any] | None = None
        self._lost = 0
        self._refused: dict[str, dict[str, int]] = {}

    def ready(self, member: str, join: wire.Join) -> None:
        """Note a member that is READY."""
        self._engines.update(join.engines)
        self.events.append("member_ready", member=member, ranks=join.ranks, host=join.host, engines=join.engines)

    def published(self, published: wire.Published) -> None:
        """Note a weight version that all receivers serve."""
        row = {
            "version": published.version,
            "bytes": published.bytes,
            "seconds": round(published.seconds, 4),
            "digest": published.digest,
            **_delta(published),
        }
        if published.repaired:
            self.events.append("weights_repaired", version=published.version, causes=published.repaired)
        self.events.append("weights_published", **row, to=sorted(published.apply_seconds))

    def replicas_behind(self, version: int, causes: Mapping[str, str]) -> None:
        """Note which replicas of generation missed a weight version, and why; they draw nothing until they have one."""
        self.events.append("replicas_behind", version=version, causes=causes)

    def replicas_caught_up(self, published: wire.Published) -> None:
        """Note which replicas of generation have the newest weights again."""
        row = {"version": published.version, "seconds": round(published.seconds, 3)}
        self.events.append("replicas_caught_up", **row, members=sorted(published.apply_seconds))

    def replica_lost(self, replica: str, error: HetrlError) -> None:
        """Note a replica of generation that the run goes on without."""
        self._lost += 1
        self._fault(replica, f"lost {replica}")
        self.events.append("replica_lost", member=replica, cause=str(error))

    def replica_released(self, replica: str) -> None:
        """Note a replica of generation that the run goes on without, as it was told to: no fault."""
        self.events.append("replica_released", member=replica)

    def replica_back(self, replica: str) -> None:
        """Note a replica of generation that was started again."""
        self._open.pop(replica, None)
        self.events.append("replica_back", member=replica)

    def replica_joined(self, replica: str) -> None:
        """Note that a replica of generation has come that the run has begun without."""
        self._open.pop(replica, None)
        self.events.append("replica_joined", member=replica)

    def link_changed(self, site: str, *, out: bool) -> None:
        """Note that the link from here to a site is out, or is back."""
        link = link_name(self._site, site)
        if out == (link in self._open):
            return
        if out:
            self._fault(link, f"link {link} out")
        else:
            del self._open[link]
        self.events.append("link_out" if out else "link_back", link=link)

    def refused(self, offences: Mapping[str, Mapping[str, int]]) -> None:
        """Note how many messages each site refused, by who sent them, where that changed."""
        if offences != self._refused:
            self._refused = {site: dict(by) for site, by in offences.items()}
            self.events.append("refused", offences=self._refused)

    def prompts(self, prompts: int, left_out: int, limit: int) -> None:
        """Note how many prompts of a data set were left out, being longer than `limit` tokens."""
        if left_out:
            self.events.append("prompts_left_out", prompts=prompts, left_out=left_out, limit=limit)

    def warm_start(self, steps: int, reward: float) -> None:
        """Note a check of the supervised warm start; the last one is where RL begins."""
        self._warm_start = {"steps": steps, "reward": round(reward, 4)}
        self.events.append("warm_start", **self._warm_start)

    def goes_on(
        self, step: int, version: int, rows: Sequence[Mapping[str, Any]], begun: int = 0, spent_seconds: float = 0.0
    ) -> None:
        """Note that the run goes on after a step of another one, whose rows of metrics become this one's.

        Of `begun` prompts it has samples that were under way; this one began `spent_seconds` after the first start.
        """
        self._spent_seconds, self._rows_before = spent_seconds, len(rows)
        self._met["resumed"] = f"taken up behind step {step}"
        for row in rows:
            self._named.update(row.get("faults", ()))
            append_line(self._directory / METRICS, row)
        self.events.append("resumed", step=step, version=version, rows=len(rows), begun=begun)

    def saved(self, saved: wire.Saved, seconds: float, waited_seconds: float) -> None:
        """Note a checkpoint that is whole `seconds` after it was begun, of which the trainer waited for some."""
        times = {"seconds": round(seconds, 3), "waited_seconds": round(waited_seconds, 3)}
        self.events.append("checkpoint", step=saved.step, directory=saved.directory, **times)

    def copied(self, task: str, taken: wire.CheckpointTaken, site: str) -> None:
        """Note that a checkpoint is at another site too, every byte of it proven."""
        told = {"site": site, "bytes": taken.bytes, "seconds": round(taken.seconds, 3)}
        self.events.append("checkpoint_copied", task=task, step=taken.step, **told)

    def not_copied(self, task: str, step: int, cause: str) -> None:
        """Note that a checkpoint is at its own site alone, and why."""
        self.events.append("checkpoint_not_copied", task=task, step=step, cause=cause)

    def step(self, row: Mapping[str, Any], of: int) -> None:
        """Write the metrics of one step."""
        faults = {"faults": [*self._met.values()]} if self._met else {}
        row = {**row, **faults, "time": round(time.time(), 3), "elapsed_seconds": round(self._elapsed_seconds, 3)}
        self._met = dict(self._open)
        append_line(self._directory / METRICS, row)
        self.events.append("step", step=row["step"], of=of, reward=row["reward"], seconds=row["seconds"])

    @property
    def _elapsed_seconds(self) -> float:
        """Return the seconds since the first start of this run, or of those that it goes on from."""
        return self._spent_seconds + time.monotonic() - self._start

    def _fault(self, key: str, what: str) -> None:
        """Let the steps that end from now on name a fault, until it is over.

        One that was over in an earlier step and is there once more is another one.
        """
        if key not in self._met:
            names = chain([what], (f"{what}, time {number}" for number in count(2)))
            self._met[key] = next(one for one in names if one not in self._named)
            self._named.add(self._met[key])
        self._open[key] = self._met[key]

    def summary(self, context: Context, stats: wire.LinkStatsReply) -> None:
        """Write summary.json; `stats` are those of the lead site's gateway.

        None is written where no row of metrics is there: taken up behind the last step, of which the rows are lost.
        """
        plan = context.plan
        rows = [*read_lines(self._directory / METRICS)]
        if not rows:
            return
        elapsed = sum(row["seconds"][ITERATION] for row in rows)
        summary = {
            "run": context.run,
            "name": context.experiment.name,
            "steps": rows[-1]["step"],
            "reward_first": rows[0]["reward"],
            "reward_last": round(statistics.fmean(row["reward"] for row in rows[-LAST_STEPS:]), 4),
            "reward_last_steps": min(LAST_STEPS, len(rows)),
            "warm_start": self._warm_start,
            "samples_per_second": round(sum(row["samples"] for row in rows) / elapsed, 3),
            "tokens_per_second": round(sum(row["tokens"] for row in rows) / elapsed, 3),
            "engines": self._engines,
            "sites": list(plan.site_order),
            "tasks": _task_seconds(rows[self._rows_before :] or rows, plan),  # those before may be of another one
            "weight_versions": self._versions(),
            "batch_versions": [[row["step"], row["versions"]] for row in rows],
            "bytes_per_link": {
                f"{plan.lead_site}-{site}": link.bytes_sent + link.bytes_received for site, link in stats.links.items()
            },
            "transport": {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(stats).items()},
            "gpu_hours": gpu_hours(context.held, time.monotonic() - self._start),
            "elapsed_seconds": round(self._elapsed_seconds, 3),
            "goodput": round(goodput(rows, self._elapsed_seconds), 4),
            "faults": [asdict(one) for one in fault_costs(rows)],
            "faults_survived": self._lost + sum(link.reconnects for link in stats.links.values()),
        }
        replace_json(self._directory / "summary.json", summary)

    def _versions(self) -> list[dict[str, Any]]:
        """Return the weight versions of this run, as their events have them."""
        events = (one for one in read_lines(self.events.path) if one["kind"] == "weights_published")
        others = ("time", "source", "sequence", "kind", "to")
        return [{name: value for name, value in one.items() if name not in others} for one in events]


def weight_metrics(published: wire.Published) -> dict[str, Any]:
    """Return what a step says of the version that followed it: its bytes and, of a delta, what share changed.

    `weight_bytes` are those that the replicas with the version before got, `weight_full_bytes` those of the full set.
    """
    sent = published.bytes if published.delta_bytes is None else published.delta_bytes
    changed = {} if published.changed is None else {"weights_changed": round(published.changed, 6)}
    return {"weight_bytes": sent, "weight_full_bytes": published.bytes, **changed}


def _delta(published: wire.Published) -> dict[str, Any]:
    """Return how large a delta was and why receivers got the full set after all, where that is so."""
    if published.delta_bytes is None:
        return {}
    changed = round(published.changed or 0.0, 6)
    return {"delta_bytes": published.delta_bytes, "changed": changed, "repaired": sorted(published.repaired)}


def sample_metrics(groups: Sequence[PromptGroup]) -> dict[str, Any]:
    """Return what the samples of a step say.

    The reward, counts (`truncated`: cut off at the longest allowed), how many samples have tokens of each version, and
    per replica tokens and the seconds from its first stretch asked for to its last one here.
    """
    samples = [sample for group in groups for sample in group.samples]
    drawn: dict[str, list[Stretch]] = {}
    for one in sorted((one for group in groups for one in chain(*group.stretches)), key=lambda one: one.sent):
        if one.replica != BEFORE:
            drawn.setdefault(one.replica, []).append(one)
    versions = Counter(str(span.version) for sample in samples for span in sample.versions)
    return {
        "reward": round(mean_of(group.rewards for group in groups), 6),
        **_by_source(groups),
        "samples": len(samples),
        "tokens": sum(len(sample.tokens) for sample in samples),
        "truncated": sum(sample.finish_reason == "length" for sample in samples),
        "versions": dict(versions),
        "replicas": {
            name: {
                "tokens": sum(one.tokens for one in parts),
                "seconds": round(max(one.back for one in parts) - parts[0].sent, 4),
            }
            for name, parts in drawn.items()
        },
        **tally([judgement for group in groups for judgement in group.judgements]),
    }


def _by_source(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return what the rule and the reward model say alone, before their scales, where there is a model."""
    if not groups[0].model_scores:
        return {}
    sources = {"rule": (group.rule_rewards for group in groups), "model": (group.model_scores for group in groups)}
    return {f"reward_{name}": round(mean_of(values), 6) for name, values in sources.items()}


def _task_seconds(rows: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, dict[str, float]]:
    """Return predicted and measured (median over steps) seconds of each task, the weight sync and the iteration."""
    predicted = {**plan.predicted.tasks, ITERATION: plan.predicted.iteration_seconds}
    measured = {task: statistics.median(row["seconds"].get(task, 0.0) for row in rows) for task in predicted}
    return {
        task: {"predicted_seconds": round(predicted[task], 4), "measured_seconds": round(measured[task], 4)}
        for task in predicted
    }


def generation_seconds(groups: Sequence[PromptGroup], since: float) -> tuple[float, float]:
    """Return how long a batch was generated: beyond `since`, and in all.

    That is from its first prompt sent to its last sample back. In asynchronous mode the batches before it, whose last
    sample was back at `since`, were under way at the same time: what it took beyond them is what batches take one after
    the other, as `predicted` says it, and in synchronous mode both are the same.
    """
    first, last = min(group.sent for group in groups), max(group.back for group in groups)
    return max(0.0, last - max(first, since)), last - first


def gpu_hours(held: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Return the device-hours of each site whose jobs hold so many devices, used or not."""
    return {site: round(count * seconds / 3600, 4) for site, count in held.items()}
