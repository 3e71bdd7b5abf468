"""`nemotron bench research`: the score is what it says, the budget holds, the leaderboard is what its runs say."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, normalizers

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources import stdlib
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.recipes.tools import bench_research, bench_research_entry
from nemotron.recipes.tools.bench_research import (
    Options,
    Row,
    Text,
    bits_per_byte,
    check,
    judge,
    main,
    read_leaderboard,
    read_text,
    row_of,
    run_entry,
    write_row,
)
from nemotron.stack.models import NemotronH

ROOT = Path(__file__).resolve().parents[4]
RESEARCH = ROOT / "examples/research"
DOCUMENTS = ["def f(x):\n    return x\n", "naïve = 1\n"]
TEXT = Text(DOCUMENTS, DOCUMENTS, "0")
ENTRY = "def train(task):\n    raise SystemExit(3)\n"


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    """A tokenizer without merges: a token is a byte."""
    return train_tokenizer(DOCUMENTS, 16 + 256)


@pytest.fixture(scope="module")
def uniform(small_model: Callable[..., NemotronH]) -> NemotronH:
    """A model that finds all 272 tokens equally likely."""
    model = small_model("M*", vocab_size=272)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def test_a_uniform_model_needs_the_bits_of_its_vocabulary(uniform: NemotronH, of_bytes: Tokenizer) -> None:
    num_bytes = sum(len(document.encode()) for document in DOCUMENTS)
    tokens = num_bytes + len(DOCUMENTS)  # an end is predicted behind each
    for seq_len in (4, 64):
        score = bits_per_byte(uniform, of_bytes, seq_len, DOCUMENTS)
        assert score == pytest.approx(tokens * math.log2(272) / num_bytes, rel=1e-6)


def test_a_tokenizer_cannot_leave_anything_out(uniform: NemotronH, of_bytes: Tokenizer) -> None:
    lossy = Tokenizer.from_str(of_bytes.to_str())
    lossy.normalizer = normalizers.Replace("x", "")
    with pytest.raises(ValueError, match="does not give the text back"):
        bits_per_byte(uniform, lossy, 16, DOCUMENTS)
    with pytest.raises(ValueError, match="windows of 2 to"):
        bits_per_byte(uniform, of_bytes, 100_000, DOCUMENTS)
    of_bytes = Tokenizer.from_str(of_bytes.to_str())
    of_bytes.add_tokens(["def f"])
    with pytest.raises(ValueError, match="its tokenizer has 273 tokens, its model 272"):
        bits_per_byte(uniform, of_bytes, 16, DOCUMENTS)


def test_a_score_that_is_no_number_is_refused(small_model: Callable[..., NemotronH], of_bytes: Tokenizer) -> None:
    model = small_model("M", vocab_size=272)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(ValueError, match="its score is nan"):
        bits_per_byte(model, of_bytes, 16, DOCUMENTS)


def test_no_held_out_module_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [file for file in stdlib.module_files() if file.top in ("asyncio", "heapq", "json")]
    monkeypatch.setattr(stdlib, "module_files", lambda: few)
    text = read_text()
    assert len(text.digest) == 16 and sum(map(len, text.train)) > 10 * sum(map(len, text.held_out))
    assert not any("def nlargest(" in document for document in text.train)
    assert any("def nlargest(" in document for document in text.held_out)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`process(code)`: an entry whose process runs this code in place of the one that trains."""

    def make(code: str) -> Path:
        (tmp_path / "process.py").write_text(code)
        (tmp_path / "entry.py").write_text(ENTRY)
        monkeypatch.setattr(bench_research_entry, "__file__", str(tmp_path / "process.py"))
        return tmp_path / "entry.py"

    return make


BURN = "import time\nwhile time.process_time() < 0.4: pass\n"


@pytest.mark.parametrize("burns", ["itself", "a child", "a thread"])
def test_all_that_an_entry_computes_counts(process: Callable[[str], Path], burns: str) -> None:
    code = {
        "itself": BURN,
        "a child": f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n",
        "a thread": f"import threading\nthread = threading.Thread(target=exec, args=({BURN!r}, {{}}))\n"
        "thread.start()\nthread.join()\n",
    }
    with pytest.raises(RunFailed, match=r"took 0\.\d s of processor time, allowed are 0\.3"):
        run_entry(process(code[burns]), 1, 0.3, TEXT)


