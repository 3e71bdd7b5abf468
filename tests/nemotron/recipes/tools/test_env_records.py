"""`env records`: which tasks it writes of an environment of the user's own, and where it cannot write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.recipes.tools.env_records import Options, main

ENVIRONMENT = """
from itertools import count
class Halves:
    def tasks(self):
        for number in count():
            yield {"prompt": f"What is half of {number % 40}?", "spec": {"right": str(number % 40 / 2)}}
    def verify_answer(self, spec, answer):
        return answer == spec["right"]
"""


def test_tasks_of_an_endless_environment_are_different_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "halves.py"
    file.write_text(ENVIRONMENT)
    main(Options(f"{file}:Halves", 100, "train", 0, None))
    records = map(json.loads, capsys.readouterr().out.splitlines())
    asked = [record["responses_create_params"]["input"][-1]["content"] for record in records]
    assert 0 < len(asked) == len(set(asked)) <= 40


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: Is a directory"):
        main(Options("math", 2, "train", 0, str(tmp_path)))
