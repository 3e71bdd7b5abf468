"""The commands of "All of it together" in docs/guides/own-conversations.md, done."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.stack.models import NemotronH

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs/guides/own-conversations.md"
# What the page says for real data, and for a test.
SHORTER = {"train.train_iters=200": "3", "scheduler.lr_warmup_iters=10": "1", "scheduler.lr_wsd_decay_iters=50": "1"}


def commands() -> list[str]:
    """The commands of the page, as they stand there but for the number of steps."""
    block = PAGE.read_text(encoding="utf-8").split("All of it together")[1].split("```bash\n")[1].split("```")[0]
    for words, value in SHORTER.items():
        assert words in block
        block = block.replace(words, f"{words.partition('=')[0]}={value}")
    return block.splitlines()


@pytest.mark.slow
def test_on_from_a_model_with_chats_whose_last_answers_and_hard_ones_count(
    tmp_path: Path, small_model: Callable[..., NemotronH]
) -> None:
    chats = [
        {
            "conversations": [
                {"from": "system", "value": "You know all plots."},
                *(
                    {"from": role, "value": f"{text} {number} of plot {plot}."}
                    for number in range(2)
                    for role, text in (("human", "Question"), ("gpt", "Early" if number == 0 else "Final"))
                ),
            ],
            "difficulty": "hard" if plot % 3 == 0 else "easy",
        }
        for plot in range(60)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats, indent=1))
    quiz = [
        {"question": "Who?", "answer": "Ada"},
        {"question": "Where?", "answer": "Turin", "match": "contains"},
        {"question": "Which?", "choices": ["a rake", "a hoe"], "answer": "B"},
    ]
    (tmp_path / "quiz.jsonl").write_text("\n".join(map(json.dumps, quiz)))
    small_model("M*E", 0, vocab_size=400).save_pretrained(tmp_path / "my-model")
    tokenizer = train_tokenizer([json.dumps(chat) for chat in chats], 400)
    save_tokenizer(tokenizer, tmp_path / "my-model", model_max_length=512, template="nano3")

    environment = {key: value for key, value in os.environ.items() if not key.startswith("RUNSPEC_")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from nemotron.cli.main import main; main()"]
    for command in commands():
        words = [*program, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    registry = Registry(tmp_path / "output" / "artifacts")
    own, copy = (
        folder / "tokenizer.json" for folder in (tmp_path / "my-model", registry.resolve("my-chats").path / "tokenizer")
    )
    assert copy.read_bytes() == own.read_bytes()
    trained: dict[int, tuple[str, set[float]]] = {}
    for file in registry.resolve("my-chats").path.rglob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            ids, mask, starts = row["input_ids"], row["loss_mask"], [*row["seq_start_id"], len(row["input_ids"])]
            for start, end in pairwise(starts):
                answer = [ids[i + 1] for i in range(start, end - 1) if mask[i]]  # the mask is aligned to labels
                text = Tokenizer.from_file(str(tmp_path / "my-model/tokenizer.json")).decode(answer)
                trained[int(text.split()[-1].rstrip("."))] = text, set(mask[start:end]) - {0.0}
    assert trained == {plot: (f"Final 1 of plot {plot}.", {2.0 if plot % 3 == 0 else 1.0}) for plot in range(60)}
    tuned = registry.resolve("my-tuned-model").record
    assert tuned["inputs"]["model"].startswith("my-model:1@") and tuned["inputs"]["data"].startswith("my-chats:1@")
    results = json.loads((registry.resolve("nano3-eval-results-own").path / "results.json").read_text())
    assert list(results["comparisons"]) == ["my-tuned-model - my-model"]
    assert results["tasks"]["my-tuned-model"]["families"]["questions/quiz"]["tasks"] == 3
    prompts = {entry["prompt"] for entry in results["generations"]}
    assert "Which?\nA) a rake\nB) a hoe" in prompts