@pytest.mark.slow
def test_what_does_not_end_is_cut(process: Callable[[str], Path]) -> None:
    with pytest.raises(RunFailed, match=r"took .* s of processor time, allowed are 0\.1"):
        run_entry(process("while True: pass\n"), 1, 0.1, TEXT)


def test_an_entry_that_fails_or_writes_nothing_is_an_error(process: Callable[[str], Path]) -> None:
    with pytest.raises(RunFailed, match=r"failed after .* s \(exit code 3\)"):
        run_entry(process("raise SystemExit(3)"), 1, 5, TEXT)
    with pytest.raises(RunFailed, match="what it wrote cannot be scored"):
        run_entry(process(""), 1, 5, TEXT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no entry"),
        ("def train(task:\n", "is not Python"),
        ("def training(task): ...\n", r"has no function train\(task\)"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "entry.py").write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        main(Options(str(tmp_path / "entry.py"), seed=1, seeds=1, budget=5, record=None, check=False))
    assert refused.value.exit_code == 2


# -------------------------------------------------------------------------------------------------- leaderboard


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record": "x", "seeds": 3}, r"leaderboard\.csv is of p, torch 2 and text 0: scores from here do not compare"),
        ({"record": "x"}, "at least 3 seeds"),
        ({"check": True, "budget": 60}, "--seeds alone"),
    ],
)
def test_what_would_not_count_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(bench_research, "read_text", lambda: TEXT)
    (tmp_path / "entry.py").write_text(ENTRY)
    write_row(line("entry.py", [2.0, 2.1]), tmp_path)
    options = Options(str(tmp_path / "entry.py"), seed=1, seeds=1, budget=300, record=None, check=False)
    with pytest.raises(UserError, match=message):
        main(replace(options, **changes))


def line(entry: str, scores: list[float], **changes: Any) -> Row:
    run = {"entry": entry, "tokens": 10, "sha256": "", "text": "0", "processor": "p", "python": "3", "torch": "2"}
    return replace(row_of([run | {"bits_per_byte": score, "seed": i} for i, score in enumerate(scores)], ""), **changes)


def test_an_improvement_is_two_standard_errors() -> None:
    rows = [line("a.py", [1.99, 2.01] * 8)]
    sd = math.sqrt(16 * 0.01**2 / 15)
    assert rows[0].sd == pytest.approx(sd, abs=1e-5)
    needed = 2 * sd * math.sqrt(1 / 16 + 1 / 4)  # 0.01155
    assert judge(line("b.py", [1.98] * 4), rows)["needed"] == pytest.approx(needed, abs=1e-4)
    assert judge(line("b.py", [1.988] * 4), rows)["improves"]
    assert not judge(line("b.py", [1.989] * 4), rows)["improves"]
    assert not judge(line("b.py", [1.5] * 2), rows)["improves"]  # too few seeds
    for other in ({"processor": "q"}, {"text": "1"}, {"torch": "3"}):
        assert judge(line("b.py", [1.5] * 4, **other), rows) == {}
    # The record is the best line; the noise is that of the first.
    rows.append(line("b.py", [1.9] * 4))
    assert not judge(line("c.py", [1.98] * 4), rows)["improves"]


def test_a_leaderboard_is_written_as_it_is_read(tmp_path: Path) -> None:
    rows = [line("a.py", [2.0, 2.1]), line("b.py", [1.9, 1.8, 1.7], changed='more, and "better"')]
    for row in rows:
        write_row(row, tmp_path)
    assert read_leaderboard(tmp_path) == rows
    with (tmp_path / "leaderboard.csv").open("a") as file:
        file.write("c.py,no numbers\n")
    with pytest.raises(UserError, match="line 4"):
        read_leaderboard(tmp_path)


