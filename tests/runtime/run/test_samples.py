"""What is written of the samples of a step."""

from __future__ import annotations

import json
from pathlib import Path

from hetrl.describe.experiment import RolloutFiles
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.rl.stretches import Stretch
from hetrl.runtime.run.samples import SHOWN_CHARACTERS, SampleFiles


def groups(number: int, tokens: int = 2, scores: tuple[float, ...] = ()) -> list[PromptGroup]:
    spans = (wire.VersionSpan(version=3, start=0, end=tokens),)
    drawn = wire.Sample(tokens=(7,) * tokens, logprobs=(0.0,) * tokens, versions=spans, finish_reason="stop")
    return [
        PromptGroup(
            Prompt("", f"answer {prompt}"),
            (prompt,),
            (drawn, drawn),
            (0.5, 1.5),
            rule_rewards=(0.0, 1.0),
            model_scores=scores,
            stretches=((Stretch("a/actor_generation/0", tokens, 0.0, 1.0),),) * 2,
        )
        for prompt in range(number)
    ]


def text(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_some_prompts_of_every_step_are_shown_with_their_rewards(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, RolloutFiles(shown=3), text)
    for step in (1, 2):
        files.write(step, groups(10, scores=(0.25, 0.75)))
    shown = rows(tmp_path / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in shown] == [(step, p) for step in (1, 2) for p in ("0", "3", "6")]
    assert shown[1] == {
        "step": 1,
        "prompt": "3",
        "response": "7 7",
        "answer": "answer 3",
        "reward": 0.5,
        "reward_rule": 0.0,
        "reward_model": 0.25,
        "tokens": 2,
        "finish_reason": "stop",
        "versions": [3],
        "replicas": ["a/actor_generation/0"],
    }
    assert not (tmp_path / "rollouts").exists()


def test_of_long_texts_the_end_travels_and_all_is_kept(tmp_path: Path) -> None:
    SampleFiles(tmp_path, RolloutFiles(shown=1, kept=True), text).write(4, groups(3, tokens=SHOWN_CHARACTERS))
    (shown,) = rows(tmp_path / "samples.jsonl")
    kept = rows(tmp_path / "rollouts" / "step-00000004.jsonl")
    assert len(kept) == 6 and "reward_model" not in kept[0]
    assert len(str(shown["response"])) == SHOWN_CHARACTERS < len(str(kept[0]["response"]))
    assert str(kept[0]["response"]).endswith(str(shown["response"]))
    assert [row["reward"] for row in kept] == [0.5, 1.5] * 3


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path: Path) -> None:
    SampleFiles(tmp_path, RolloutFiles(shown=0), text).write(1, groups(2))
    assert not [*tmp_path.iterdir()]


def test_fewer_prompts_than_are_shown(tmp_path: Path) -> None:
    SampleFiles(tmp_path, RolloutFiles(shown=4), text).write(1, groups(2))
    assert [row["prompt"] for row in rows(tmp_path / "samples.jsonl")] == ["0", "1"]
