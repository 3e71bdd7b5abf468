"""The sandbox: what programs can do in it, and attacks on what they must not reach."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.environments import families, sandbox, verifiable_families
from nemotron.stack.environments.sandbox import Limits, ProgramRun, SandboxError, run_program


def _why_not() -> str:
    try:
        sandbox.check_sandbox("bubblewrap")
    except UserError as error:
        return error.message
    return ""


WHY_NOT = _why_not()
needs_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
TIERS = [pytest.param("bubblewrap", marks=needs_bubblewrap), "subprocess"]


def alone(program: str, **limits: float) -> ProgramRun:
    """Run a program that reads nothing, under bubblewrap."""
    return run_program(program, [""], limits=Limits(**limits))  # type: ignore[arg-type]


def printed(program: str) -> str:
    """What such a program prints; it has to run to its end."""
    run = alone(program)
    assert run.failure == "", run
    return run.outputs[0]


@pytest.mark.parametrize("tier", TIERS)
def test_a_program_runs_once_a_test_each_time_anew(tier: sandbox.Sandbox) -> None:
    program = "import os\nprint(int(input()) + 1, os.path.exists('seen'))"
    assert run_program(program, ["1", "41\n"], sandbox=tier).outputs == ["2 False\n", "42 False\n"]
    program = "calls = []\ndef f(x, y):\n    calls.append(x)\n    print('noise')\n    return [len(calls), x, y]"
    run = run_program(program, ['1\n"a"', "[2]\nnull"], "f", sandbox=tier)
    assert run == ProgramRun(['[1, 1, "a"]', "[1, [2], null]"], "")


@needs_bubblewrap
def test_solutions_of_programming_contests_run_as_they_are() -> None:
    program = (
        "import threading\n"
        "def main():\n    n: List[int] = list(map(int, input().split()))\n    heapify(n)\n"
        "    print(heappop(n), sqrt(4))\n    exit()\n"
        "if __name__ == '__main__':\n    t = threading.Thread(target=main)\n    t.start()\n"
    )
    assert run_program(program, ["3 1 2"], prelude=True) == ProgramRun(["1 2.0\n"], "")
    assert "raised" in run_program(program, ["3 1 2"]).failure  # without the prelude there is no List
    method = "class Solution:\n    def add(self, a: List[int]) -> int:\n        return sum(a)"
    assert run_program(method, ["[1, 2]"], "add", prelude=True).outputs == ["3"]
    deep = "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)"
    assert run_program(deep, ["20000"], "f").outputs == ["20000"]
    with_a_file = "import sys\nif len(sys.argv) > 1:\n    sys.stdin = open(sys.argv[1])\nprint(input())"
    assert run_program(with_a_file, ["3"]).outputs == ["3\n"]


@needs_bubblewrap
@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError",
        "def f(:",
        "import sys\nsys.exit(1)",
        "import os\nos._exit(3)",
        "import os\nos.abort()",
        "import numpy",
        "print(input())\nprint(input())",
        "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
    ],
)
def test_what_raises_has_no_output_where_nothing_is_expected_either(program: str) -> None:
    run = alone(program)
    assert run.outputs == [] and run.failure


@needs_bubblewrap
@pytest.mark.parametrize("name", ["Nowhere", "Fraction"])  # the second is one of `statistics`, but not of `import *`
def test_a_name_that_a_program_never_imports_is_not_there_in_annotations_either(name: str) -> None:
    for program in (f"def f(x: {name}): return x", f"def f(x): return {name} and x"):
        assert run_program(program, ["1"], "f", prelude=True).outputs == []


@pytest.mark.parametrize("tier", TIERS)
def test_a_program_that_goes_by_the_order_of_a_set_has_one_verdict(tier: sandbox.Sandbox) -> None:
    run = run_program("print(*{f'word {i}' for i in range(99)})", ["", ""], sandbox=tier)
    again = run_program("print(*{f'word {i}' for i in range(99)})", ["", ""], sandbox=tier)
    assert run.failure == "" and run == again


@needs_bubblewrap
def test_a_long_input_arrives_whole_and_a_long_output_does_not() -> None:
    text = "é" * 3_000_000
    assert run_program("print(len(input()))", [text]).outputs == ["3000000\n"]
    assert run_program("print(input())", [text]).outputs == []


@needs_bubblewrap
def test_a_test_that_fails_ends_the_run() -> None:
    assert run_program("print(1 // int(input()))", ["1", "0", "1"]) == ProgramRun(
        ["1\n"], "raised, or exited with an error"
    )
    assert run_program("def f(x):\n    return {x}", ["1"], "f").outputs == []  # a set is not JSON
    assert run_program("def f(x):\n    raise SystemExit(0)", ["1"], "f").outputs == []
    assert run_program("def g(x):\n    return x", ["1"], "f").outputs == []


# --- Attacks ----------------------------------------------------------------------------------------------------------


@needs_bubblewrap
def test_there_is_no_network() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        program = (
            "import socket\n"
            f"for address in (('127.0.0.1', {port}), ('1.1.1.1', 53)):\n"
            "    try:\n        socket.create_connection(address, 1)\n        print('connected')\n"
            "    except OSError:\n        print('refused')\n"
            "print(socket.if_nameindex())"
        )
        assert printed(program) == "refused\nrefused\n[(1, 'lo')]\n"


@needs_bubblewrap
def test_files_and_environment_of_the_caller_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("NEMOTRON_TEST_SECRET", secret)
    (tmp_path / "secret.txt").write_text(secret)
    (tmp_path / "secret.txt").chmod(0o644)
    program = f"""
