"""env.toml: where it is found, what a profile comes to, what is refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.config.loader import LoadedConfig, load_config
from nemo_runspec.config.resolve import resolve_config
from nemo_runspec.env import artifacts_root, find_env_file, output_root
from nemo_runspec.env.file import tool_table, tool_variables
from nemo_runspec.env.keys import EXECUTOR_KEYS, PROFILE, RESERVED, TOOL
from nemo_runspec.errors import UserError
from nemo_runspec.fingerprint import fingerprint
from nemo_runspec.profile import Env, SlurmSettings, Ssh, executor_of, parse_env
from nemo_runspec.rules import TEXT, Rule, choice
from nemo_runspec.runspec import parse

Write = Callable[[str, str], Path]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = "RUNSPEC_ENV_FILE RUNSPEC_ARTIFACTS_ROOT RUNSPEC_OUTPUT_ROOT HF_TOKEN RAY_API_SERVER_ADDRESS"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Where it is, and the reserved tables


def test_without_a_file_everything_is_local(tmp_path: Path) -> None:
    assert find_env_file() is None
    assert parse_env() == parse_env(None) == Env()
    assert parse_env("local") == Env(profile="local")
    assert output_root() == tmp_path / "output"
    assert artifacts_root() == tmp_path / "output" / "artifacts"


def test_the_nearest_file_upwards_counts_and_the_variable_goes_before_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = write("env.toml", '[artifacts]\nroot = "store"')
    write("a/b/.keep", "")
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find_env_file() == outer
    assert artifacts_root() == tmp_path / "store"  # relative to the file, not to the current directory
    inner = write("a/env.toml", "")
    assert find_env_file() == inner
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(outer))
    assert find_env_file() == outer
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "third"))
    assert artifacts_root() == tmp_path / "third"
    monkeypatch.setenv("RUNSPEC_ENV_FILE", "nowhere.toml")
    with pytest.raises(UserError, match=r"RUNSPEC_ENV_FILE=nowhere\.toml"):
        parse_env()


def test_a_table_of_another_program_is_checked_by_its_own_rules(write: Write) -> None:
    rules = {"project": TEXT, "mode": choice("online", "offline")}
    assert tool_table("tracker", rules) is None and tool_variables() == {}
    write("env.toml", '[tool.tracker]\nproject = "toy"\nmode = "offline"\n[tool.my-db]\nport = 3\n')
    assert tool_table("tracker", rules) == {"project": "toy", "mode": "offline"}
    values = {"TRACKER_PROJECT": "toy", "TRACKER_MODE": "offline", "MY_DB_PORT": "3"}
    assert tool_variables() == values | {"RUNSPEC_TOOL_TABLES": "tracker,my-db"}
    for line, message in (
        ("projct = 1", "[tool.tracker] unknown key 'projct'"),
        ('mode = "off"', "[tool.tracker] mode = 'off'"),
    ):
        file = write("env.toml", f"[tool.tracker]\n{line}\n")
        with pytest.raises(UserError) as caught:
            tool_table("tracker", rules)
        assert caught.value.message.startswith(f"{file}:2: {message}")
        assert caught.value.hint in ("did you mean project?", "did you mean offline?")


def test_a_password_of_another_program_does_not_travel_but_holds_here(write: Write) -> None:
    file = write("env.toml", '[tool.tracker]\nproject = "toy"\nserver = {uri = "https://me:x@host"}\n')
    assert tool_table("tracker", {"project": TEXT, "server": Rule(dict, "")}) is not None
    with pytest.raises(UserError, match=rf"^{file}:3: \[tool\.tracker\] server: an address with a password") as caught:
        tool_variables()
    assert caught.value.hint is not None and 'secrets = ["TRACKER_SERVER"]' in caught.value.hint


def test_a_job_without_the_file_has_the_table_of_another_program(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {"project": TEXT, "entity": TEXT, "mode": choice("online", "offline")}
    write("env.toml", '[tool.tracker]\nproject = "toy"\nmode = "offline"\n')
    sent = tool_variables()
    (tmp_path / "env.toml").unlink()
    monkeypatch.setenv("TRACKER_PROJECT", "of the shell")  # which alone switches nothing on
    assert tool_table("tracker", rules) is None
    for name, value in sent.items():
        monkeypatch.setenv(name, value)
    assert tool_table("tracker", rules) == {"project": "toy", "mode": "offline"}
    assert tool_table("other", rules) is None
    write("env.toml", "[a typo, saved while the job waits]")
    monkeypatch.setenv("RUNSPEC_CODE_DIGEST", "c0de")  # the job starts where it was submitted
    assert tool_table("tracker", rules) == {"project": "toy", "mode": "offline"}


# What a profile comes to


def test_a_profile_extends_others(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "env.toml",
        """
        [base]
        executor = "local"
        env = { A = "1", B = "1" }
        secrets = ["HF_TOKEN"]
        startup_commands = ["one"]
        [mid]
        extends = "base"
        env = { B = "2" }
        startup_commands = ["two", "three"]
        [top]
        extends = "mid"
        env = { C = "3" }
        secrets = ["OTHER"]
        [cli]
        color = false
        """,
    )
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("OTHER", "s3cret")
    env = parse_env("top")
    assert env.variables == {"A": "1", "B": "2", "C": "3"}
    assert env.secrets == ("HF_TOKEN", "OTHER")
    assert env.startup_commands == ("two", "three")
    assert env.color is False
    assert "s3cret" not in repr(env)


FULL = """
[base]
account = "research"
run_partition = "interactive"
batch_partition = "batch"
[here]
extends = "base"
executor = "slurm"
nodes = 2
gpus_per_node = 4
cpus_per_task = 16
mem = "64G"
exclusive = true
time = "1-12:00:00"
qos = "high"
constraint = "h100&nvlink"
container_image = "nvcr.io/nvidia/pytorch:25.06-py3"
mounts = ["/lustre:/lustre", "/data:/data:ro"]
signal = "TERM@60"
max_restarts = 0
launcher = "ft_launcher"
launcher_options = ["--max-restarts=3"]
job_dir = "jobs"
code_limit = "1.5GB"
artifacts = "s3://bucket/a"
[there]
extends = "here"
tunnel = "ssh"
host = "login.example.org"
user = "me"
port = 2222
identity = "key"
job_dir = "/lustre/jobs/"
[bare]
executor = "slurm"
"""


def test_every_key_of_slurm(write: Write, tmp_path: Path) -> None:
    write("env.toml", FULL)
    write("key", "")
    here = SlurmSettings(
        account="research",
        partition="interactive",
        nodes=2,
        gpus_per_node=4,
        processes_per_node=4,
        cpus_per_task=16,
        mem="64G",
        exclusive=True,
        time="1-12:00:00",
        qos="high",
        constraint="h100&nvlink",
        container_image="nvcr.io/nvidia/pytorch:25.06-py3",
        mounts=("/lustre:/lustre", "/data:/data:ro"),
        signal="TERM@60",
        max_restarts=0,
        job_dir=str(tmp_path / "jobs"),
        ssh=None,
        launcher="ft_launcher",
        launcher_options=("--max-restarts=3",),
    )
    env = parse_env("here")
    assert env.slurm == here
    assert (env.executor, env.code_limit) == ("slurm", 1_500_000_000)
    assert (env.output, env.artifacts) == (str(tmp_path / "output"), "s3://bucket/a")
    batch = parse_env("there", batch=True).slurm
    assert batch is not None
    assert batch.partition == "batch"
    assert batch.job_dir == "/lustre/jobs"
    assert batch.ssh == Ssh("login.example.org", "me", 2222, str(tmp_path / "key"))
    assert set(EXECUTOR_KEYS["slurm"]) <= set(re.findall(r"^(\w+) =", FULL, re.MULTILINE)) | {
        "partition",
        "processes_per_node",
    }


def test_what_slurm_is_asked_for_unsaid(write: Write, tmp_path: Path) -> None:
    write("env.toml", FULL)
    env = parse_env("bare")
    assert env.slurm == SlurmSettings(job_dir=str(tmp_path / "output" / "jobs"))
    assert env.slurm.signal == "USR1@120"
    assert env.slurm.max_restarts == 3
    assert env.code_limit == 100_000_000


def test_ray_and_the_variable_before_its_address(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("env.toml", '[r]\nexecutor = "ray"\naddress = "http://head:8265"\n[q]\nexecutor = "ray"\n')
    assert parse_env("r").ray == "http://head:8265"
    with pytest.raises(UserError, match=r"env\.toml:5: \[q\] executor = 'ray': no address"):
        parse_env("q")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://other:8265")
    assert parse_env("r").ray == parse_env("q").ray == "http://other:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "other:8265")
    with pytest.raises(UserError, match=r"RAY_API_SERVER_ADDRESS=other:8265: must be the address"):
        parse_env("r")


def test_only_a_ray_cluster_has_the_secrets_itself(write: Write) -> None:
    ray = '[r]\nexecutor = "ray"\naddress = "http://head:8265"\nsecrets = ["HF_TOKEN"]\n'
    write("env.toml", ray + '[s]\nexecutor = "slurm"\nsecrets = ["HF_TOKEN"]\n')
    assert parse_env("r").secrets == ("HF_TOKEN",)
    with pytest.raises(UserError, match="profile s: the environment does not set HF_TOKEN"):
        parse_env("s")


SSH = 'executor = "slurm"\ntunnel = "ssh"\nhost = "h"\nuser = "u"\njob_dir = "/there/jobs"\n'


@pytest.mark.parametrize(
    ("profile", "tables", "variable", "artifacts", "reachable"),
    [
        ('executor = "slurm"', "", "", "{here}/output/artifacts", True),
        ('executor = "slurm"', '[artifacts]\nroot = "store"', "", "{here}/store", True),
        ('executor = "slurm"', '[artifacts]\nroot = "store"', "{here}/named", "{here}/named", True),
        ('executor = "slurm"\nartifacts = "own"', '[artifacts]\nroot = "store"', "/named", "{here}/own", True),
        ('executor = "ray"\naddress = "http://h:1"', "", "", "{here}/output/artifacts", True),
        (SSH, "", "", "/there/jobs/output/artifacts", False),
        (SSH, '[artifacts]\nroot = "store"', "{here}/named", "/there/jobs/output/artifacts", False),
        (SSH, '[artifacts]\nroot = "~/store"', "", "/there/jobs/output/artifacts", False),
        (SSH, '[artifacts]\nroot = "/lustre/store"', "{here}/named", "/lustre/store", False),
        (SSH, '[artifacts]\nroot = "/lustre/store"', "s3://b/a", "s3://b/a", True),
        (SSH, '[artifacts]\nroot = "s3://b/a"', "", "s3://b/a", True),
        (SSH + 'artifacts = "gs://b/a/"', '[artifacts]\nroot = "s3://b/a"', "", "gs://b/a", True),
        (SSH + 'artifacts = "/lustre/own"', '[artifacts]\nroot = "s3://b/a"', "s3://c/a", "/lustre/own", False),
        ('artifacts = "own"', "", "/named", "{here}/own", True),
        ("", '[artifacts]\nroot = "store"', "", None, True),
    ],
)
def test_the_registry_as_the_job_sees_it(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    tables: str,
    variable: str,
    artifacts: str | None,
    reachable: bool,
) -> None:
    write("env.toml", f"[p]\n{profile}\n{tables}\n")
    if variable:
        monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", variable.format(here=tmp_path))
    env = parse_env("p")
    assert env.artifacts == (artifacts and artifacts.format(here=tmp_path))
    assert env.registry_is_reachable is reachable


@pytest.mark.parametrize("name", ["RUNSPEC_OUTPUT_ROOT", "RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_ENV_FILE"])
def test_a_home_of_nobody_is_refused_with_who_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "~nouser/x")
    with pytest.raises(UserError, match=f"^{name}=~nouser/x: there is no user 'nouser'"):
        artifacts_root()


def test_a_home_of_nobody_in_the_file_is_refused_with_the_file(write: Write) -> None:
    file = write("env.toml", '[artifacts]\nroot = "~nouser/x"\n')
    with pytest.raises(UserError, match=f"^{file}: ~nouser/x: there is no user 'nouser'"):
        artifacts_root()


def test_the_port_of_an_address_is_one() -> None:
    rule = EXECUTOR_KEYS["ray"]["address"]
    assert [port for port in range(70_000) if rule.allows(f"http://head:{port}")] == [*range(1, 65_536)]
    for address in ("http://head", "https://head/ray", "http://[::1]:8265/", "http://me:x@10.0.0.1:8265"):
        assert rule.allows(address)
    for address in ("http://head:", "http://head:x", "http://head:8265x", "http://[::1]:99999", "http://:8265"):
        assert not rule.allows(address)


def test_the_output_root_and_the_cache_as_the_job_sees_them(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = '[cache]\ndir = "downloads"\n'
    text = (
        f'{cache}[s]\nexecutor = "slurm"\n[t]\n{SSH}[u]\nextends = "t"\nenv = {{ RUNSPEC_OUTPUT_ROOT = "/scratch" }}\n'
    )
    write("env.toml", text)
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "runs"))
    assert (parse_env("s").output, parse_env("s").cache_dir) == (str(tmp_path / "runs"), tmp_path / "downloads")
    assert (parse_env("t").output, parse_env("t").cache_dir) == ("/there/jobs/output", None)
    assert (parse_env("u").output, parse_env("u").artifacts) == ("/scratch", "/scratch/artifacts")
    write("env.toml", text.replace("downloads", "/lustre/downloads"))
    assert parse_env("t").cache_dir == Path("/lustre/downloads")


@pytest.mark.parametrize(
    ("size", "count"),
    [("0B", 0), ("5B", 5), ("1.5KB", 1500), ("200MB", 200_000_000), ("200 MB", 200_000_000), ("2GiB", 2**31)],
)
def test_sizes(write: Write, size: str, count: int) -> None:
    write("env.toml", f'[p]\ncode_limit = "{size}"')
    assert parse_env("p").code_limit == count


def test_the_executor_alone_asks_for_nothing_else(write: Write) -> None:
    write("env.toml", '[s]\nexecutor = "slurm"\ntunnel = "ssh"\nsecrets = ["HF_TOKEN"]\n[t]\nextends = "s"\n')
    assert [executor_of(profile) for profile in (None, "local", "s", "t")] == ["local", "local", "slurm", "slurm"]
    with pytest.raises(UserError, match="unknown profile 'u'"):
        executor_of("u")


# Which source wins


def configured(write: Write, block: str = "", *overrides: str) -> LoadedConfig:
    path = write("configs/c.yaml", f"run:\n  env: {{{block}}}\n")
    return load_config(path.parent, "c", overrides)


@pytest.mark.parametrize(
    ("key", "in_line", "in_profile", "in_yaml", "in_script"),
    [
        ("nodes", 5, 4, 3, 2),
        ("gpus_per_node", 5, 4, 3, 7),
        ("processes_per_node", 5, 4, 3, 7),  # of the script: gpus_per_node
        ("partition", "line", "profile", "yaml", None),
        ("max_restarts", 5, 4, 0, None),
        ("exclusive", False, True, True, None),
        ("mounts", ["/l:/l"], ["/p:/p"], ["/y:/y"], None),
    ],
)
def test_precedence_of_the_four_sources(
    write: Write, key: str, in_line: Any, in_profile: Any, in_yaml: Any, in_script: Any
) -> None:
    write("env.toml", f'[p]\nexecutor = "slurm"\n{key} = {toml(in_profile)}\n[q]\nexecutor = "slurm"\n')
    spec = parse(
        write(
            "script.py",
            """
            # /// script
            # [tool.runspec]
            # schema = "1"
            # name = "a/b"
            # image = "script"
            # [tool.runspec.run]
            # launch = "torchrun"
            # [tool.runspec.resources]
            # nodes = 2
            # gpus_per_node = 7
            # ///
            """,
        )
    )

    def value(profile: str, config: bool, line: bool) -> Any:
        loaded = configured(
            write, f"{key}: {toml(in_yaml)}" if config else "", *([f"run.env.{key}={toml(in_line)}"] * line)
        )
        found = getattr(parse_env(profile, spec=spec, loaded=loaded).slurm, key)
        return list(found) if isinstance(found, tuple) else found

    config_first = key in ("nodes", "gpus_per_node", "container_image", "processes_per_node")
    assert value("p", config=True, line=True) == in_line
    assert value("p", config=True, line=False) == (in_yaml if config_first else in_profile)
    assert value("p", config=False, line=False) == in_profile
    assert value("q", config=True, line=False) == in_yaml
    fallback = list(default) if isinstance(default := getattr(SlurmSettings(), key), tuple) else default
    assert value("q", config=False, line=False) == (fallback if in_script is None else in_script)


def test_a_direct_script_gets_one_node(write: Write) -> None:
    write("env.toml", '[p]\nexecutor = "slurm"\nnodes = 4\n')
    block = '# /// script\n# [tool.runspec]\n# schema = "1"\n# name = "a/b"\n# ///\n'
    slurm = parse_env("p", spec=parse(write("script.py", block))).slurm
    assert slurm is not None and slurm.nodes == 1
    write("env.toml", '[p]\nexecutor = "another"\nnodes = 4\n')
    assert parse_env("p", spec=parse(write("script.py", block)), executors=("another",)).table["nodes"] == 1


@pytest.mark.parametrize(
    ("block", "in_config", "in_line", "gpus"),
    [(0, None, None, 0), (4, None, None, 8), (0, 2, None, 2), (0, 2, 3, 3), (0, None, 3, 3), (4, 0, None, 0)],
)
@pytest.mark.parametrize("executor", ["slurm", "another"])
def test_gpus_of_a_profile_are_not_for_a_script_that_uses_none(
    write: Write, executor: str, block: int, in_config: int | None, in_line: int | None, gpus: int
) -> None:
    write("env.toml", f'[p]\nexecutor = "{executor}"\nnodes = 2\ngpus_per_node = 8\n')
    spec = parse(
        write(
            "script.py",
            f"""
            # /// script
            # [tool.runspec]
            # name = "a/b"
            # [tool.runspec.run]
            # launch = "ray"
            # [tool.runspec.resources]
            # gpus_per_node = {block}
            # ///
            """,
        )
    )
    config = "" if in_config is None else f"gpus_per_node: {in_config}"
    loaded = configured(write, config, *([] if in_line is None else [f"run.env.gpus_per_node={in_line}"]))
    env = parse_env("p", spec=spec, loaded=loaded, executors=(executor,))
    machines = env.table if env.slurm is None else vars(env.slurm)
    assert (machines["nodes"], machines["gpus_per_node"], machines["processes_per_node"]) == (2, gpus, gpus or 1)


def toml(value: Any) -> str:
    """A value as TOML and YAML both spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else repr(value)


