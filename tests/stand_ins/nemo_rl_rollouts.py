"""What NeMo-RL does with prompts and with rollouts, as its sources have it (`tests/contracts/nemo_rl_schema.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "contracts/nemo_rl_schema.json"
READ: dict[str, list[str]] = json.loads(RECORD.read_text(encoding="utf-8"))["rollouts"]


def as_nemo_rl_reads(path: Path, max_new_tokens: int, temperature: float = 1.0) -> list[dict[str, Any]]:
    """NemoGymDataset and its processor: a row is a line; the rollout adds how responses are drawn."""
    assert READ["datum_dict"] == ["extra_env_info", "task_name"]  # the line, and a name made of the file's
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row["responses_create_params"] |= {
            "temperature": temperature, "top_p": 1.0, "max_output_tokens": max_new_tokens
        }  # fmt: skip
        row["_rowidx"] = number
    return rows


def message_log(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What NeMo-RL makes of a result: prompt and response tokens, which have to follow one another without a gap."""
    log: list[dict[str, Any]] = []
    seen: list[int] = []
    for item in result["response"]["output"]:
        if "generation_token_ids" not in item:
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        assert prompt[: len(seen)] == seen
        log.append({"role": "user", "token_ids": prompt[len(seen) :]})
        log.append({"role": "assistant", "token_ids": generated, "generation_logprobs": item["generation_log_probs"]})
        seen = prompt + generated
    return log