@pytest.mark.parametrize(
    ("processor", "scores", "confirmed"),
    [
        ("p", {"a.py": 2.005, "b.py": 1.895}, [True, True]),
        ("p", {"a.py": 2.040, "b.py": 1.900}, [False, True]),  # 3 x 0.0105 x sqrt(1 + 1/10) = 0.033
        ("q", {"a.py": 1.500, "b.py": 1.400}, [True, True]),  # a faster one: only the order counts, not the first line
        ("q", {"a.py": 1.500, "b.py": 1.510}, [True, True]),  # within noise: 3 x 0.0105 x sqrt(1 + 1) = 0.045
        ("q", {"a.py": 1.500, "b.py": 1.550}, [True, False]),
        ("p", {"b.py": 1.900}, [False, True]),  # the first fails
        ("q", {"b.py": 1.900}, [False, True]),
    ],
)
def test_a_check_runs_all_lines_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    processor: str, scores: dict[str, float], confirmed: list[bool],
) -> None:  # fmt: skip
    for name, of_line in (("a.py", [1.99, 2.01] * 5), ("b.py", [1.9] * 3)):
        (tmp_path / name).write_text(ENTRY)
        write_row(line(name, of_line, sha256=bench_research.check_entry(tmp_path / name)), tmp_path)
    ran = []

    def run(entry: Path, seed: int, budget: float, text: Text) -> dict[str, Any]:
        ran.append((entry.name, seed, budget))
        if entry.name not in scores:
            raise RunFailed(f"{entry.name} took 301 s of processor time, allowed are 300")
        return {"bits_per_byte": scores[entry.name]}

    monkeypatch.setattr(bench_research, "run_entry", run)
    monkeypatch.setattr(bench_research, "read_text", lambda: TEXT)
    monkeypatch.setattr(
        bench_research, "machine", lambda text: {"text": text.digest, "processor": processor, "torch": "2"}
    )
    found = check(tmp_path, 1)
    assert [each["confirmed"] for each in found["lines"]] == confirmed
    assert ran == [("a.py", 0, 300), ("b.py", 0, 300)]
    options = Options(str(tmp_path / "a.py"), seed=1, seeds=1, budget=300, record=None, check=True)
    with nullcontext() if all(confirmed) else pytest.raises(RunFailed, match="not every line is confirmed"):
        main(options)
    assert json.loads(capsys.readouterr().out)["confirmed"] == all(confirmed)
    (tmp_path / "b.py").write_text(ENTRY + "# another\n")
    with pytest.raises(UserError, match=r"b\.py is not the file that was scored"):
        check(tmp_path, 1)


def test_the_leaderboard_is_what_its_scores_say() -> None:
    rows = read_leaderboard(RESEARCH)
    assert rows[0].entry == "baseline.py" and len(rows[0].scores) >= 10
    assert {row.entry for row in rows} == {path.name for path in RESEARCH.glob("*.py")}
    guide = (ROOT / "docs/guides/research.md").read_text(encoding="utf-8")
    for before, row in zip([None, *rows[:-1]], rows, strict=True):
        shown = f"{row.bits_per_byte:.4f} | {len(row.seeds)} | {row.tokens / 1e6:.2f} M | {row.changed} |"
        assert f"[{row.entry}](../../examples/research/{row.entry}) | {shown}" in guide
        assert bench_research.check_entry(RESEARCH / row.entry) == row.sha256, row.entry
        assert len(row.seeds) == len(row.scores) == len(set(row.seeds)) >= 3
        assert row.bits_per_byte == pytest.approx(statistics.fmean(row.scores), abs=1e-5)
        assert row.sd == pytest.approx(statistics.stdev(row.scores), abs=1e-5)
        if before is not None:
            error = rows[0].sd * math.sqrt(1 / len(row.scores) + 1 / len(before.scores))
            assert before.bits_per_byte - row.bits_per_byte > 2 * error, row.entry


@pytest.mark.slow
@pytest.mark.e2e
def test_the_command_trains_and_scores_the_baseline() -> None:
    words = [sys.executable, "-m", "nemotron", "bench", "research", "--budget", "30", "--seed", "3"]
    result = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["seed"] == 3 and found["steps"] > 10 and found["tokens"] == 1024 * found["steps"]
    assert 20 < found["seconds"] <= 30
    # Better than the entropy of its tokens' frequencies, worse than a whole training.
    assert 1.7 < found["bits_per_byte"] < 5
