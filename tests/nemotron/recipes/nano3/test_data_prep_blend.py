"""`nemotron nano3 data prep rl -c published`, run as a user would, against a Hub-like server with the real client."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hub_server import running_hub
from nemo_rl_rollouts import READ, RECORD, as_nemo_rl_reads

from nemo_runspec.artifacts import Version
from nemotron.kit import RLPrompts
from nemotron.kit.nemo_rl import check_gym_prompts

from .. import scripts
from ..scripts import published

pytest.importorskip("huggingface_hub")
SCRIPT = "nano3/stage2_rl/data_prep_blend.py"
BLEND, DAPO, SKYWORK = (
    "nvidia/Nemotron-3-Nano-RL-Training-Blend",
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "Skywork/Skywork-OR1-RL-Data",
)
ROWS = 40  # of each collection


# --- A small blend with the layout of the published one ---------------------------------------------------------------


def dapo_row(number: int) -> dict[str, Any]:
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {number}+1?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    return {"prompt": [{"content": content, "role": "user"}], "reward_model": {"ground_truth": str(number + 1)}}


def skywork_row(number: int) -> dict[str, Any]:
    answers = json.dumps([str(number), "no"])
    return {"prompt": [{"role": "user", "content": f"Find {number}."}], "reward_model": {"ground_truth": answers}}


def pointing(dataset: str, row: int, **template: str) -> dict[str, Any]:
    """A placeholder record."""
    return {
        "dataset": dataset,
        "_hf_placeholder": {"row": row, "question_template": template},
        "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
        "pass_rate": 0.5,
    }


def to_dapo(row: int) -> dict[str, Any]:
    return pointing("nano_v3_sft_profiled_dapo17k", row, prefix="", suffix="Box it.")


def to_skywork(row: int, template: str = "Think. {question}") -> dict[str, Any]:
    return pointing("nano_v3_sft_profiled_skywork_no_omni", row, template=template)


def choice(number: int, text: str = "") -> dict[str, Any]:
    """A record that holds its question."""
    return {
        "dataset": "nano_v3_sft_profiled_stem_mcqa",
        "_hf_placeholder": None,
        "responses_create_params": {"input": [{"role": "user", "content": text or f"Which is {number}? é"}]},
        "expected_answer": "A",
        "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    }


def jsonl(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue()


def mixed(count: int) -> list[dict[str, Any]]:
    """Records of all three kinds by turns, no prompt twice."""
    kinds = (lambda n: choice(n), lambda n: to_dapo(n % ROWS), lambda n: to_skywork(n % ROWS, f"{n} {{question}}"))
    return [kinds[n % 3](n) if n < ROWS else choice(n) for n in range(count)]


@pytest.fixture
def hub() -> Iterator[Any]:
    with running_hub() as hub:
        hub.add(DAPO, {"data/dapo-math-17k.parquet": parquet([dapo_row(n) for n in range(ROWS)])})
        math = parquet([skywork_row(n) for n in range(ROWS)])
        code = parquet([skywork_row(-1)])
        hub.add(SKYWORK, {"data/math-00000-of-00001.parquet": math, "data/code-00000-of-00001.parquet": code})
        yield hub


def publish_blend(hub: Any, records: list[dict[str, Any]]) -> str:
    """A commit of the blend; its hash."""
    files = {
        "train.jsonl": jsonl(records),
        "README.md": b"# A blend\n",
        "create_nanov3_jsonl.py": b"raise SystemExit\n",
    }
    if BLEND in hub.repositories:
        return str(hub.repositories[BLEND].commit(files))
    return str(hub.add(BLEND, files))


def environment(cwd: Path, hub: Any) -> dict[str, str]:
    """A client of `hub` with a cache of its own; None: of one that nobody can reach."""
    here = {"HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    return here | {"HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:1"}


def run(cwd: Path, hub: Any, *words: str, cpus: int | None = None) -> subprocess.CompletedProcess[str]:
    return scripts.run(cwd, SCRIPT, "published", *words, cpus=cpus, **environment(cwd, hub))


def refused(cwd: Path, result: subprocess.CompletedProcess[str]) -> str:
    """The one message of a command that was refused and published nothing."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and not list((cwd / "output" / "artifacts").glob("nano3-*/*"))
    [message] = [line for line in result.stderr.splitlines() if line.startswith("error")]
    return message


def lines(version: Version, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (version.path / f"{split}.jsonl").read_text().splitlines()]


def asked(record: dict[str, Any]) -> str:
    return str(record["responses_create_params"]["input"][0]["content"])


# --- What is written --------------------------------------------------------------------------------------------------


def test_the_published_blend_becomes_whole_records_and_a_held_out_split(tmp_path: Path, hub: Any) -> None:
    """The expected texts were put together by hand from what the blends' own scripts write."""
    records = [
        to_dapo(5),
        choice(1, "the  LAST one?"),  # of the same words as a held-out prompt
        to_skywork(7),
        to_skywork(3, "Otherwise asked: {question}"),  # the question of a held-out record, in another prompt
        choice(2),
        choice(2),  # what the blend repeats for training stays
        to_skywork(3),
        choice(3, "The last one?"),
    ]
    commit = publish_blend(hub, records)
    result = run(tmp_path, hub, "valid_rows=2")
    version = published(tmp_path, result)
    train, valid = lines(version, "train"), lines(version, "valid")
    assert [asked(record) for record in train] == [
        "\n\nWhat is 5+1?\n\nBox it.",
        "Think. Find 7.",
        "Which is 2? é",
        "Which is 2? é",
    ]
    assert [asked(record) for record in valid] == ["Think. Find 3.", "The last one?"]
    assert [(record["question"], record["expected_answer"]) for record in (train[0], train[1], valid[0])] == [
        ("\n\nWhat is 5+1?\n\nBox it.", "6"),
        ("Find 7.", "7"),
        ("Find 3.", "3"),
    ]
    assert train[0]["pass_rate"] == 0.5 and "_hf_placeholder" not in train[0]
    assert train[2] == choice(2), "what holds its question is as it was"
    counts = {"train": 2, "valid": 1, "prompt is held out": 0, "question is held out": 1}
    others = {"train": 2, "valid": 1, "prompt is held out": 1, "question is held out": 0}
    environments = {"math_with_judge_simple_agent": counts, "mcqa_simple_agent": others}
    assert json.loads((version.path / "environments.json").read_text()) == environments
    assert version.record["type"] == "RLPrompts"
    assert version.record["metrics"]["environments"] == environments
    fields = version.record["fields"]
    assert (fields["num_examples"], fields["families"]) == (4, sorted(environments))
    assert [fields[f"{split}_path"] for split in ("train", "valid")] == [
        str(version.path / f"{split}.jsonl") for split in ("train", "valid")
    ]
    names = [source["name"] for source in version.record["sources"]]
    collections = [next(iter(hub.repositories[name].commits)) for name in (DAPO, SKYWORK)]
    assert names == [
        f"hf://datasets/{BLEND}@{commit}/train.jsonl",
        f"hf://datasets/{DAPO}@{collections[0]}/data/dapo-math-17k.parquet",
        f"hf://datasets/{SKYWORK}@{collections[1]}/data/math-00000-of-00001.parquet",
    ]


def test_a_digest_is_of_content_not_of_how_it_was_cut_or_run(tmp_path: Path, hub: Any) -> None:
    publish_blend(hub, mixed(90))
    first = published(tmp_path, run(tmp_path, hub, "valid_rows=10"))
    assert [record for record in lines(first, "train") if record.get("_hf_placeholder")] == []
    assert len(lines(first, "train")) + len(lines(first, "valid")) == 90
    cut = published(tmp_path, run(tmp_path, hub, "valid_rows=10", "shard_bytes=1024", cpus=1))
    assert (cut.version, cut.digest) == (2, first.digest)
    again = published(tmp_path, run(tmp_path, hub, "valid_rows=10"))
    assert (again.version, again.digest) == (3, first.digest)


def test_a_share_is_held_out_by_the_hash_of_the_prompt(tmp_path: Path) -> None:
    records = [choice(n) for n in range(200)]
    (tmp_path / "blend.jsonl").write_bytes(jsonl([*records, *records]))
    words = ("paths=[blend.jsonl]", "valid_rows=0", "valid_fraction=0.2")
    version = published(tmp_path, run(tmp_path, None, *words))
    train, valid = ([asked(record) for record in lines(version, split)] for split in ("train", "valid"))
    assert not set(train) & set(valid) and len(train) + len(valid) == 400
    assert 40 < len(valid) < 120 and len(valid) == 2 * len(set(valid))
    # More data moves no prompt from one side to the other.
    (tmp_path / "blend.jsonl").write_bytes(jsonl([choice(n) for n in range(300)]))
    more = published(tmp_path, run(tmp_path, None, *words))
    assert set(valid) <= {asked(record) for record in lines(more, "valid")}
    assert set(train) <= {asked(record) for record in lines(more, "train")}


def test_local_files_need_no_hub(tmp_path: Path) -> None:
    (tmp_path / "blend.jsonl").write_bytes(jsonl([pointing("mine", n, template="{question}!") for n in range(6)]))
    (tmp_path / "questions.parquet").write_bytes(parquet([skywork_row(n) for n in range(8)]))
    words = ("paths=[blend.jsonl]", "references={mine: {location: questions.parquet, answers_in_list: true}}")
    version = published(tmp_path, run(tmp_path, None, *words, "valid_rows=2"))
    assert [(asked(record), record["expected_answer"]) for record in lines(version, "valid")] == [
        ("Find 4.!", "4"),
        ("Find 5.!", "5"),
    ]
    assert [source["sha256"] is not None for source in version.record["sources"]] == [True, True]
    # A local copy of a published collection is read as the collection is.
    (tmp_path / "blend.jsonl").write_bytes(jsonl([to_dapo(n) for n in range(6)]))
    (tmp_path / "dapo.parquet").write_bytes(parquet([dapo_row(n) for n in range(8)]))
    here = "references={nano_v3_sft_profiled_dapo17k: {location: dapo.parquet}}"
    version = published(tmp_path, run(tmp_path, None, "paths=[blend.jsonl]", here, "valid_rows=2"))
    assert asked(lines(version, "train")[0]) == "\n\nWhat is 0+1?\n\nBox it."


# --- What is not right ------------------------------------------------------------------------------------------------


def test_a_placeholder_that_cannot_be_filled_stops_with_its_line_or_is_counted(tmp_path: Path, hub: Any) -> None:
    commit = publish_blend(hub, [*mixed(12), to_dapo(ROWS), choice(50)])
    words = ("valid_rows=3", "shard_bytes=1024")
    message = refused(tmp_path, run(tmp_path, hub, *words))
    says = f"hf://{DAPO}/train has no row {ROWS}"
    assert f"hf://datasets/{BLEND}@{commit}/train.jsonl:13: {says}" in message
    result = run(tmp_path, hub, *words, "on_error=skip")
    version = published(tmp_path, result)
    assert "13 records read; not read: 1 placeholder not resolved" in result.stderr
    assert version.record["metrics"]["skipped"] == {"placeholder not resolved": 1}
    assert says in version.record["metrics"]["samples"][0]["reason"]
    publish_blend(hub, [*mixed(12), choice(50)])
    assert published(tmp_path, run(tmp_path, hub, *words, "on_error=skip")).digest == version.digest


UNKNOWN = pointing("nano_v3_sft_profiled_dapo", 0, suffix="!")
NO_TEXT = {**choice(0), "expected_answer": 3}
BROKEN = {
    "malformed JSON": (b"{\n", "malformed JSON"),
    "placeholder not resolved": (jsonl([UNKNOWN]), "unknown collection: dataset is 'nano_v3_sft_profiled_dapo'"),
    "not what its environment asks for": (jsonl([NO_TEXT]), "mcqa: expected_answer is not text"),
    "no agent in agent_ref": (jsonl([{**choice(0), "agent_ref": None}]), "agent_ref.name is missing"),
    "no prompt in responses_create_params": (
        jsonl([{"agent_ref": {"name": "x"}}]), "responses_create_params is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", ["malformed JSON", "placeholder not resolved", "not what its environment asks for"])
def test_what_is_not_right_stops_with_its_line(tmp_path: Path, reason: str) -> None:
    """At each of the three steps that may find it: reading, following the pointer, checking the fields."""
    line, says = BROKEN[reason]
    right = [choice(n) for n in range(20)]
    (tmp_path / "blend.jsonl").write_bytes(jsonl(right[:12]) + line + jsonl(right[12:]))
    message = refused(tmp_path, run(tmp_path, None, "paths=[blend.jsonl]", "valid_rows=5", "shard_bytes=1024"))
    assert "blend.jsonl:13: " in message and says in message


def test_what_is_not_right_is_counted_under_skip(tmp_path: Path) -> None:
    right = [choice(n) for n in range(20)]
    broken = b"".join(line for line, _ in BROKEN.values())
    (tmp_path / "blend.jsonl").write_bytes(jsonl(right[:12]) + broken + jsonl(right[12:]))
    words = ("paths=[blend.jsonl]", "valid_rows=5", "shard_bytes=1024", "on_error=skip")
    result = run(tmp_path, None, *words)
    version = published(tmp_path, result)
    assert "20 records read; not read: 1 malformed JSON, 1 no agent in agent_ref" in result.stderr
    assert lines(version, "train") == right[:15] and lines(version, "valid") == right[15:]
    assert version.record["metrics"]["skipped"] == dict.fromkeys(BROKEN, 1)
    samples = [sample["reason"] for sample in version.record["metrics"]["samples"]]
    assert all(any(says in sample for sample in samples) for _, says in BROKEN.values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["valid_rows=3"], "valid_rows=3 leaves nothing to train on: there are 3 records"),
        (["valid_rows=0"], "give one of valid_rows and valid_fraction"),
        (["valid_rows=1", "valid_fraction=0.1"], "give one of valid_rows and valid_fraction"),
        (["valid_rows=0", "valid_fraction=1e-9"], "no record is left for valid.jsonl"),
        (["valid_rows=1", "paths=[blnd.jsonl]"], "no such file: blnd.jsonl"),
        (["valid_rows=1", "references={mine: {location: nowhere.parquet}}"], "no such file: nowhere.parquet"),
        (["valid_rows=1", "refernces={}"], "references"),
    ],
)
def test_a_config_that_cannot_be_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "blend.jsonl").write_bytes(jsonl([choice(n) for n in range(3)]))
    result = run(tmp_path, None, "paths=[blend.jsonl]", *words)
    refused(tmp_path, result)
    assert says in result.stderr


# --- Again, and after a kill ------------------------------------------------------------------------------------------


def start_and_kill(cwd: Path, hub: Any, words: tuple[str, ...], step: str, receipts: int) -> None:
    """Kill the whole process group, without warning, when so many shards of a step are done."""
    child = scripts.start(cwd, SCRIPT, "published", *words, **environment(cwd, hub))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if len(list(cwd.glob(f"output/nano3/data/prep/rl/blend/*/work/{step}/receipts/*.json"))) >= receipts:
            break
        time.sleep(0.002)
    assert child.poll() is None, f"ended before {receipts} shards of {step} were done"
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


@pytest.mark.slow
def test_killed_twice_the_same_command_goes_on_to_the_same_digest(tmp_path: Path, hub: Any) -> None:
    publish_blend(hub, mixed(1200))
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    words = ("valid_rows=100", "shard_bytes=4096")
    expected = published(undisturbed, run(undisturbed, hub, *words)).digest
    start_and_kill(tmp_path, hub, words, "read", 10)
    start_and_kill(tmp_path, hub, words, "resolved", 1)
    before = len(hub.requests)
    version = published(tmp_path, run(tmp_path, hub, *words))
    assert version.digest == expected
    data = [request for request in hub.requests[before:] if "/resolve/" in request and "README.md" not in request]
    assert not data, "the blend and the collections were here already"
    assert not list(tmp_path.glob("output/nano3/data/prep/rl/blend/*/work"))


