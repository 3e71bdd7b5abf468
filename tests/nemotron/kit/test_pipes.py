"""References through real shell pipes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import nemotron
from nemo_runspec.errors import UserError
from nemotron.kit import pipes
from nemotron.kit.artifact import Dataset

ENV = {**os.environ, "PYTHONPATH": str(Path(nemotron.__file__).parents[1])}
PYTHON = shlex.quote(sys.executable)
WRITE = f"""{PYTHON} -c '
import sys
from nemotron.kit import print_complete
print("noise on stdout"); print("log", file=sys.stderr)
print_complete({{"data": "art://corpus:3"}})'"""
READ = f"""{PYTHON} -c '
from nemotron.kit import read_pipe
print(read_pipe(), read_pipe())'"""


def shell(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENV, check=False)


def test_a_map_goes_through_a_pipe_and_can_be_read_twice():
    done = shell(f"{WRITE} | {READ}")
    assert done.stdout == "{'data': 'art://corpus:3'} {'data': 'art://corpus:3'}\n"
    assert done.stderr == "log\n"


def test_a_file_works_as_a_pipe_does_and_dev_null_is_no_pipe(tmp_path):
    (tmp_path / "map.json").write_text('{"model": "m:1"}\n\n')
    assert shell(f"{READ} < {tmp_path}/map.json").stdout.startswith("{'model': 'm:1'}")
    assert shell(f"{READ} < /dev/null").stdout == "{} {}\n"
    assert shell(f"{READ} <&-").stdout == "{} {}\n"


@pytest.mark.parametrize("upstream", ["false", "echo done", "echo '[1]'", """echo '{"a": 1}'"""])
def test_a_failed_script_upstream_is_said_so(upstream):
    done = shell(f"{upstream} | {READ}")
    assert done.returncode == 1 and "the script before it in the pipe failed" in done.stderr


def test_a_reader_that_left_does_not_fail_the_writer():
    slow = WRITE.replace('print("noise on stdout")', "import time; time.sleep(0.5)")
    done = shell(f"set -o pipefail; {slow} | true")
    assert done.returncode == 0 and "Broken" not in done.stderr


def test_saved_artifacts_are_printed_as_references(out, capsys):
    dataset = Dataset(path=out, num_examples=1).save("corpus")
    print("before")
    pipes.print_complete({"data": dataset, "model": "art://m:1"})
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"data": "art://corpus:1", "model": "art://m:1"}
    with pytest.raises(ValueError, match="not been saved"):
        pipes.print_complete({"data": Dataset(path=out, num_examples=1)})


def test_a_bad_reference_is_refused():
    with pytest.raises(UserError, match="bad artifact reference"):
        pipes._parse('{"data": "s3://x"}')