def test_a_partition_goes_before_those_of_a_later_source(write: Write) -> None:
    write("env.toml", FULL)

    def partitions(profile: str, *overrides: str) -> list[str | None]:
        """For --run and for --batch."""
        loaded = configured(write, "partition: yaml, batch_partition: yaml-batch", *overrides)
        both = (parse_env(profile, batch=batch, loaded=loaded).slurm for batch in (False, True))
        return [slurm.partition for slurm in both if slurm is not None]

    assert partitions("here", "run.env.partition=line") == ["line", "line"]
    assert partitions("here", "run.env.batch_partition=line") == ["interactive", "line"]
    assert partitions("here") == ["interactive", "batch"]
    assert partitions("bare") == ["yaml", "yaml-batch"]


def test_null_asks_for_none_of_it(write: Write) -> None:
    write("env.toml", FULL)
    line = ("run.env.container_image=null", "run.env.time=null", "run.env.gpus_per_node=0", "run.env.nodes=null")
    slurm = parse_env("here", loaded=configured(write, "", *line)).slurm
    assert slurm is not None
    assert (slurm.container_image, slurm.time, slurm.gpus_per_node, slurm.nodes) == (None, None, 0, 1)
    assert slurm.processes_per_node == 1
    loaded = configured(write, 'container_image: ""')
    assert getattr(parse_env("here", loaded=loaded).slurm, "container_image", "?") is None