def test_the_prepared_blend_is_what_the_published_rlvr_hands_to_nemo_rl(tmp_path: Path, hub: Any) -> None:
    """Its agents are those of the servers that the config starts, and its rows have what NeMo-RL and Gym read."""
    publish_blend(hub, mixed(30))
    version = published(tmp_path, run(tmp_path, hub, "valid_rows=5"))
    fields = version.record["fields"]
    prompts = RLPrompts.model_construct(
        path=version.path, train_path=version.path / "train.jsonl", valid_path=version.path / "valid.jsonl"
    )
    assert str(fields["train_path"]).endswith("train.jsonl") and str(fields["valid_path"]).endswith("valid.jsonl")
    check_gym_prompts(prompts)

    config = yaml.safe_load((scripts.RECIPES / "nano3/stage2_rl/config/default.yaml").read_text(encoding="utf-8"))
    record = json.loads(RECORD.read_text(encoding="utf-8"))["gym"]
    started = {name for path in config["env"]["nemo_gym"]["config_paths"] for name in record["configs"][path]}
    rows = as_nemo_rl_reads(version.path / "train.jsonl", max_new_tokens=49_152)
    assert len(rows) == 25
    for row in rows:
        assert row["agent_ref"]["name"] in started
        assert set(READ["nemo_gym_row"]) <= set(row) and READ["responses_create_params"] == ["input"]
        assert row["responses_create_params"]["input"][0]["role"] == "user"
