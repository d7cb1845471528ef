"""What was sampled, as text: a few samples of every step for the run's page, all of them where they are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetrl.describe.experiment import RolloutFiles
from hetrl.files import append_line, replace_text
from hetrl.runtime.rl.sampling import PromptGroup

SAMPLES, ROLLOUTS = "samples.jsonl", "rollouts"
SHOWN_CHARACTERS = 2000  # of a text in samples.jsonl, which travels to the launcher: its end, where answers stand


class SampleFiles:
    """Writes samples.jsonl and rollouts/ into the controller's directory; `decode` turns tokens into text."""

    def __init__(self, directory: Path, settings: RolloutFiles, decode: Callable[[list[int]], str]) -> None:
        self._directory, self._settings, self._decode = directory, settings, decode
        if settings.kept:
            (directory / ROLLOUTS).mkdir(exist_ok=True)

    def write(self, step: int, groups: Sequence[PromptGroup]) -> None:
        """Write the samples of a step, of as many prompts as are shown, and of all where they are kept."""
        every = max(1, len(groups) // max(1, self._settings.shown))
        for group in groups[::every][: self._settings.shown]:
            row = self._row(step, group, 0)
            cut = {name: row[name][-SHOWN_CHARACTERS:] for name in ("prompt", "response")}
            append_line(self._directory / SAMPLES, {**row, **cut})
        if self._settings.kept:
            rows = (self._row(step, group, number) for group in groups for number in range(len(group.samples)))
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            replace_text(self._directory / ROLLOUTS / f"step-{step:08d}.jsonl", lines)

    def _row(self, step: int, group: PromptGroup, number: int) -> dict[str, Any]:
        """Return one sample; `reward` is what is trained on, the others are what each source says alone."""
        sample = group.samples[number]
        sources = {"reward_rule": group.rule_rewards, "reward_model": group.model_scores}
        return {
            "step": step,
            "prompt": self._decode([*group.prompt_tokens]),
            "response": self._decode([*sample.tokens]),
            "answer": group.prompt.answer,
            "reward": group.rewards[number],
            **{name: values[number] for name, values in sources.items() if values},
            "tokens": len(sample.tokens),
            "finish_reason": sample.finish_reason,
            "versions": [span.version for span in sample.versions],
            "replicas": [one.replica for one in group.stretches[number]],
        }