import glob, os
for path in [{str(tmp_path / "secret.txt")!r}, {str(Path(__file__))!r}, "/etc/passwd", "/etc/shadow", "/home", "/sys"]:
    assert not os.path.exists(path), path
    os.symlink(path, "/tmp/link")
    assert not os.path.exists("/tmp/link")
    os.remove("/tmp/link")
assert "NEMOTRON_TEST_SECRET" not in os.environ
text = b""
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/maps"):
    try:
        text += open(path, "rb").read()
    except OSError:
        pass
for root in glob.glob("/proc/[0-9]*/root") + glob.glob("/proc/[0-9]*/cwd"):
    assert not os.path.exists(root + {str(tmp_path / "secret.txt")!r})
numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
assert max(numbers) < 20, numbers
print({secret!r}.encode() in text, b"NEMOTRON" in text)
"""
    # The secret stands in the program itself, hence in no process's memory map; its command line must not hold it.
    assert printed(program) == "False False\n"


@needs_bubblewrap
def test_nothing_can_be_written_outside_of_its_own_tmp(tmp_path: Path) -> None:
    targets = ["/usr/x", "/x", "/dev/x", "/dev/shm/x", "/proc/x", str(tmp_path / "x"), f"{sys.base_prefix}/x", "/lib/x"]
    program = f"""
import os
for path in {targets!r}:
    try:
        open(path, "w")
        print(path)
    except OSError:
        pass
for call in (lambda: os.chmod("/usr", 0o777), lambda: os.mkdir("/home"), lambda: os.rename("/usr", "/tmp/usr")):
    try:
        call()
        print("done")
    except OSError:
        pass
open("mine", "w").write("kept for this program")
print(open("/tmp/mine").read(), os.getuid() != 0)
"""
    assert printed(program) == "kept for this program True\n"
    assert printed("import os\nprint(os.listdir('/tmp'))") == "[]\n"
    assert not (tmp_path / "x").exists()


@needs_bubblewrap
def test_memory_that_belongs_to_no_process_cannot_be_had() -> None:
    # The errno of each, 0 where it succeeds; the file system is mounted in a user namespace where that can be made.
    program = """
import ctypes, os
lib = ctypes.CDLL(None, use_errno=True)
def attempt(result):
    print(ctypes.get_errno() if result < 0 else 0, end=" ")
