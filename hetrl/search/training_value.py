"""Seconds and memory of a training laid out in columns: `hetrl.cost.training` and `.memory`, summed up by classes.

Each formula's source stands at its function in `hetrl.cost`; here they are put together from `TrainingTables` for
columns instead of single replicas. `tests/test_search_value.py` holds both against each other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hetrl.search.columns import Columns, lay_out, share_samples, split_layers
from hetrl.search.encoding import IDLE, MICRO_BATCH, OFFLOAD, PIPELINE, RECOMPUTE, SHARDING, TENSOR
from hetrl.search.jit import njit
from hetrl.search.parts import Parts, add_bytes, clear_task, hold, uses
from hetrl.search.reduction_value import reduction_seconds
from hetrl.search.tables import Tables


@njit
def value_training(
    task: int, devices: Any, order: Any, choice: Any, tables: Tables, columns: Columns, parts: Parts
) -> int:
    """Fill a training's parts, alone on its links; return its number of columns, 0 where it does not fit."""
    clear_task(task, parts)
    found = lay_out(task, devices, order, choice, tables, columns)
    if found == 0:
        return 0
    _stage_limits(task, found, choice, tables, columns)
    if not split_layers(choice[PIPELINE], tables.layers[task], columns):
        return 0
    _hold_memory(task, found, choice, tables, columns, parts)
    _share(task, found, choice, tables, columns)
    _add_activations(task, found, choice, tables, columns, parts)
    if task == tables.trainer:
        _first_replica(task, choice, tables, columns, parts)
    parts.seconds[task] = training_seconds(task, found, choice, tables, columns, parts, task, True)
    return found


@njit
def training_seconds(
    task: int, found: int, choice: Any, tables: Tables, columns: Columns, parts: Parts, other: int, fresh: bool
) -> float:
    """Return the seconds of a laid-out training beside `other`, which uses its directions too (itself: alone).

    `fresh`: the bytes of its reduction are added to its parts.
    """
    numbers = tables.training
    replicas = columns.replicas[:found].sum()
    slowest = 0.0
    unit = _unit(replicas, choice, tables)
    for q in range(found):
        for more in range(2):  # replicas with a unit more come first
            first, end = (0, columns.extra[q]) if more else (columns.extra[q], columns.replicas[q])
            if first < end:
                share = (columns.samples[q] + more * unit) / numbers.minibatches
                seconds = _slowest_instance(task, q, first, end, share, found, choice, tables, columns, parts, other)
                behind = numbers.largest[replicas] * numbers.variation / math.sqrt(share)
                slowest = max(slowest, seconds * (1 + behind))
    reduction = reduction_seconds(task, found, choice, tables, columns, parts, other, fresh)
    shards = replicas if choice[SHARDING] else 1
    update = 0.0
    for i in range(choice[PIPELINE]):
        parameters = stage_parameters(task, i, choice, tables, float(columns.layers[i]))
        for q in range(found):
            constant, per_parameter = numbers.update[columns.kind[q, i]]
            update = max(update, constant + per_parameter * parameters / shards)
    return numbers.steps * (slowest + reduction + update)


@njit
def stage_parameters(task: int, i: int, choice: Any, tables: Tables, layers: float) -> float:
    """Return the parameters of one rank of a stage."""
    first, last = int(i == 0), int(i == choice[PIPELINE] - 1)
    constant, per_layer = tables.training.parameters[task, choice[TENSOR], first, last]
    return float(constant + per_layer * layers)


@njit
def _held_bytes(task: int, i: int, replicas: int, choice: Any, tables: Tables, layers: float) -> tuple[float, float]:
    """Return the bytes of weights, gradients and optimiser, and of activations, of one rank of a stage."""
    numbers = tables.training
    in_flight, last = choice[PIPELINE] - i, int(i == choice[PIPELINE] - 1)
    shards = replicas if choice[SHARDING] else 1
    state = numbers.state_bytes[0] + numbers.state_bytes[1] / shards
    active = numbers.active[task, choice[TENSOR], choice[RECOMPUTE], last]
    kept = active[0] + active[1] * layers + active[2] * in_flight + active[3] * layers * in_flight
    tokens = numbers.micro_batches[choice[MICRO_BATCH]] * numbers.max_tokens
    return state * stage_parameters(task, i, choice, tables, layers), tokens * kept