def test_the_command_line_spells_text_as_a_number_and_a_variable_a_number_as_text(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("env.toml", FULL)
    monkeypatch.setenv("MY_NODES", "3")
    loaded = configured(write, "nodes: '${oc.env:MY_NODES}'", "run.env.time=30", "run.env.qos=7")
    slurm = parse_env("bare", loaded=loaded).slurm
    assert slurm is not None
    assert (slurm.nodes, slurm.time, slurm.qos) == (3, "30", "7")


def test_a_config_may_hold_what_this_executor_has_no_use_for_but_the_command_line_may_not(write: Write) -> None:
    write("env.toml", '[r]\nexecutor = "ray"\naddress = "http://h:1"\n')
    assert parse_env(loaded=configured(write, "nodes: 2")) == Env(file=find_env_file())
    assert parse_env("r", loaded=configured(write, "nodes: 2")).ray == "http://h:1"
    with pytest.raises(UserError) as caught:
        parse_env("r", loaded=configured(write, "", "run.env.nodes=2"))
    assert caught.value.message == "command line: run.env.nodes: a key of executor slurm, and profile r is ray"
    with pytest.raises(UserError, match="a key of executor slurm, and without a profile the job is local"):
        parse_env(loaded=configured(write, "", "run.env.nodes=2"))


@pytest.mark.parametrize(
    ("block", "override", "message", "hint"),
    [
        ("noeds: 2", "", "c.yaml:2: unknown key run.env.noeds", "did you mean run.env.nodes?"),
        ("", "run.env.particion=x", "command line: unknown key run.env.particion", "did you mean run.env.partition?"),
        ("qqqq: 1", "", "c.yaml:2: unknown key run.env.qqqq", "known keys: account, partition"),
        ("nodes: two", "", "c.yaml:2: run.env.nodes = 'two': must be an integer >= 1", None),
        ("tunnel: shs", "", "run.env.tunnel = 'shs': must be one of local, ssh", "did you mean ssh?"),
        ("", "run.env=5", "command line: run.env = 5: must be a group of keys", "as in run.env.nodes=2"),
        ("secrets: [A]", "", "run.env.secrets: belongs in a profile of env.toml", None),
        ("nodes: '${oc.env:HF_TOKEN}'", "", "looks like a secret", None),
    ],
)
def test_faults_of_a_config_are_named_in_a_dry_run_too(
    project: Path, write: Write, block: str, override: str, message: str, hint: str | None
) -> None:
    overrides = [override] if override else []
    write("config/c.yaml", f"run:\n  env: {{{block}}}\n")
    loaded = load_config(project / "config", "c", overrides)
    for refuse in (
        lambda: parse_env(loaded=loaded),
        lambda: resolve_config(loaded, parse(project / "train.py"), look_up=False),
    ):
        with pytest.raises(UserError) as caught:
            refuse()
        assert message in caught.value.message
        if hint is not None:
            assert hint in (caught.value.hint or "")


def test_what_a_job_asks_for_is_in_its_config_but_not_in_its_fingerprint(project: Path, write: Write) -> None:
    write("config/c.yaml", "run:\n  env: {nodes: 2}\n")
    spec = parse(project / "train.py")
    plain, other = (
        resolve_config(load_config(project / "config", "c", words), spec) for words in ([], ["run.env.nodes=3"])
    )
    assert (plain.run["env"], other.run["env"]) == ({"nodes": 2}, {"nodes": 3})
    assert fingerprint(plain.data, spec.script_path, {}) == fingerprint(other.data, spec.script_path, {})


# Mistakes, each with file, line, key and the nearest that is right

SLURM = '[p]\nexecutor = "slurm"\n'


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        # unknown keys and tables
        ('[p]\n\nexecutr = "local"', 3, "[p] unknown key 'executr'", "did you mean executor?"),
        ('[p]\n[q]\nnods = 2\nexecutor = "slurm"', 3, "[q] unknown key 'nods'", "did you mean nodes?"),
        ("[p]\nqqqqqqq = 2", 2, "[p] unknown key 'qqqqqqq'", "known keys: executor, extends"),
        ("[p]\n[p.slurm]\nnodes = 2", 2, "[p] unknown key 'slurm'", None),
        ('[p]\n[artifact]\nroot = "x"', 3, "[artifact] unknown key 'root'", "root is a key of [artifacts]"),
        ('[p]\n[artifacts]\nrot = "x"', 3, "[artifacts] unknown key 'rot'", "did you mean root?"),
        ('[p]\n[cache]\npath = "x"', 3, "[cache] unknown key 'path'", "known keys: dir"),
        ("[p]\n[tool.db]\napi_key = 1", 3, "[tool.db] api_key: looks like a secret", 'secrets = ["DB_API_KEY"]'),
        ('[p]\n[[tool.db.at]]\nme.password = "x"', 3, "[tool.db] at.me.password: looks like a", "DB_AT_ME_PASSWORD"),
        ("[p]\n[tool]\ndb = 1", 3, "[tool] db: must be a table", None),
        ('[db]\ncolour = "red"', 2, "[db] unknown key 'colour'", "a table for another program is called [tool.db]"),
        ("[p]\n[cli]\ncolour = true", 3, "[cli] unknown key 'colour'", "did you mean color?"),
        # stray values
        ("# first\nx = 1\n[p]", 2, "x = 1 stands outside a table", "a profile is a table, as in [local]"),
        ("[[p]]\nnodes = 2", 1, "p = [{'nodes': 2}] stands outside a table", None),
        # not TOML
        ('[p]\nexecutor = "slurm', 2, "bad TOML", None),
        ("[p]\nnodes = 1\nnodes = 2", 3, "bad TOML: cannot overwrite a value", None),
        # executors
        (
            '[p]\nexecutor = "slrum"',
            2,
            "[p] executor = 'slrum': must be one of local, slurm, ray",
            "did you mean slurm?",
        ),
        ("[p]\nextends = 1", 2, "[p] extends = 1: must be a string that is not empty", None),
        ('[p]\nexecutor = "local"\nnodes = 2', 3, "[p] nodes: a key of executor slurm", "keys of local: none"),
        ("[p]\nexecutor = 1", 2, "[p] executor = 1: must be a string without spaces", None),
        # of an executor that is not known here, what every profile may have is checked all the same
        ('[p]\nexecutor = "cloud"\nzone = 2\nsecrets = "x"', 4, "[p] secrets: must be a list", None),
        # keys of another executor
        (
            SLURM + 'address = "http://h:1"',
            3,
            "[p] address: a key of executor ray, and [p] has executor slurm",
            "keys of slurm: account, partition",
        ),
        (
            '[p]\nexecutor = "ray"\nnodes = 2',
            3,
            "[p] nodes: a key of executor slurm, and [p] has executor ray",
            "address",
        ),
        (
            "[p]\nnodes = 2",
            2,
            "[p] nodes: a key of executor slurm, and [p] names no executor, so it is local",
            'write executor = "slurm"',
        ),
        (
            '[base]\nnodes = 2\n[p]\nextends = "base"\nexecutor = "ray"',
            2,
            "[base] nodes: a key of executor slurm, and [p] has executor ray",
            None,
        ),
        # parents
        ('[p]\nextends = "qiet"\n[quiet]', 2, "[p] extends = 'qiet': unknown profile 'qiet'", "did you mean quiet?"),
        ('[p]\nextends = "cache"\n[cache]', 2, "[cache] is a reserved table, not a profile", None),
        ('[p]\nextends = "q"\n[q]\nextends = "p"', 4, "profiles extend each other: p -> q -> p", None),
        (
            '[p]\n[a]\nextends = "b"\n[b]\nextends = "c"\n[c]\nextends = "b"',
            7,
            "extend each other: a -> b -> c -> b",
            None,
        ),
        # environment
        ("[p]\nenv = { A = 1 }", 2, "[p] env.A = 1: must be a string", 'in quotes, as in env = { A = "…" }'),
        ('[p]\nenv = { "A-B" = "1" }', 2, "[p] env.A-B: is not a name of an environment variable", None),
        ('[p]\nenv = "A=1"', 2, "[p] env: must be a table of strings", None),
        ('[p]\nenv = { A = "1" }\nsecrets = ["A"]', 2, "[p] env.A: stands under secrets too", 'secrets = ["A"] passes'),
        (SLURM + 'env = { HF_TOKEN = "x" }', 3, "[p] env.HF_TOKEN: looks like a secret", 'secrets = ["HF_TOKEN"]'),
        (SLURM + 'env = { P = "http://u:x@h" }', 3, "[p] env.P: an address with a password", 'secrets = ["P"]'),
        ('[p]\nstartup_commands = ["P=http://u:x@h"]', 2, "[p] startup_commands: an address with", "write $NAME"),
        ('[p]\nsecrets = "A"', 2, "[p] secrets: must be a list of strings", None),
        ('[p]\nsecrets = ["HF_TOKEN"]', None, "profile p: the environment does not set HF_TOKEN", "env.toml:2: [p]"),
        ('[p]\nstartup_commands = ["ls", " "]', 2, "[p] startup_commands: must be a list of strings", None),
        # values
        ('[p]\ncode_limit = "200"', 2, "[p] code_limit = '200': must be a size as \"200MB\"", None),
        (SLURM + "nodes = 0", 3, "[p] nodes = 0: must be an integer >= 1", None),
        (SLURM + "nodes = true", 3, "[p] nodes = true: must be an integer >= 1", None),
        (SLURM + "gpus_per_node = -1", 3, "must be an integer >= 0", None),
        (SLURM + 'mem = "64 GB"', 3, 'must be a size as Slurm has it, as "64G"', None),
        (SLURM + "exclusive = 1", 3, "[p] exclusive = 1: must be true or false", None),
        (SLURM + "time = 04:00:00", 3, "[p] time = 04:00:00: must be a time as Slurm has it, in quotes", None),
        (SLURM + 'time = "4h"', 3, "[p] time = '4h': must be a time", None),
        (SLURM + 'account = ""', 3, "[p] account = '': must be a string without spaces", None),
        (SLURM + 'mounts = ["a:/b"]', 3, "[p] mounts = ['a:/b']: must be a list", None),
        (SLURM + 'mounts = ["/a:/b,/c:/d"]', 3, "must be a list", None),
        (SLURM + 'signal = "USR1"\nmax_restarts = "3"', 4, "[p] max_restarts = '3': must be an integer", None),
        (SLURM + 'signal = "KILL@60"', 3, "[p] signal = 'KILL@60': must be USR1@SECONDS or TERM@SECONDS", None),
        (SLURM + 'container_image = "a b"', 3, "must be an image without spaces", None),
        (SLURM + 'tunnel = "shh"', 3, "[p] tunnel = 'shh': must be one of local, ssh", "did you mean ssh?"),
        ('[p]\nexecutor = "ray"\naddress = "head:8265"', 3, "[p] address = 'head:8265': must be the address", None),
        (
            '[p]\nexecutor = "ray"\naddress = "http://head:65536"',
            3,
            "[p] address = 'http://head:65536': must be the address of the dashboard, as \"http://head:8265\" (ports",
            None,
        ),
        ("[p]\n[cli]\ncolor = 'no'", 3, "[cli] color = 'no': must be true or false", None),
        ("[p]\n[cache]\ndir = ''", 3, "[cache] dir = '': must be a string that is not empty", None),
        # ssh
        (SLURM + 'host = "h"', 3, "[p] host: is for an ssh login, and no tunnel is asked for", 'write tunnel = "ssh"'),
        (SLURM + 'tunnel = "ssh"', 3, '[p] tunnel = "ssh" also needs host, user, job_dir', None),
        (SLURM + 'tunnel = "ssh"\nhost = "me@h"', 4, "[p] host = 'me@h': must be a host name without user", None),
        (SLURM + 'tunnel = "ssh"\nhost = "-oProxyCommand=x"', 4, "must be a host name", None),
        (SLURM + 'tunnel = "ssh"\nport = 70000', 4, "[p] port = 70000: must be an integer from 1 to 65535", None),
        ("[p]\n" + SSH.replace("/there", "there"), 6, "job_dir = 'there/jobs': must be an absolute path on the", None),
        ("[p]\n" + SSH + 'artifacts = "~/a"', 7, "artifacts = '~/a': must be an absolute path on the cluster", None),
        ("[p]\n" + SSH + 'identity = "nokey"', 7, "[p] identity = 'nokey': no such file", None),
    ],
)
def test_faults_are_named(write: Write, text: str, line: int | None, message: str, hint: str | None) -> None:
    path = write("env.toml", text)
    with pytest.raises(UserError) as caught:
        parse_env("p")
    assert message in caught.value.message
    if line is not None:
        assert caught.value.message.startswith(f"{path}:{line}: ")
    if hint is not None:
        assert hint in (caught.value.hint or "")
    assert "\n" not in caught.value.message