attempt(lib.shmget(0, ctypes.c_size_t(1 << 20), 0o1600))
attempt(lib.msgget(0, 0o1600))
attempt(lib.semget(0, 1, 0o1600))
uid = os.getuid()
lib.prctl(4, 1, 0, 0, 0)  # dumpable: its uid_map is its own
lib.unshare(0x10000000 | 0x00020000)
try:
    open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
except OSError:
    pass
attempt(lib.mount(b"more", b"/tmp", b"tmpfs", 0, b"size=1g"))
attempt(lib.syscall(430, b"tmpfs", 0))
"""
    assert printed(program) == "1 1 1 1 1 "


@needs_bubblewrap
def test_a_signal_reaches_nothing_outside() -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        program = f"""
import os, signal
for pid in (1, {os.getpid()}, {bystander.pid}):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
os.kill(os.getppid(), signal.SIGKILL)
os.kill(-1, signal.SIGKILL)
"""
        run = alone(program)
        assert bystander.poll() is None
        bystander.kill()
    assert run.outputs == [] and run.failure


@needs_bubblewrap
def test_a_program_that_takes_the_driver_over_can_write_outputs_and_no_more() -> None:
    # It finds the driver's own output and writes a line there: an output like any other, of which the checker thinks
    # what it thinks of what is printed.
    forged = """
import os
for fd in range(64):
    try:
        with open(f"/proc/{os.getppid()}/fd/{fd}", "w") as out:
            out.write('{"output": "forged", "verdict": "right", "score": 1.0}\\n')
    except OSError:
        pass
os.kill(os.getppid(), 9)
"""
    run = alone(forged)
    assert set(run.outputs) <= {"forged"}
    garbage = forged.replace('{"output": "forged", "verdict": "right", "score": 1.0}', "[" * 5000)
    assert alone(garbage).outputs == []
    for early in ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "quit()"):
        assert run_program(early + "\ndef f(x):\n    return x", ["1"], "f").outputs in ([], [""])


@needs_bubblewrap
def test_the_text_of_the_checker_and_what_it_expects_is_not_in_the_sandbox() -> None:
    program = """
import gc, inspect, os, sys
frames, frame = [], sys._getframe()
while frame:
    frames.append(frame)
    frame = frame.f_back
print(sorted({name for frame in frames for name in frame.f_locals.get("job", {})}))
"""
    assert printed(program) == "['fn_name', 'inputs', 'prelude', 'program']\n"


@needs_bubblewrap
def test_no_process_stays_behind() -> None:
    name = f"left-{secrets.token_hex(8)}"
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/usr/bin/env", ["env", "sh", "-c", "sleep 30 # {name}"])
    os._exit(0)
time.sleep(0.2)
print("parent done")
"""
    assert alone(program).outputs == ["parent done\n"]
    deadline = time.monotonic() + 10  # the kernel takes a moment to end a namespace
    while _processes_with(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _processes_with(name) == []


def _processes_with(text: str) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if text in line and "def main() -> None" not in line]


@needs_bubblewrap
@pytest.mark.parametrize(
    "program",
    [
        "print('x' * 10_000_000)",
        "while True:\n    print('x' * 1000)",
        "open('/tmp/big', 'w').write('x' * 10_000_000)",
        "x = bytearray(2 << 30)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ],
)
def test_what_takes_too_much_fails(program: str) -> None:
    run = alone(program, output_bytes=1 << 20, memory_bytes=256 << 20)
    assert run.outputs == [] and run.failure


@needs_bubblewrap
def test_many_files_fill_its_own_tmp_and_nothing_else() -> None:
    program = (
        "n = 0\ntry:\n    while n < 100:\n        open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))\n        n += 1\n"
    )
    assert int(printed(program + "except OSError:\n    pass\nprint(n)")) <= 16


@needs_bubblewrap
@pytest.mark.slow
def test_endless_loops_end_at_their_limit() -> None:
    assert "processor time" in alone("while True:\n    pass", cpu_seconds=1, wall_seconds=60).failure
    assert "0.5 s" in alone("import time\ntime.sleep(100)", wall_seconds=0.5).failure
    sleepy = run_program("import time\ntime.sleep(float(input()))", ["3.5", "3.5", "99"], limits=Limits(wall_seconds=6))
    assert sleepy == ProgramRun(["", ""], "more than 6 s")  # each test has its own time
    ignores = "import signal, time\nfor s in (15, 24, 2):\n    signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert "processor time" in alone(ignores, cpu_seconds=1, wall_seconds=60).failure


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(100,)).start()",
        "import os\nx = []\nos.fork()\nos.fork()\nwhile True:\n    x.append(bytearray(1 << 20))",
    ],
)
def test_bombs_take_their_share_and_go_off_alone(bomb: str) -> None:
    run = alone(bomb, wall_seconds=2, memory_bytes=128 << 20)
    assert run.outputs == [] and run.failure
    assert printed("print(1)") == "1\n"