@njit
def _stage_limits(task: int, found: int, choice: Any, tables: Tables, columns: Columns) -> None:
    """Set for each stage the most layers that its smallest device holds, and the seconds of its slowest one."""
    numbers = tables.training
    replicas = columns.replicas[:found].sum()
    tokens = numbers.micro_batches[choice[MICRO_BATCH]] * numbers.mean_tokens
    kinds, coefficients, usable_gb = columns.kind, numbers.both[task], tables.usable_gb
    for i in range(choice[PIPELINE]):
        usable, layer, beside, last = np.inf, 0.0, 0.0, int(i == choice[PIPELINE] - 1)
        for q in range(found):
            kind = kinds[q, i]
            both = coefficients[kind, choice[TENSOR], choice[RECOMPUTE], last]
            layer = max(layer, both[1] + both[3] * tokens)
            beside = max(beside, both[0] + both[2] * tokens)
            usable = min(usable, usable_gb[kind])
        columns.layer[i], columns.beside[i] = layer, beside
        none, one = (
            _held_bytes(task, i, replicas, choice, tables, 0.0),
            _held_bytes(task, i, replicas, choice, tables, 1.0),
        )
        columns.capacity[i] = math.floor((usable * 1e9 - none[0] - none[1]) / (one[0] + one[1] - none[0] - none[1]))


@njit
def _hold_memory(task: int, found: int, choice: Any, tables: Tables, columns: Columns, parts: Parts) -> None:
    numbers = tables.training
    replicas = columns.replicas[:found].sum()
    shards = replicas if choice[SHARDING] else 1
    for i in range(choice[PIPELINE]):
        state, active = _held_bytes(task, i, replicas, choice, tables, float(columns.layers[i]))
        peak, resident, host = (state + active) / 1e9, state / 1e9, 0.0
        if choice[IDLE] == OFFLOAD:  # gradients are dropped
            parameters = stage_parameters(task, i, choice, tables, float(columns.layers[i]))
            resident, host = 0.0, parameters * (numbers.weight_bytes + numbers.state_bytes[1] / shards) / 1e9
        for q in range(found):
            kind = columns.kind[q, i]
            hold(task, kind, resident, peak, host, parts)
            parts.runs[task, kind] += columns.replicas[q]
            switch = 2 * host * 1e9 * tables.host_byte[kind]
            parts.switch_seconds[task] = max(parts.switch_seconds[task], switch)


