"""The process in which an entry of `nemotron bench research` trains; what an entry is given, and what it returns.

An entry is a Python file with a function `train(task: Task) -> Trained`. `bench_research.py` starts this script for it,
with a limit of processor time, and reads nothing of it but the folder that is written here: a model and a tokenizer.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, run_main
from nemotron.stack.models import NemotronH

MODEL, FACTS, DOCUMENTS = "model", "facts.json", "documents.json"  # in the folder that both processes share


@dataclass
class Task:
    """What an entry is given. documents: the training text; budget: seconds of processor time for the whole process,
    from its start to its end: imports, tokenizer and writing the model count, and so do further threads and processes.
    """

    documents: list[str]
    seed: int
    budget: float
    _shown: int = 0

    def used(self) -> float:
        """Seconds of the budget that are gone, those of child processes that have ended included."""
        return sum(os.times()[:4])

    def show(self, step: int, loss: float) -> None:
        """A line on stderr for each tenth of the budget; call it as often as you like."""
        tenth = int(10 * self.used() / self.budget)
        if tenth > self._shown:
            self._shown = tenth
            print(f"{self.used():.0f} of {self.budget:g} s, step {step}: loss {loss:.3f}", file=sys.stderr)


@dataclass
class Trained:
    """What an entry returns. seq_len: tokens of a window in which the model is scored; steps, tokens: of training."""

    model: NemotronH
    tokenizer: Tokenizer
    seq_len: int
    steps: int
    tokens: int


def main() -> None:
    """Train the entry, write its model."""
    entry, folder, seed, budget = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("entry", entry)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task = Task(json.loads((folder / DOCUMENTS).read_text("utf-8")), seed, budget)
    trained: Trained = module.train(task)
    if not isinstance(trained.model, NemotronH):
        raise UserError(f"{entry}: train() returned a model of {type(trained.model).__name__}", "NemotronH expected")
    trained.model.save_pretrained(folder / MODEL)
    trained.tokenizer.save(str(folder / MODEL / "tokenizer.json"))
    facts = {name: int(getattr(trained, name)) for name in ("seq_len", "steps", "tokens")}
    (folder / FACTS).write_text(json.dumps(facts), "utf-8")


if __name__ == "__main__":
    code = run_main(main)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take the interpreter apart takes up to two seconds of the budget