def test_a_tunnel_that_a_profile_switches_off(write: Write) -> None:
    write("env.toml", f'[far]\n{SSH}[near]\nextends = "far"\ntunnel = "local"\n')
    env = parse_env("near")
    assert env.slurm is not None
    assert env.slurm.ssh is None
    assert env.registry_is_reachable


def test_an_unknown_profile_is_answered_with_the_nearest(write: Write) -> None:
    write("env.toml", "[quiet]\n[cli]")
    with pytest.raises(UserError, match="unknown profile 'quit'") as caught:
        parse_env("quit")
    assert caught.value.hint == "did you mean quiet?"
    with pytest.raises(UserError, match=r"unknown profile 'cli': \[cli\] of env\.toml is a reserved table"):
        parse_env("cli")


@pytest.mark.parametrize(
    "text",
    [
        '[p]\nsecrets = ["hf_abc-123!"]',
        '[p]\nsecrets = "hf_abc"',
        '[p]\nenv = { HF_TOKEN = ["hf_abc"] }',
        '[p]\nenv = "HF_TOKEN=hf_abc"',
        '[p]\nHF_TOKEN = "hf_abc"',
        '[p]\nstartup_commands = "export HF_TOKEN=hf_abc"',
        '[p]\nstartup_commands = ["module load x && export HF_TOKEN=hf_abc"]',
        '[p]\nstartup_commands = ["(HF_TOKEN=hf_abc true)"]',
        'HF_TOKEN = "hf_abc"\n[p]',
        '[p]\nexecutor = "slurm"\nenv = { HF_TOKEN = "hf_abc" }',
        '[p]\nexecutor = "slurm"\nartifacts = "s3://me:hf_abc@bucket/a"',
        '[p]\nsecrets = ["HF_TOKEN"]\nenv = { HF_TOKEN = "hf_abc" }',
        '[p]\nexecutor = "slurm"\nenv = { HTTPS_PROXY = "http://me:hf_abc@proxy:3128" }',
        '[p]\nstartup_commands = ["export ALL_PROXY=http://me:hf_abc@proxy"]',
        '[p]\n[tool.tracker.login]\npassword = "hf_abc"',
    ],
)
def test_a_secret_pasted_as_a_value_is_not_repeated(write: Write, text: str) -> None:
    write("env.toml", text)
    with pytest.raises(UserError) as caught:
        parse_env("p")
    assert "hf_abc" not in str(caught.value)