@njit
def _unit(replicas: int, choice: Any, tables: Tables) -> int:
    """Return the samples that are shared out at once: whole micro-batches of every minibatch if possible."""
    numbers = tables.training
    micro_batch = numbers.micro_batches[choice[MICRO_BATCH]]
    unit = micro_batch * numbers.minibatches
    return int(unit if numbers.samples % unit == 0 and numbers.samples // unit >= replicas else micro_batch)


@njit
def _share(task: int, found: int, choice: Any, tables: Tables, columns: Columns) -> None:
    """Share the samples out by the time of a full micro-batch on each column, alone on its links."""
    numbers = tables.training
    micro_batch, stages = numbers.micro_batches[choice[MICRO_BATCH]], choice[PIPELINE]
    unit = _unit(columns.replicas[:found].sum(), choice, tables)
    variation = numbers.variation / math.sqrt(micro_batch)
    for q in range(found):
        _set_stages(task, q, micro_batch * numbers.mean_tokens, choice, tables, columns)
        for i in range(stages - 1):
            flows = float(_flows(q, i, found, choice, tables, columns))
            columns.hop[i] = _hop_seconds(
                task, q, i, 0, micro_batch * numbers.mean_tokens, flows, choice, tables, columns
            )
        one = _pipeline_seconds(stages, stages, variation, tables, columns)
        two = _pipeline_seconds(stages, stages + 1, variation, tables, columns)
        columns.slope[q] = (two - one) * unit / (micro_batch * numbers.minibatches)
        columns.start[q] = one - stages * (two - one)
    share_samples(found, numbers.samples // unit, unit, columns)


@njit
def _set_stages(task: int, q: int, tokens: float, choice: Any, tables: Tables, columns: Columns) -> None:
    """Set forward plus backward of one micro-batch on each stage of a column."""
    for i in range(choice[PIPELINE]):
        last = int(i == choice[PIPELINE] - 1)
        both = tables.training.both[task, columns.kind[q, i], choice[TENSOR], choice[RECOMPUTE], last]
        layers = columns.layers[i]
        columns.both[i] = both[0] + both[1] * layers + tokens * (both[2] + both[3] * layers)
    columns.hop[choice[PIPELINE] - 1] = 0.0


@njit
def _crosses_node(q: int, i: int, instance: int, choice: Any, tables: Tables, columns: Columns) -> bool:
    """Return whether the hop behind stage i leaves the node, for one replica of a column inside one class."""
    units = tables.per_node[columns.kind[q, i]] >> choice[TENSOR]
    here = columns.offset[q, i] + instance * columns.stride[q, i]
    there = columns.offset[q, i + 1] + instance * columns.stride[q, i + 1]
    return bool(here // units != there // units)


@njit
def _hop_seconds(
    task: int,
    q: int,
    i: int,
    instance: int,
    tokens: float,
    sharing: float,
    choice: Any,
    tables: Tables,
    columns: Columns,
) -> float:
    """Return alpha + bytes / beta from stage i to the next one; `sharing` flows divide a link between sites."""
    kind, following = columns.kind[q, i], columns.kind[q, i + 1]
    moved = tokens * tables.training.hop_bytes[task] * sharing
    network = tables.network
    if kind == following and not _crosses_node(q, i, instance, choice, tables, columns):
        return float(network.node_delay[kind] + moved * network.peer[kind])
    return float(network.delay[kind, following] + moved * network.byte[kind, following])


@njit
def _flows(q: int, i: int, found: int, choice: Any, tables: Tables, columns: Columns) -> int:
    """Count the hops, forward or backward, that use the link behind stage i of column q in one direction."""
    site, kind, replicas = tables.site, columns.kind, columns.replicas
    here, following = site[kind[q, i]], site[kind[q, i + 1]]
    if here == following:
        return 1
    count = 0
    for other in range(found):
        for j in range(choice[PIPELINE] - 1):
            a, b = site[kind[other, j]], site[kind[other, j + 1]]
            if (a == here and b == following) or (a == following and b == here):
                count += replicas[other]
    return count


@njit
def _slowest_instance(
    task: int,
    q: int,
    first: int,
    end: int,
    share: float,
    found: int,
    choice: Any,
    tables: Tables,
    columns: Columns,
    parts: Parts,
    other: int,
) -> float:
    """Return the time of one minibatch on the slowest of the replicas first .. end - 1 of a column.

    Replicas of a column differ in which of their hops leave a node. That repeats with the units of a node.
    """
    micro_batches = math.ceil(share / tables.training.micro_batches[choice[MICRO_BATCH]])
    tokens = share / micro_batches * tables.training.mean_tokens
    stages, variation = choice[PIPELINE], tables.training.variation / math.sqrt(share / micro_batches)
    _set_stages(task, q, tokens, choice, tables, columns)
    inner, repeats = 0, 1
    for i in range(stages - 1):
        kind, following = columns.kind[q, i], columns.kind[q, i + 1]
        if kind == following:
            inner |= 1 << i
            units = tables.per_node[kind] >> choice[TENSOR]
            repeats = repeats * units // math.gcd(repeats, units)
            continue
        sharing = float(_flows(q, i, found, choice, tables, columns))
        direction = tables.site[kind] * tables.sites + tables.site[following]
        if other != task and uses(other, direction, parts):
            sharing *= 2
        columns.hop[i] = _hop_seconds(task, q, i, 0, tokens, sharing, choice, tables, columns)
    slowest, seen = 0.0, -1
    for instance in range(first, min(first + repeats, end)):
        leaving = 0
        for i in range(stages - 1):
            if inner >> i & 1:
                columns.hop[i] = _hop_seconds(task, q, i, instance, tokens, 1.0, choice, tables, columns)
                leaving |= int(_crosses_node(q, i, instance, choice, tables, columns)) << i
        if leaving != seen:
            slowest = max(slowest, _pipeline_seconds(stages, micro_batches, variation, tables, columns))
        seen = leaving
    return slowest


@njit
def _pipeline_seconds(stages: int, micro_batches: int, variation: float, tables: Tables, columns: Columns) -> float:
    """Return the time of so many micro-batches: `hetrl.cost.training.pipeline_seconds`."""
    period, filling, both, hop, largest = 0.0, 0.0, columns.both, columns.hop, tables.training.largest
    for first in range(stages):
        filling += both[first] + 2 * hop[first]
        round_trip = 0.0
        for last in range(first, stages):
            length = min(last - first + 1, micro_batches)
            period = max(period, (round_trip + both[last]) / length)
            round_trip += both[last] + 2 * hop[last]
    if variation > 0 and stages > 1:
        for i in range(stages):
            longer = 1  # stages that take at least as long
            for j in range(stages):
                longer += both[j] > both[i] or (both[j] == both[i] and j < i)
            if longer <= micro_batches:
                period = max(period, both[i] * (1 + largest[longer] * variation))
    return filling + (micro_batches - 1) * period


@njit
def _add_activations(task: int, found: int, choice: Any, tables: Tables, columns: Columns, parts: Parts) -> None:
    """Add what the hops between sites send in an iteration, forward and back."""
    numbers = tables.training
    unit = _unit(columns.replicas[:found].sum(), choice, tables)
    for q in range(found):
        samples = columns.samples[q] * columns.replicas[q] + columns.extra[q] * unit
        moved = numbers.steps * samples / numbers.minibatches * numbers.mean_tokens * numbers.hop_bytes[task]
        for i in range(choice[PIPELINE] - 1):
            a, b = tables.site[columns.kind[q, i]], tables.site[columns.kind[q, i + 1]]
            if a != b:
                add_bytes(task, a * tables.sites + b, moved, parts)
                add_bytes(task, b * tables.sites + a, moved, parts)


@njit
def _first_replica(task: int, choice: Any, tables: Tables, columns: Columns, parts: Parts) -> None:
    """Take note of where the trainer's first replica holds which weights: they are sent from there."""
    parts.stage_kind[:] = -1
    parts.node_bytes[:] = 0.0
    parts.site_bytes[:] = 0.0
    parts.version[:] = 0.0
    for i in range(choice[PIPELINE]):
        kind = columns.kind[0, i]
        parts.stage_kind[i] = kind
        parts.stage_node[i] = columns.offset[0, i] // (tables.per_node[kind] >> choice[TENSOR])
        share = stage_parameters(task, i, choice, tables, float(columns.layers[i])) * tables.training.weight_bytes
        if i > 0 and i == choice[PIPELINE] - 1:  # the copy of a tied embedding is not sent
            share -= tables.training.tied_bytes / (1 << choice[TENSOR])
        parts.version[0] += share * (1 << choice[TENSOR])
        parts.version[1] = max(parts.version[1], share * tables.host_byte[kind])
        same_node, same_site = i, i
        for j in range(i - 1, -1, -1):
            before = parts.stage_kind[j]
            same_node = j if before == kind and parts.stage_node[j] == parts.stage_node[i] else same_node
            same_site = j if tables.site[before] == tables.site[kind] else same_site
        parts.node_bytes[same_node] += share * (1 << choice[TENSOR])
        parts.site_bytes[same_site] += share * (1 << choice[TENSOR])
