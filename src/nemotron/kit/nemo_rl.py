"""What goes to NeMo-RL and comes back: values of a config, files of prompts and pairs, folders of checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nemo_runspec.errors import UserError
from nemotron.kit.artifact import Preferences, RLPrompts
from nemotron.kit.megatron import METADATA_FILE

# Keys that the library wants left out where there is no value: it takes null for none of them.
_ABSENT_WITHOUT_VALUE = ("pretrained_checkpoint", "effort_levels")
_GYM_KEYS = ("responses_create_params", "agent_ref")
PAIRS_FILES = ("train.jsonl", "valid.jsonl")


@dataclass(frozen=True)
class Step:
    """A checkpoint as NeMo-RL saves it: `step_N`, in which Megatron has the weights."""

    number: int
    weights: Path


def master_values(cfg: BaseModel, folder: Path) -> dict[str, Any]:
    """What a `MasterConfig` is made of: every group of a config but `run`; checkpoints and logs go to `folder`."""
    values = _given(cfg.model_dump(mode="json", exclude={"run"}))
    values["checkpointing"]["checkpoint_dir"] = str(folder / "checkpoints")
    values["logger"]["log_dir"] = str(folder / "logs")
    return values


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _given(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if not (key in _ABSENT_WITHOUT_VALUE and value is None)
    }


def last_step(folder: Path) -> Step | None:
    """The newest whole `step_N` below a run's folder of checkpoints; None where there is none.

    NeMo-RL renames a folder to that when it has written all of it; Megatron's own number in it is always 0.
    """
    steps = []
    for file in folder.glob(f"step_*/policy/weights/iter_*/{METADATA_FILE}"):
        number = file.relative_to(folder).parts[0].removeprefix("step_")
        if number.isdecimal():
            steps.append(Step(int(number), file.parent))
    return max(steps, key=lambda step: step.number, default=None)


def check_gym_prompts(prompts: RLPrompts) -> None:
    """UserError where prompts are no records of NeMo Gym; the first one of each file is looked at."""
    for path in (prompts.train_path, prompts.valid_path):
        if path is None:
            raise UserError(f"{prompts.ref} has no prompts to validate on", "NeMo-RL reads both files")
        with path.open(encoding="utf-8") as lines:
            first = next(lines, "{}")
        try:
            record = json.loads(first)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}:1: no JSON: {error}", "NeMo-RL reads a record of NeMo Gym from each line"
            ) from None
        missing = [key for key in _GYM_KEYS if key not in record]
        if missing:
            raise UserError(
                f"{path}: no records of NeMo Gym: {' and '.join(missing)} missing",
                "nemotron nano3 data prep rl -c published makes them, and nemotron env records FAMILY",
            )


def write_pairs(preferences: Preferences, folder: Path) -> None:
    """Pairs as NeMo-RL's `PreferenceDataset` reads them: train.jsonl and valid.jsonl in `folder`.

    Raises:
        UserError: a split is missing; a prompt declares tools, which the library would not show to the model.
    """
    folder.mkdir(exist_ok=True)
    for path, name in zip((preferences.train_path, preferences.valid_path), PAIRS_FILES, strict=True):
        if path is None:
            raise UserError(f"{preferences.ref} has no pairs to validate on", "NeMo-RL reads both files")
        with path.open(encoding="utf-8") as pairs, (folder / name).open("w", encoding="utf-8", newline="\n") as out:
            for number, pair in enumerate(map(json.loads, pairs), 1):
                if pair.get("tools"):
                    raise UserError(
                        f"{path}:{number}: the prompt declares tools, and NeMo-RL's preference data has none",
                        "train with the embedded stack, or leave such pairs out",
                    )
                completions = [
                    {"rank": rank, "completion": pair[which]} for rank, which in enumerate(("chosen", "rejected"))
                ]
                out.write(
                    json.dumps({"context": pair["prompt"], "completions": completions}, ensure_ascii=False) + "\n"
                )