def test_a_startup_command_may_read_a_secret(write: Write) -> None:
    commands = [
        "export HF_TOKEN=$(cat /run/hf)",
        'export HF_TOKEN="$MY_TOKEN"',
        "HF_TOKEN=`cat /run/hf`",
        "module load x",
        "export ALL_PROXY=http://me:$PW@proxy:3128 HTTP_PROXY=http://${ME:-x}:${PW}@proxy",
        "git clone ssh://git@host:22/a && curl http://host:80/a@b",
    ]
    commands += ["export HF_TOKEN_PATH=/run/hf", "unset X; HF_TOKEN= true"]
    write("env.toml", f"[p]\nstartup_commands = {commands!r}")
    assert parse_env("p").startup_commands == tuple(commands)


# The example


def uncommented() -> str:
    """env.example.toml with its commented-out examples (`#key`, no space) switched on."""
    return re.sub(r"^#(?=[^ \n])", "", (ROOT / "env.example.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_example_has_every_key_and_is_valid_as_it_is_and_with_all_its_examples(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = tomllib.loads(uncommented())
    profiles = {name: table for name, table in tables.items() if name not in (TOOL, *RESERVED)}
    assert {key for table in profiles.values() for key in table} == set(PROFILE)
    assert {name: set(tables[name]) for name in RESERVED} == {name: set(keys) for name, keys in RESERVED.items()}
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(".ssh/id_ed25519", "")
    for text in (uncommented(), (ROOT / "env.example.toml").read_text(encoding="utf-8")):
        write("env.toml", text)
        executors = {name: parse_env(name).executor for name in profiles}
        assert executors == {
            "quiet": "local", "gated": "local", "ray": "ray",
            **dict.fromkeys(("slurm", "slurm-ssh", "dgx", "slurm-venv"), "slurm"),
        }  # fmt: skip


def test_the_guide_has_every_key() -> None:
    guide = (ROOT / "docs/guides/env-toml.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", guide, re.MULTILINE)
    keys = {*PROFILE, "tool", *(f"{table}.{key}" for table, known in RESERVED.items() for key in known)}
    assert sorted(rows) == sorted(keys)
