"""The three deduplication scripts in a pipe, as a user would run them, on documents whose duplicates are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.curation.step import list_documents, read_documents, write_documents
from nemotron.kit import Dataset
from nemotron.recipes.data.curation.nemotron_cc import dedup_schema

RECIPE = Path(dedup_schema.__file__).parent
STEPS = ("exact_dedup", "fuzzy_dedup", "substring_dedup")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with 60 documents: 10 with a copy, 10 with a near copy, 10 with a common passage of 60 words."""
    folder = tmp_path_factory.mktemp("dedup")
    random = np.random.default_rng(0)

    def some(count: int) -> list[str]:
        return [f"w{i}" for i in random.integers(0, 10**6, count)]

    common = " ".join(some(60))
    documents: list[dict[str, str]] = []
    for number in range(60):
        words = some(150)
        if number >= 50:
            words = documents[number - 50]["text"].split()
        elif number >= 40:
            words = documents[number - 30]["text"].split()
            words[75] = "changed"  # 5 of 146 shingles: a similarity of 141 / 151
        text = " ".join(words)
        if 20 <= number < 30:
            text += f"\n\n{common}"
        documents.append({"id": f"d{number}", "url": f"u{number}", "text": text})
    payload = folder / "payload"
    (payload / "documents").mkdir(parents=True)
    for part in range(3):
        write_documents(payload / "documents" / f"part-{part}.jsonl.zst", documents[part::3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(folder / "artifacts"))
        Dataset(path=payload, num_examples=60).save(name="nemotron_cc-language-data-tiny")
    return folder


def run(root: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    commands = [f"{sys.executable} {RECIPE / step}.py --config tiny" for step in steps]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RUNSPEC_", "NEMOTRON_"))}
    env |= {"RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts")}
    return subprocess.run(
        ["bash", "-c", "set -o pipefail; " + " | ".join(commands)],
        cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_steps_in_a_pipe(root: Path) -> None:
    done = run(root, *STEPS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"data": "art://nemotron_cc-substring_dedup-data-tiny:1"}
    registry = Registry(root / "artifacts")
    records = {step: registry.resolve(f"nemotron_cc-{step}-data-tiny").record for step in STEPS}
    tables = {step: record["metrics"]["table"] for step, record in records.items()}

    numbers = {}  # of the documents that each step has left
    for step in STEPS:
        files = list_documents(registry.resolve(f"nemotron_cc-{step}-data-tiny").path)
        numbers[step] = {int(document["id"][1:]) for path in files for document in read_documents(path)}
    copies = [(number, number - 50) for number in range(50, 60)]
    assert all(len(numbers["exact_dedup"] & set(pair)) == 1 for pair in copies) and len(numbers["exact_dedup"]) == 50
    near = [(number, number - 30) for number in range(40, 50)]
    assert all(len(numbers["fuzzy_dedup"] & set(pair)) == 1 for pair in near) and len(numbers["fuzzy_dedup"]) == 40
    assert tables["exact_dedup"]["read"]["documents"] == 60
    assert tables["substring_dedup"]["kept"]["documents"] == 40
    assert records["substring_dedup"]["metrics"]["cuts"]["tokens"] == 9 * 60

    # Samples have the twin beside them; the curve was printed; texts lost only the passage.
    sample = tables["fuzzy_dedup"]["samples"]["near duplicate"][0]
    assert abs(int(sample["id"][1:]) - int(sample["detail"].removeprefix("stays: d").partition(":")[0])) == 30
    assert "20 bands x 7 rows = 140 permutations" in done.stderr
    files = list_documents(registry.resolve("nemotron_cc-substring_dedup-data-tiny").path)
    assert {len(document["text"].split()) for path in files for document in read_documents(path)} == {150, 210}


def test_a_bad_value_is_refused_before_any_work(root: Path) -> None:
    env = os.environ | {"RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts")}
    command = [
        sys.executable,
        str(RECIPE / "fuzzy_dedup.py"),
        "--config",
        "tiny",
        "run.data=planted",
        "minhash.num_band=3",
    ]
    done = subprocess.run(command, cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert "minhash.num_band" in done.stderr and "num_bands" in done.stderr


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["tiny", "default"])
def test_configs_are_valid_and_steps_read_what_the_step_before_wrote(step: str, name: str) -> None:
    config = yaml.safe_load((RECIPE / "config" / step / f"{name}.yaml").read_text())
    model = getattr(dedup_schema, "".join(part.title() for part in step.split("_")) + "Config")
    checked = model.model_validate(config)
    assert checked.run.output == f"nemotron_cc-{step}-data-{name}"
    before = ("language", *STEPS)[STEPS.index(step)]
    assert checked.run.data == f"nemotron_cc-{before}-data-{name}"
    if name == "default":  # as published, so that is what the fields have by themselves
        assert checked == model.model_validate({"run": config["run"]})
