"""The data preparations of recipe nano3, run as a user would: payloads, determinism, bad input."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.planning import SourceInput, make_plan
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter
from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, SPECIAL_TOKENS, chat_texts, train_tokenizer
from nemotron.kit.commands import command_hint
from nemotron.kit.schemas.difficulty import Family
from nemotron.recipes.nano3.stage0_pretrain.data_prep import TOKENIZED_BYTES, _conversations
from nemotron.recipes.nano3.stage1_sft import data_prep as sft_data_prep
from nemotron.recipes.nano3.stage1_sft.data_schema import RunConfig, SFTDataConfig, TasksConfig, TextConfig
from nemotron.stack.environments import FAMILIES, generate_tasks, make_difficulty, split_of, verify
from nemotron.stack.rl.prompts import PromptSource

from ..scripts import RECIPES, published, run, start

RECIPE = RECIPES / "nano3"
PRETRAIN = "stage0_pretrain"
# Small and quick: no standard library, few tasks, a small vocabulary.
QUICK = ("stdlib.enabled=false", "tasks.num_tasks=3000", "tokenizer.vocab_size=400", "curation.evaluation_tasks=20")
FEW = "evaluation_tasks=20"  # to make the prompts of 500 tasks a family takes more than a second


def prepare(
    stage: str | Path, cwd: Path, *overrides: str, cpus: int | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return run(cwd, RECIPE / stage / "data_prep.py", "tiny", *overrides, cpus=cpus, **env)


def outcomes(version: Version, source: str) -> dict[str, int]:
    rows = version.record["metrics"]["curation"]
    return {r["outcome"]: r.get("documents", r.get("conversations")) for r in rows if r["source"] == source}


def corpus(path: Path) -> Path:
    sentence = "the model reads many words about rivers mountains letters and machines every single day of the year"
    words = sentence.split()
    rows = [" ".join(words[(i * k + k) % len(words)] for k in range(1, 60)) + f" {i}" for i in range(80)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in [*rows, rows[0], "short"]))
    return path


@pytest.mark.slow
def test_pretrain_data_from_own_files(tmp_path: Path) -> None:
    file = corpus(tmp_path / "own.jsonl")
    source = f"sources=[{{name: own, paths: [{file}], weight: 0.25, valid_fraction: 0.1}}]"
    first = published(tmp_path, prepare(PRETRAIN, tmp_path, *QUICK, source))
    blend = json.loads((first.path / "blend.json").read_text())
    assert [phase["weights"] for phase in blend["phases"]] == [{"own": 0.25, "tasks": 0.75}] * 2
    assert {path.name for path in first.path.iterdir()} == {
        "blend.json", "tokenizer", "tokens", "tasks.jsonl"
    }  # fmt: skip
    for name, splits in (("own", {"train", "valid"}), ("tasks", {"train"})):
        prefixes = {split: blend["sources"][name][split] for split in splits}
        assert all(prefixes.values())
        files = {f"{prefix}.{end}" for of_split in prefixes.values() for prefix in of_split for end in ("bin", "idx")}
        assert files == {str(path.relative_to(first.path)) for path in (first.path / "tokens" / name).iterdir()}
    counts = outcomes(first, "own")
    assert (counts["read"], counts["exact duplicate"], counts["word_count"]) == (82, 1, 1)
    names = [source["name"] for source in first.record["sources"]]
    assert names == ["task-generators", str(file)]
    # Again, with another salt for Python's own hash, and on one processor, hence in one process: the same bytes.
    second = published(tmp_path, prepare(PRETRAIN, tmp_path, *QUICK, source, cpus=1, PYTHONHASHSEED="7"))
    assert (second.version, second.digest) == (2, first.digest)
    other = published(tmp_path, prepare(PRETRAIN, tmp_path, *QUICK, source, "seed=5"))
    assert other.digest != first.digest


@pytest.mark.parametrize(("stored_bytes", "streams"), [(16 << 20, 16), (50 << 30, 800)])
def test_a_corpus_of_any_size_is_at_most_some_hundreds_of_streams(stored_bytes: int, streams: int) -> None:
    files = [SourceFile(f"{i:05d}.jsonl.zst", stored_bytes // 3200, "1", "jsonl", "zstd") for i in range(3200)]
    plan = make_plan({}, [SourceInput("own", files)], shard_bytes=TOKENIZED_BYTES)
    assert len(plan.shards) == streams


def test_the_tokenizer_learns_the_words_of_chat_and_tools() -> None:
    cfg = load_script_config(RECIPE / PRETRAIN / "data_prep.py", ["--config", "tiny", "tokenizer.conversations=30"])
    conversations = _conversations(cfg, {family: make_difficulty(family) for family in FAMILIES})
    texts = list(chat_texts(conversations, "nano3"))
    assert not any(token in text for text in texts for token in SPECIAL_TOKENS)
    tokenizer = train_tokenizer(texts, 1000)
    call = "<function=email_delete_email>\n<parameter=email_id>\n"
    assert tokenizer.encode(call).tokens == [
        "<function", "=email", "_delete", "_email", ">Ċ", "<parameter", "=email", "_id", ">Ċ"
    ]  # fmt: skip
    assert tokenizer.encode("<|im_start|>assistant\n").tokens == ["<|im_start|>", "assistant", "Ċ"]


@pytest.mark.parametrize(("stored", "shard"), [(20 << 20, 1 << 20), (8 << 30, 8 << 20), (50 << 30, 32 << 20)])
def test_many_conversations_are_larger_shards_of_the_spool(stored: int, shard: int) -> None:
    files = [SourceFile(f"{i}.jsonl", stored // 8, "1", "jsonl") for i in range(8)]
    assert sft_data_prep.shard_bytes({"a": files[:3], "b": files[3:]}) == shard


def test_shares_make_fewer_conversations_of_a_family() -> None:
    tasks = TasksConfig(families=["math", "code_generation"], shares={"code_generation": 0.25})
    cfg: Any = SimpleNamespace(tasks=tasks)
    drawn = sft_data_prep._tasks(cfg, {"train": 10, "valid": 2})
    assert Counter((task.family, split) for split, task in drawn) == {
        ("math", "train"): 10, ("math", "valid"): 2, ("code_generation", "train"): 3, ("code_generation", "valid"): 1
    }  # fmt: skip


@pytest.mark.slow
def test_scale_of_the_config_leaves_own_sources_whole_and_scale_all_takes_a_share(tmp_path: Path) -> None:
    file = corpus(tmp_path / "own.jsonl")
    whole = prepare(PRETRAIN, tmp_path, *QUICK, f"sources=[{file}]")
    assert outcomes(published(tmp_path, whole), "own")["read"] == 82
    assert "more are there" not in whole.stderr and "beyond scale" not in whole.stderr
    some = prepare(PRETRAIN, tmp_path, *QUICK, f"sources=[{{name: own, paths: [{file}], max_documents: 70}}]")
    counts = outcomes(published(tmp_path, some), "own")
    assert counts["read"] == counts["note: the first only (max_documents)"] == 70
    assert "max_documents: the first 70 documents of own; more are there" in some.stderr
    scaled = prepare(PRETRAIN, tmp_path, *QUICK, f"sources=[{file}]", "scale_all=medium")
    counts = outcomes(published(tmp_path, scaled), "own")
    assert counts["read"] + counts["not read: beyond scale"] == 82 and 5 < counts["read"] < 45
    assert f"source 'own': {counts['read']} of 82 records taken (--scale medium)" in scaled.stderr
    # Tasks, as conversations are: by the same table.
    tasks = [json.dumps(task.to_dict()) for task in generate_tasks("math", "train", 7)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    source = "sources=[{name: tasks, paths: [tasks.jsonl], max_tasks: 5}]"
    capped = prepare("stage2_rl", tmp_path, "tasks.families=[]", source)
    assert published(tmp_path, capped).record["fields"]["num_examples"] == 5
    assert "max_tasks: the first 5 records of tasks; more are there" in capped.stderr
    assert "read tasks  5 tasks" in capped.stderr
    source = "sources=[{name: tasks, paths: [tasks.jsonl]}]"
    some = published(tmp_path, prepare("stage2_rl", tmp_path, "tasks.families=[]", source, "scale_all=medium"))
    counts = outcomes(some, "tasks")
    assert counts["read"] + counts["not read: beyond scale"] == 7 > counts["read"] == counts["kept"]


@pytest.mark.slow
def test_sft_and_rl_data(tmp_path: Path) -> None:
    base = published(tmp_path, prepare(PRETRAIN, tmp_path, *QUICK))
    chats = [
        {
            "talk": {"turns": [{"from": "human", "value": f"Say {i}"}, {"from": "gpt", "value": f"{i}!"}] * 2},
            "level": i % 2,
        }
        for i in range(60)
    ] + [{"talk": {"turns": [{"role": "usr", "content": "x"}]}}, {"talk": {}}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "quiz.csv").write_text("question,answer\n say 7,7!\n")  # one of the conversations asks it
    columns = "{messages: talk.turns, category: level}"
    own = f"{{name: chats, paths: [chats.jsonl], columns: {columns}, on_error: skip, valid_fraction: 0.2"
    four = "tasks.families=[math, multiple_choice, instruction_following, structured_output]"
    words = (
        "tasks.num_tasks=5000",
        "packing.seq_length=256",
        "questions=[quiz.csv]",
        "text.path=null",
        "tasks.multi_turn_share=0",
        four,
    )
    weighted = "train_on: last, loss_weights: {'1': 2}"
    sft = published(tmp_path, prepare("stage1_sft", tmp_path, *words, f"sources=[{own}, {weighted}}}]"))
    rows = {split: pq.read_table(sft.path / split).to_pylist() for split in ("train", "valid")}
    counts = {split: sum(len(row["seq_start_id"]) for row in rows[split]) for split in rows}
    assert sum(counts.values()) == 3 * (50 + 125) + (30 + 75) + 59  # a share of 0.6 of structured output
    assert counts["train"] == sft.record["fields"]["num_examples"]
    assert {weight for row in rows["train"] for weight in row["loss_mask"]} == {0.0, 1.0, 2.0}
    assert sft.record["fields"]["reasoning"] is True  # most are generated, with it
    assert outcomes(sft, "chats") == {
        "read": 62, "kept": 59, "unknown role": 1, "field is missing": 1, "overlaps evaluation prompt": 1
    }  # fmt: skip
    assert sft.record["inputs"] == {"tokenizer": f"{base.ref}@{base.digest}"}
    rl = published(tmp_path, prepare("stage2_rl", tmp_path, "tasks.num_tasks=5000", "tasks.families=[math]"))
    prompts = [json.loads(line) for line in (rl.path / "train.jsonl").read_text().splitlines()]
    assert len({prompt["task"]["canonical"] for prompt in prompts}) == len(prompts) == 50
    assert all(prompt["messages"] == [{"role": "user", "content": prompt["task"]["prompt"]}] for prompt in prompts)
    # A user's records, with another name for a field; one that is wrong is left out.
    [task] = [prompt["task"] for prompt in prompts[:1]]
    records = [task, {**task, "solution": {**task["solution"], "answer": "nothing"}}]
    renamed = [{"question" if key == "prompt" else key: value for key, value in record.items()} for record in records]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in renamed))
    own = "sources=[{name: mine, paths: [mine.jsonl], columns: {prompt: question}, on_error: skip}]"
    mine = published(tmp_path, prepare("stage2_rl", tmp_path, FEW, "tasks.families=[]", own))
    assert outcomes(mine, "mine") == {"read": 1, "kept": 1, "not read: not a valid task": 1}


def test_a_task_whose_fields_are_renamed_keeps_its_conversation(tmp_path: Path) -> None:
    task = next(task for task in generate_tasks("tool_comparison", "train", 20) if task.messages)
    record = task.to_dict()
    renamed = {"question" if key == "prompt" else key: value for key, value in record.items()}
    (tmp_path / "mine.jsonl").write_text(json.dumps(renamed))
    own = "sources=[{name: mine, paths: [mine.jsonl], columns: {prompt: question}}]"
    version = published(tmp_path, prepare("stage2_rl", tmp_path, FEW, "tasks.families=[]", own))
    [line] = (version.path / "train.jsonl").read_text().splitlines()
    assert json.loads(line)["task"] == record


@pytest.mark.parametrize(
    ("stage", "words"),
    [("stage2_rl", ("tasks.num_tasks=2000",)), pytest.param(PRETRAIN, QUICK, marks=pytest.mark.slow)],
)
def test_stopped_after_publishing_it_goes_on_and_publishes_nothing_twice(
    tmp_path: Path, stage: str, words: tuple[str, ...]
) -> None:
    first = published(tmp_path, prepare(stage, tmp_path, *words))
    [state] = [path for path in (tmp_path / "output").rglob("run.json") if "artifacts" not in path.parts]
    # As a kill between publishing and the end of the run leaves it.
    state.write_text(state.read_text().replace('"finished"', '"running"'))
    assert published(tmp_path, prepare(stage, tmp_path, *words)).ref == first.ref
    assert first.registry.versions(first.name) == [1]
    assert json.loads(state.read_text())["attempts"] == 2


def test_own_tasks_that_evaluation_asks_are_dropped_whatever_they_are_called(tmp_path: Path) -> None:
    evaluated = generate_tasks("math", "eval", 2)
    relabelled = [dict(task.to_dict(), canonical=_train_label()) for task in evaluated]
    relabelled[1]["prompt"] = f"  {relabelled[1]['prompt'].upper()} "
    fine, asked = (task.to_dict() for task in generate_tasks("math", "train", 2))
    records = [*relabelled, evaluated[0].to_dict(), fine, fine, asked]
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"question": asked["prompt"], "answer": 1}))
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = f"sources=[{{name: mine, paths: [{tmp_path}/mine.jsonl], max_tasks: 500}}]"
    version = published(
        tmp_path, prepare("stage2_rl", tmp_path, FEW, "tasks.families=[]", source, "questions=[quiz.jsonl]")
    )
    assert outcomes(version, "mine") == {
        "read": 6,
        "kept": 1,
        "equals evaluation prompt": 3,
        "belongs to the evaluation split": 1,
        "exact duplicate": 1,
    }
    [line] = (version.path / "train.jsonl").read_text().splitlines()
    assert json.loads(line)["task"] == fine


def test_a_source_drops_no_generated_task_but_those_of_your_questions(tmp_path: Path) -> None:
    # Another workplace may have the same request: the split goes by both.
    family, few = "workplace_assistant", ("tasks.num_tasks=10000", "tasks.num_valid_tasks=100", "evaluation_tasks=200")
    spoken = {" ".join(task.prompt.casefold().split()) for task in generate_tasks(family, "eval", 200)}
    generated = generate_tasks(family, "train", 100, 3, distinct=True)
    assert any(" ".join(task.prompt.casefold().split()) in spoken for task in generated)
    asked = generated[0].prompt
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"question": asked, "answer": 1}))
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "What is 1 and 1?", "answer": 2}))
    words = (f"tasks.families=[{family}]", *few, "sources=[mine.jsonl]", "questions=[quiz.jsonl]")
    version = published(tmp_path, prepare("stage2_rl", tmp_path, *words))
    dropped = sum(task.prompt == asked for task in generated)
    assert outcomes(version, family) == {"read": 101, "kept": 101 - dropped, "equals evaluation prompt": dropped}


def test_own_tasks_stay_where_the_generators_make_the_same_and_come_back_from_what_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = generate_tasks("math", "train", 20, 3, distinct=True)  # the first ones of the config's seed
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(task.to_dict()) + "\n" for task in own))
    script = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep")
    few = ("tasks.families=[math]", "tasks.num_tasks=3000", "tasks.num_valid_tasks=100")

    def prepare_here(*words: str) -> Version:
        monkeypatch.setattr(sys, "argv", [str(script.__file__), "--config", "tiny", FEW, *words])
        assert run_main(script.main, command_hint) == 0
        return Registry(tmp_path / "output" / "artifacts").resolve(json.loads(capsys.readouterr().out)["data"])

    version = prepare_here(*few, "sources=[mine.jsonl]")
    assert outcomes(version, "mine") == {"read": 20, "kept": 20}
    assert outcomes(version, "math") == {"read": 31, "kept": 11, "exact duplicate": 20}
    again = prepare_here("tasks.families=[]", f"sources=[{version.path}/train.jsonl]")
    assert (again.path / "train.jsonl").read_bytes() == (version.path / "train.jsonl").read_bytes()


def test_questions_with_answers_are_tasks_that_rl_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"What is {i} and {i}?,{2 * i}" for i in range(60)]
    (tmp_path / "sums.csv").write_text("\n".join(["q,a", *rows, rows[0]]))
    script = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep")

    def prepare_here(source: str) -> Version:
        monkeypatch.setattr(sys, "argv", [str(script.__file__), "--config", "tiny", FEW, "tasks.families=[]", source])
        assert run_main(script.main, command_hint) == 0
        output = capsys.readouterr()
        assert "env.families={questions/sums: 1}" in output.err
        assert ["source", "outcome", "tasks"] in [line.split() for line in output.err.splitlines()]
        return Registry(tmp_path / "output" / "artifacts").resolve(json.loads(output.out)["data"])

    own = "{name: sums, paths: [sums.csv], columns: {question: q, answer: a}, match: contains}"
    version = prepare_here(f"sources=[{own}]")
    assert outcomes(version, "sums") == {"read": 61, "kept": 60, "exact duplicate": 1}  # none is for evaluation
    prompts = PromptSource(version.path / "train.jsonl", {"questions/sums": 1.0}, 4, 0)
    for task in prompts.batch(0):
        number = int(task.prompt.split()[2])
        assert verify(task, f"That is {2 * number}.").score == 1.0
        assert verify(task, f"That is {2 * number}0.").score == 0.0
    again = prepare_here(f"sources=[{{name: other, paths: [{version.path}/train.jsonl]}}]")
    train = (again.path / "train.jsonl").read_bytes()
    assert train == (version.path / "train.jsonl").read_bytes()


def test_a_question_that_is_evaluated_with_choices_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"question": "Which of them is red?", "choices": ["Mars", "Venus"], "answer": "A"}
    other = {**asked, "choices": ["blood", "snow"]}
    (tmp_path / "quiz.jsonl").write_text(json.dumps(asked))
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps({**row, "task": "arc"}) for row in (asked, other)))
    script = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep")
    words = [f"{key}=[{{name: {name}, paths: [{name}.jsonl]}}]" for key, name in (
        ("sources", "mine"), ("questions", "quiz")
    )]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [str(script.__file__), "--config", "tiny", FEW, "tasks.families=[]", *words])
    assert run_main(script.main, command_hint) == 0
    version = Registry(tmp_path / "output" / "artifacts").resolve(json.loads(capsys.readouterr().out)["data"])
    assert outcomes(version, "mine") == {"read": 2, "kept": 1, "equals evaluation prompt": 1}
    [line] = (version.path / "train.jsonl").read_text().splitlines()
    assert json.loads(line)["task"]["spec"]["options"] == ["blood", "snow"]


def _train_label() -> str:
    """A canonical form that lands in the training split."""
    return next(name for i in range(100) if split_of(name := f"math|relabelled {i}") == "train")


def test_a_copied_stage_uses_its_own_schema(tmp_path: Path) -> None:
    folder = tmp_path / "my_rl"
    shutil.copytree(RECIPE / "stage2_rl", folder)
    schema = folder / "data_schema.py"
    schema.write_text(
        schema.read_text().replace("num_valid_tasks: int = Field(10_000", "num_valid_tasks: int = Field(500")
    )
    result = prepare(folder, tmp_path, "tasks.num_tasks=2000", "tasks.families=[math]")
    version = published(tmp_path, result)
    assert len((version.path / "valid.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("stage", "number", "code", "said"),
    [
        (PRETRAIN, signal.SIGTERM, 143, "stopped by SIGTERM"),
        ("stage2_rl", signal.SIGUSR1, 143, "stopped by SIGUSR1"),
        ("stage2_rl", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_stops_at_once_and_publishes_nothing(
    tmp_path: Path, stage: str, number: signal.Signals, code: int, said: str
) -> None:
    # Enough tasks for a minute of work; stopped half a second after the script has installed its handlers.
    words = ("tiny", "scale=full", *(QUICK[:1] if stage == PRETRAIN else ()))
    child = start(tmp_path, RECIPE / stage / "data_prep.py", *words)
    deadline = time.monotonic() + 60
    while not _handles(child.pid, signal.SIGUSR1) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == code, stderr
    assert "Traceback" not in stderr
    assert [line for line in stderr.splitlines() if line.startswith("error")] == [f"error: {said}"]
    assert not list((tmp_path / "output" / "artifacts").glob("nano3-*/*"))


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: its bit in SigCgt of /proc."""
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("stage", "overrides", "complaint"),
    [
        (PRETRAIN, ["sources=[{name: own, paths: [bad.jsonl]}]"], "bad.jsonl:2: malformed JSON"),
        (PRETRAIN, ["sources=[{name: own, paths: [empty.jsonl]}]"], "source 'own' is empty"),
        (
            PRETRAIN,
            ["sources=[{name: own, paths: [short.jsonl]}]"],
            "source 'own': nothing is left of 1 read: 1 word_count",
        ),
        (
            PRETRAIN,
            ["sources=[{name: own, paths: [body.jsonl]}]"],
            "fields there: body; a source's `columns: {text: FIELD}`",
        ),
        (PRETRAIN, ["tasks.num_tasks=0"], "no source of documents"),
        ("stage1_sft", ["chat_template=nanno3", "tokenizer=."], "nano3"),
        (
            "stage1_sft",
            ["run.tokenizer=null", "text.path=null", "chat_template=nano2", "tokenizer=."],
            "has no token <SPECIAL_10>",
        ),
        ("stage1_sft", ["run.tokenizer=null", "text.path=null", "tokenizer=nowhere"], "no such file: nowhere"),
        (
            "stage1_sft",
            ["run.tokenizer=null", "text.path=null", "tokenizer=.", "sources=[{name: own, paths: [empty.jsonl]}]"],
            "source 'own' is empty: 0 bytes in",
        ),
        (
            "stage1_sft",
            ["run.tokenizer=null", "text.path=null", "tokenizer=.", "sources=[{name: own, paths: [headed.csv]}]"],
            "source 'own' is empty: no record in",
        ),
        ("stage1_sft", [], "nemotron nano3 data prep pretrain -c tiny"),
        ("stage2_rl", ["sources=[{name: own, paths: [bad.jsonl]}]"], "bad.jsonl:1: not a task record"),
        ("stage2_rl", ["sources=[{name: own, paths: [empty.jsonl]}]"], "source 'own' is empty: 0 bytes in"),
        (
            "stage2_rl",
            ["sources=[{name: own, paths: [eval.jsonl]}]"],
            "source 'own': nothing is left of 5 read: 5 belongs",
        ),
        (
            "stage2_rl",
            ["sources=[{name: own, paths: [body.jsonl], on_error: skip}]"],
            "body.jsonl:1: not a valid task: not a task record",
        ),
        ("stage2_rl", ["sources=[{name: own, paths: [body.jsonl]}]"], "columns: {question: FIELD, answer: FIELD}"),
        ("stage2_rl", ["sources=[{name: own, paths: [wrong.jsonl]}]"], "wrong.jsonl:2: solution.answer is wrong"),
        ("stage2_rl", ["sources=[{name: own, paths: [family.jsonl]}]"], "family.jsonl:2: unknown task family 'maths'"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    overrides: list[str],
    complaint: str,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": "x"\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "headed.csv").write_text("messages\n")
    (tmp_path / "short.jsonl").write_text('{"text": "short"}\n')
    (tmp_path / "body.jsonl").write_text('{"body": "fine"}\n')
    evaluated = [json.dumps(task.to_dict()) for task in generate_tasks("math", "eval", 5)]
    (tmp_path / "eval.jsonl").write_text("\n".join(evaluated))
    train_tokenizer(["hello"], MIN_VOCAB_SIZE).save(str(tmp_path / "tokenizer.json"))
    good = generate_tasks("math", "train", 1)[0].to_dict()
    changed: dict[str, dict[str, object]] = {
        "wrong": {"spec": {"result": -1}},
        "family": {"family": "maths"},
    }
    for name, change in changed.items():
        lines = [json.dumps(record) for record in (good, {**good, **change})]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(f"nemotron.recipes.nano3.{stage}.data_prep")
    of_stages = {PRETRAIN: QUICK, "stage2_rl": (FEW, "tasks.families=[math]", "tasks.num_tasks=100")}
    quick = of_stages.get(stage, (FEW,))
    monkeypatch.setattr(sys, "argv", [str(script.__file__), "--config", "tiny", *quick, *overrides])
    assert run_main(script.main, command_hint) == 2
    stderr = capsys.readouterr().err
    assert complaint in stderr
    assert len(stderr[stderr.index("error: ") :].splitlines()) <= 2
    assert not list((tmp_path / "output" / "artifacts").glob("*/*"))


@pytest.mark.usefixtures("few_open_files")
def test_generated_conversations_of_several_turns_with_a_system_message_and_text(tmp_path: Path) -> None:
    script = importlib.import_module("nemotron.recipes.nano3.stage1_sft.data_prep")
    families: tuple[Family, ...] = ("math", "multiple_choice", "workplace_assistant")
    blend = tmp_path / "blend"
    (blend / "tokenizer").mkdir(parents=True)
    documents = [corpus(tmp_path / "own.jsonl").read_text()[:n] for n in (3000, 40)]
    tokenizer = train_tokenizer(documents, vocab_size=MIN_VOCAB_SIZE)
    tokenizer.save(str(blend / "tokenizer" / "tokenizer.json"))
    with IndexedDatasetWriter(blend / "own", np.uint16) as writer:
        for document in documents:
            writer.add_documents(np.array(ids := tokenizer.encode(document).ids), [len(ids)])
    (blend / "blend.json").write_text(json.dumps({"sources": {"own": {"train": ["own"] * 60, "valid": []}}}))
    cfg = SFTDataConfig(
        run=RunConfig(script="data_prep.py", output="sft-data"),
        tokenizer=str(blend / "tokenizer"),
        tasks=TasksConfig(families=list(families), multi_turn_share=0.25, system_share=0.5),
        text=TextConfig(path=blend, weights={"own": 1.0}, num_passages=50, passage_tokens=16, loss_weight=0.4),
    )
    tasks = [
        (split, task)
        for family in families
        for split, number in (("train", 40), ("valid", 8))
        for task in generate_tasks(family, split, number, cfg.tasks.seed)
    ]
    files = script._write_generated(cfg, tasks, tmp_path)
    rows = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in files}
    assert {name: len(of_name) for name, of_name in rows.items()} == dict.fromkeys(families, 48) | {
        "multi_turn": 24, "text": 50
    }  # fmt: skip
    passages = rows.pop("text")
    assert len({row["text"] for row in passages}) > 30
    for row in passages:  # as it stands in one of the documents, no longer than asked for, and trained
        assert (
            row["loss_weight"] == 0.4
            and row["split"] == "train"
            and any(row["text"] in document for document in documents)
        )
        assert len(tokenizer.encode(row["text"]).ids) <= 17  # the first piece may be another without what precedes it
    by_prompt = {(task.prompt, split): task for split, task in tasks}
    for row in rows["multi_turn"]:
        turns = [message for message in row["messages"] if message["role"] != "system"]
        assert [message["role"] for message in turns] in (["user", "assistant"] * 2, ["user", "assistant"] * 3)
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            assert verify(by_prompt[question["content"], row["split"]], answer["content"]).score == 1
        assert "tools" not in row
    with pytest.raises(UserError, match="gives no conversation of 4 tasks"):
        script._write_generated(cfg, tasks[:4], tmp_path / "few")
    first = [row["messages"][0]["role"] for of_name in rows.values() for row in of_name]
    assert 0.35 < first.count("system") / len(first) < 0.65
    again = script._write_generated(cfg, tasks, tmp_path / "again")
    assert [Path(new.uri).read_bytes() for (new,) in again.values()] == [
        Path(old.uri).read_bytes() for (old,) in files.values()
    ]
    # A blend of `data tokenize` keeps line ends at the end of documents, and sources that are held out.
    with IndexedDatasetWriter(blend / "own", np.uint16) as writer:
        writer.add_documents(np.array(ids := tokenizer.encode("a\n").ids), [len(ids)])
    sources = {"own": {"train": ["own"], "valid": []}, "held": {"train": [], "valid": ["own"]}}
    (blend / "blend.json").write_text(json.dumps({"sources": sources}))
    assert {row["text"] for row in script._passages(cfg)} == {"a\n"}
    cfg.text.weights["held"] = 1.0
    with pytest.raises(UserError, match="has no training text of 'held'"):
        list(script._passages(cfg))