@needs_bubblewrap
@pytest.mark.parametrize(
    "program",
    [
        "import atexit\natexit.register(print, 5)",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint(5)",
        "import io, sys\nsys.stdout = io.StringIO()\nprint(5)\nsys.__stdout__.write(sys.stdout.getvalue())",
    ],
)
def test_what_is_written_at_the_end_counts(program: str) -> None:
    assert printed(program) == "5\n"


@needs_bubblewrap
def test_the_number_of_processes_is_limited() -> None:
    program = """
import os, time
n = 0
try:
    while n < 50:
        if os.fork() == 0:
            time.sleep(100)
        n += 1
except OSError:
    pass
print(n)
"""
    assert 1 <= int(printed(program)) < Limits().processes


# --- Where it does not work -------------------------------------------------------------------------------------------


def test_without_bubblewrap_the_error_names_the_package_and_code_generation_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    sandbox.check_sandbox.cache_clear()
    sandbox._bubblewrap.cache_clear()
    try:
        with pytest.raises(UserError, match="not installed") as caught:
            sandbox.check_sandbox("bubblewrap")
        assert caught.value.hint == "apt-get install bubblewrap"
        with pytest.raises(SandboxError):
            run_program("print(1)", [""])
        families._note_once.cache_clear()
        for _ in range(2):
            assert verifiable_families(["math", "code_generation", "multiple_choice"]) == ["math", "multiple_choice"]
        line = "code_generation is left out: code generation runs programs under bubblewrap, which is not installed; "
        assert capsys.readouterr().err == f"{line}apt-get install bubblewrap\n"  # once
        with pytest.raises(UserError, match="not installed"):
            verifiable_families(["code_generation"])
    finally:
        sandbox.check_sandbox.cache_clear()
        sandbox._bubblewrap.cache_clear()


def test_a_sandbox_that_does_not_start_says_why_and_is_no_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sandbox.check_sandbox.cache_clear()
    sandbox._bubblewrap.cache_clear()
    try:
        with pytest.raises(SandboxError, match="No permissions"):
            run_program("print(1)", [""])
        with pytest.raises(UserError, match="does not start: bwrap: No permissions"):
            sandbox.check_sandbox("bubblewrap")
    finally:
        sandbox.check_sandbox.cache_clear()
        sandbox._bubblewrap.cache_clear()


def test_ranks_of_a_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "usable_cpus", lambda: 8)
    assert sandbox.program_slots() == 8
    for ranks, slots in (("2", 4), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert sandbox.program_slots() == slots


def test_lines_come_whole_however_they_are_cut_into_blocks() -> None:
    sent = [b"ready", b"x" * 300_000, b"", b"end"]
    read_end, write_end = os.pipe()

    def write() -> None:
        with os.fdopen(write_end, "wb") as file:
            file.write(b"\n".join([*sent, b"without an end"]))

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(read_end, "rb") as stdout:
        assert list(sandbox._lines(stdout, 30.0)) == [line.decode() for line in sent]
    writer.join()
