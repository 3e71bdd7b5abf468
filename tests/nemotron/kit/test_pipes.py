"""References through real shell pipes."""

import json
import shlex
import subprocess
import sys

import pytest

from nemo_runspec.errors import UserError
from nemotron.kit import pipes
from nemotron.kit.artifact import Dataset

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
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


def test_a_map_goes_through_a_pipe_and_can_be_read_twice():
    done = shell(f"{WRITE} | {READ}")
    assert done.stdout == "{'data': 'art://corpus:3'} {'data': 'art://corpus:3'}\n"
    assert done.stderr == "log\n"


def test_a_file_works_as_a_pipe_does_and_dev_null_is_no_pipe(tmp_path):
    (tmp_path / "map.json").write_text('{"model": "m:1"}\n\n')
    assert shell(f"{READ} < {tmp_path}/map.json").stdout.startswith("{'model': 'm:1'}")
    assert shell(f"{READ} < /dev/null").stdout == "{} {}\n"
    assert shell(f"{READ} <&-").stdout == "{} {}\n"


@pytest.mark.parametrize("upstream", ["echo done", "echo '[1]'", """echo '{"a": 1}'"""])
def test_a_failed_script_upstream_is_said_so(upstream):
    done = shell(f"{upstream} | {READ}")
    assert done.returncode == 1 and "the script before it in the pipe failed" in done.stderr


def test_bytes_that_are_no_text_are_no_map() -> None:
    done = shell(f"printf '\\377\\376' | PYTHONIOENCODING=utf-8:strict {READ}")
    assert done.returncode == 1 and "the last line of stdin is not a JSON map" in done.stderr


@pytest.mark.parametrize("upstream", ["true", "echo", "printf ''"])
def test_an_empty_stdin_means_no_inputs_and_says_so(upstream):
    done = shell(f"{upstream} | {READ}")
    assert (done.returncode, done.stdout) == (0, "{} {}\n")
    assert done.stderr == "warning: nothing came through the pipe on stdin: no inputs are taken from it\n"


def test_one_pipe_cannot_feed_several_processes():
    done = shell(f"{WRITE} | WORLD_SIZE=2 RANK=1 {READ}")
    assert done.returncode == 1 and "several processes cannot read their inputs from one pipe" in done.stderr
    assert shell(f"WORLD_SIZE=2 {READ} < /dev/null").stdout == "{} {}\n"


def test_help_and_an_explicit_input_never_wait_for_stdin(script, out):
    Dataset(path=out, num_examples=1).save("raw")
    body = (
        "import sys; from nemo_runspec.config import load_script_config; from nemo_runspec.errors import run_main\n"
        "from nemotron.kit import read_pipe\n"
        "sys.exit(run_main(lambda: print(load_script_config(sys.argv.pop(1), inputs=read_pipe).run.data)))\n"
    )
    for word, said in (("--help", "Usage: "), ("run.data=raw", "raw:1\n")):
        command = [sys.executable, "-c", body, str(script), word]
        # A pipe that is never written to and never closed.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.wait(timeout=60) == 0
        assert process.stdout.read().startswith(said)
        process.stdin.close()


def test_a_stage_takes_its_model_from_a_stage_and_leaves_the_results(script, out):
    for name in ("raw", "piped"):
        Dataset(path=out, num_examples=1).save(name)
    body = (
        "import sys; from nemo_runspec.config import load_script_config; from nemotron.kit import read_pipe\n"
        "run = load_script_config(sys.argv.pop(1), inputs=read_pipe).run\n"
        "print(run.data, run.output, run.results)\n"
    )
    command = f"{PYTHON} -c {shlex.quote(body)} {shlex.quote(str(script))}"
    own = "toy-train-model-tiny toy-train-results-tiny\n"
    upstream = '{"data": "art://piped:1", "results": "art://r:1", "output": "art://o:1", "other": "art://x:1"}'
    assert shell(f"echo '{upstream}' | {command}").stdout == f"piped:1 {own}"
    assert shell(f"{command} < /dev/null").stdout == f"raw:1 {own}"
    assert shell(f"true | {command}").stdout == f"raw:1 {own}"


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
