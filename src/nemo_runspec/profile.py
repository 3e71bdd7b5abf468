"""A profile with all that it extends, over and under the other sources: what a job asks its executor for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.run_env import run_env
from nemo_runspec.env.file import chain_of, check_executor, load_tables, owner_of, profiles_of
from nemo_runspec.env.keys import CODE_LIMIT, CONFIG_FIRST, EXECUTOR_KEYS, EXECUTORS, GENERAL, RESERVED, TOOL
from nemo_runspec.env.roots import is_url, located_path, located_root, output_root
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.runspec import Resources, Runspec
from nemo_runspec.secrets import has_password, looks_secret, without_login
from nemo_runspec.toml_text import TomlText
from nemo_runspec.variables import ARTIFACTS_ROOT, OUTPUT_ROOT

if TYPE_CHECKING:
    from nemo_runspec.config.loader import LoadedConfig

RAY_API_SERVER = "RAY_API_SERVER_ADDRESS"  # Ray's own name for it


@dataclass(frozen=True)
class Ssh:
    """The login node that jobs are submitted from. `identity` is the file of the private key, where not ssh's own."""

    host: str
    user: str
    port: int | None = None
    identity: str | None = None


@dataclass(frozen=True)
class SlurmSettings:
    """What a job asks Slurm for. None: not asked for, so the cluster's own default holds.

    `signal` is what Slurm sends before the time limit; `job_dir` is shared by all nodes, absolute on the cluster;
    `ssh` is None where sbatch runs on this machine. `container_image` is None for plain srun. `launcher` starts the
    processes of a node, where the script wants torchrun: that, or NVRx's ft_launcher, which ends those that hang.
    """

    account: str | None = None
    partition: str | None = None
    nodes: int = 1
    gpus_per_node: int = 8
    processes_per_node: int = 8
    cpus_per_task: int | None = None
    mem: str | None = None
    exclusive: bool = False
    time: str | None = None
    qos: str | None = None
    constraint: str | None = None
    container_image: str | None = None
    mounts: tuple[str, ...] = ()
    signal: str = "USR1@120"
    max_restarts: int = 3
    job_dir: str | None = None
    ssh: Ssh | None = None
    launcher: str = "torchrun"
    launcher_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Env:
    """One profile with everything it extends, beside the reserved tables that a job needs.

    `venv` is a virtual environment of the cluster, the last of `startup_commands` activates it; None in a container.
    `ray` is the address of the Ray cluster that jobs are submitted to.
    `variables` are set for the job; `secrets` are names of variables that the job needs and that must be set.
    `output` and `artifacts` are the roots of runs and of the registry as the job sees them (a path or a URL); None for
    a local job that uses those of this process, and where a launcher that this toolkit does not know has to say.
    `table` holds what the profile and the config say to such a launcher, unread, and what follows for the job from all
    sources: `nodes`, `gpus_per_node`, `processes_per_node` and, if there is one, `container_image`.
    `code_limit` is in bytes. `remote_folders` are of the cluster: the user's files in them are not looked for here.
    """

    profile: str | None = None
    executor: str = "local"
    variables: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    startup_commands: tuple[str, ...] = ()
    venv: str | None = None
    slurm: SlurmSettings | None = None
    ray: str | None = None
    table: dict[str, Any] = field(default_factory=dict)
    output: str | None = None
    artifacts: str | None = None
    code_limit: int = CODE_LIMIT
    remote_folders: tuple[str, ...] = ()
    cache_dir: Path | None = None
    color: bool = True
    file: Path | None = None

    @property
    def nodes(self) -> int:
        """How many the job gets; one where nobody says."""
        return int(self.table.get("nodes", 1) if self.slurm is None else self.slurm.nodes)

    @property
    def processes_per_node(self) -> int:
        """How many the launcher starts on each node; one where nobody says."""
        return int(self.table.get("processes_per_node", 1) if self.slurm is None else self.slurm.processes_per_node)

    @property
    def container_image(self) -> str | None:
        """The image that the job runs in, if it runs in one."""
        image: str | None = self.table.get("container_image") if self.slurm is None else self.slurm.container_image
        return image

    @property
    def registry_is_reachable(self) -> bool:
        """Whether this machine can look into the job's registry. Not where it is a folder of other machines."""
        shares_folders = self.executor in EXECUTORS and (self.slurm is None or self.slurm.ssh is None)
        return shares_folders or is_url(self.artifacts or "")


def parse_env(
    profile: str | None = None,
    *,
    batch: bool = False,
    spec: Runspec | None = None,
    loaded: LoadedConfig | None = None,
    executors: Sequence[str] = EXECUTORS,
) -> Env:
    """The profile called `profile`, or the plain local one when it is None.

    What a key comes to: the command line (`run.env.KEY=…`), else the profile, else `run.env` of the config. For
    `container_image`, `nodes`, `gpus_per_node` and `processes_per_node` the config goes before the profile, and the
    script's own block (`image`, `[resources]`) comes last; but `gpus_per_node = 0` of a block goes before the profile,
    since such a script uses none, and a script with `launch = "direct"` is one process on one node.

    Args:
        batch: the job is submitted, not attended: `batch_partition` holds instead of `run_partition`.
        spec: the script, for its image and resources.
        loaded: the config, for its `run.env`.
        executors: those that the caller has code for. The keys of one that this toolkit does not know are in
            `Env.table`, unread.

    Raises:
        UserError: no such profile, a fault in env.toml or in `run.env`, a secret that is not set in the environment,
            something missing that the executor needs, or an executor that the caller or the script does not run on.
    """
    path, toml = load_tables()
    merged = _merged(toml, profile)
    executor = merged.get("executor", "local")
    settings = _Settings(toml, profile, executor, merged, loaded)
    if executor not in executors:
        at = f"{settings.where('executor')} executor = {executor!r}: must be one of {', '.join(executors)}"
        raise UserError(at, did_you_mean(executor, executors))
    if executor == "ray" and spec is not None and spec.run.launch == "torchrun":
        raise UserError(
            f'{spec.name}: launch = "torchrun" does not run on a Ray cluster, which is what profile {profile} is',
            'use a profile with executor slurm, or none; scripts with launch = "ray" or "direct" run there',
        )
    variables, secrets = merged.get("env", {}), tuple(merged.get("secrets", []))
    _check_secrets(settings, variables, secrets)
    _check_variables(settings, variables)

    slurm = _slurm(settings, batch, spec) if executor == "slurm" else None
    venv = _venv(settings, slurm)
    if slurm is not None and slurm.container_image:
        venv = None  # the container has a Python of its own
    ray = _ray(settings) if executor == "ray" else None
    # The machines of a launcher that is not known here may have none of the folders of this one, as behind ssh.
    ssh = executor not in EXECUTORS or (slurm is not None and slurm.ssh is not None)
    output = variables.get(OUTPUT_ROOT)
    if output is None and (slurm is not None or ray is not None):
        output = f"{slurm.job_dir}/output" if slurm is not None and ssh else str(output_root())
    cache = toml.data.get("cache", {}).get("dir")
    if cache is not None and ssh and not cache.startswith("/"):
        cache = None  # relative to this file, or to the home of this machine: it means nothing there
    return Env(
        profile=profile,
        executor=executor,
        variables=variables,
        secrets=secrets,
        startup_commands=(*merged.get("startup_commands", ()), *_activation(venv)),
        venv=venv,
        slurm=slurm,
        ray=ray,
        table={} if executor in EXECUTORS else {**settings.unread(), **_machines(settings, spec)},
        output=output,
        artifacts=_artifacts(settings, output, ssh),
        code_limit=_bytes(merged["code_limit"]) if "code_limit" in merged else CODE_LIMIT,
        remote_folders=tuple(merged.get("remote_folders", ())),
        cache_dir=None if cache is None else located_path(path, cache),
        color=toml.data.get("cli", {}).get("color", True),
        file=path,
    )


def executor_of(profile: str | None) -> str:
    """The executor of a profile, without the checks that need the environment or a config.

    Raises:
        UserError: no such profile, or a fault in env.toml.
    """
    executor: str = _merged(load_tables()[1], profile).get("executor", "local")
    return executor


def _merged(toml: TomlText, profile: str | None) -> dict[str, Any]:
    """The keys of a profile and of those that it extends; none for the plain local one."""
    profiles = profiles_of(toml)
    if profile is not None and profile not in ("local", *profiles):
        where = f"{toml.file} has no such profile" if toml.file else "there is no env.toml"
        if profile in (TOOL, *RESERVED):
            where = f"[{profile}] of env.toml is a reserved table"
        raise UserError(
            f"unknown profile {profile!r}: {where}", did_you_mean(profile, ["local", *profiles], "profiles")
        )
    if profile not in profiles:
        return {}
    check_executor(toml, str(profile), "local")
    merged: dict[str, Any] = {}
    for table in (profiles[name] for name in chain_of(toml, str(profile))):
        variables = {**merged.get("env", {}), **table.get("env", {})}
        secrets = list(dict.fromkeys([*merged.get("secrets", []), *table.get("secrets", [])]))
        if "partition" in table:  # one setting: what a profile says of it takes the place of all that it extends
            merged = {key: value for key, value in merged.items() if not key.endswith("_partition")}
        merged = {**merged, **table, "env": variables, "secrets": secrets}
    return merged


class _Settings:
    """The sources of an executor's keys: the command line, the profile, the config."""

    def __init__(
        self,
        toml: TomlText,
        profile: str | None,
        executor: str,
        merged: Mapping[str, Any],
        loaded: LoadedConfig | None,
    ) -> None:
        self.toml, self.name, self.executor, self.profile = toml, profile, executor, merged
        self.file = Path(toml.file) if toml.file else None
        self.command_line: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        for key, value in ({} if loaded is None else run_env(loaded)).items():
            assert loaded is not None
            if not loaded.on_command_line(("run", "env", key)):
                # A config is for every executor; what this one has no use for waits for another.
                self.config[key] = value
            elif key in EXECUTOR_KEYS.get(executor, (key,)):
                self.command_line[key] = value
            else:
                who = "without a profile the job is local" if profile is None else f"profile {profile} is {executor}"
                raise UserError(f"command line: run.env.{key}: a key of executor {owner_of(key)}, and {who}")

    def layers(self, key: str) -> tuple[Mapping[str, Any], ...]:
        if key in CONFIG_FIRST:
            return (self.command_line, self.config, self.profile)
        return (self.command_line, self.profile, self.config)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where no source has it, or the first one that does says null."""
        for layer in self.layers(key):
            if key in layer:
                return default if layer[key] is None else layer[key]
        return default

    def unread(self) -> dict[str, Any]:
        """What all sources say that is not for every executor, for one that is not known here."""
        keys = {key for layer in (self.command_line, self.config, self.profile) for key in layer if key not in GENERAL}
        return {key: self.get(key) for key in sorted(keys)}

    def has(self, key: str) -> bool:
        """Whether any source sets `key`, null included."""
        return any(key in layer for layer in self.layers(key))

    def job_says(self, key: str) -> bool:
        """Whether the command line or the config, which are about this job, set `key`."""
        return key in self.command_line or key in self.config

    def where(self, *keys: str) -> str:
        """`env.toml:7: [dgx]`: where the profile says one of `keys`, else where it begins."""
        if self.file is None or self.name not in self.toml.data:
            return f"profile {self.name}"
        for name in reversed(chain_of(self.toml, str(self.name))):
            for key in keys:
                if key in self.toml.data[name]:
                    return f"{self.toml.where(name, key)}: [{name}]"
        return f"{self.toml.where(str(self.name))}: [{self.name}]"


def _check_secrets(settings: _Settings, variables: Mapping[str, str], secrets: tuple[str, ...]) -> None:
    for name, value in variables.items():
        by_name = f'secrets = ["{name}"] passes it on'
        if name in secrets:
            raise UserError(f"{settings.where('env')} env.{name}: stands under secrets too", by_name)
        # What a job on a cluster gets set is written into the script that is submitted; a secret must not be there.
        fault = "an address with a password, which has no place" if has_password(value) else ""
        fault = "looks like a secret, which has no value" if looks_secret(name) else fault
        if fault and settings.profile.get("executor", "local") != "local":
            raise UserError(f"{settings.where('env')} env.{name}: {fault} here", by_name)
    if settings.executor == "ray":
        return  # the values are the cluster's own: nothing is sent, and launch.sh looks there
    missing = [name for name in secrets if not os.environ.get(name)]
    if missing:
        at = f"profile {settings.name}: the environment does not set {', '.join(missing)}"
        raise UserError(at, f"named in {settings.where('secrets')}")


def _check_variables(settings: _Settings, variables: Mapping[str, str]) -> None:
    """Refuse variables that something else sets."""
    local = settings.profile.get("executor", "local") == "local"
    at = settings.where("env")
    if ARTIFACTS_ROOT in variables:
        raise UserError(f"{at} env.{ARTIFACTS_ROOT}: is set for the job already", "the key artifacts says where it is")
    root = variables.get(OUTPUT_ROOT)
    if root is not None and (local or not root.startswith("/")):
        hint = "set it where you start the job" if local else "an absolute path on the cluster"
        raise UserError(f"{at} env.{OUTPUT_ROOT} = {root!r}: cannot be the output root of the job", hint)


# Keys of Slurm whose values need no more than a default.
_AS_THEY_ARE = (
    "account", "cpus_per_task", "mem", "exclusive", "time", "qos", "constraint", "signal", "max_restarts",
)  # fmt: skip


def _slurm(settings: _Settings, batch: bool, spec: Runspec | None) -> SlurmSettings:
    get = settings.get
    ssh, job_dir = _ssh(settings), get("job_dir")
    if ssh is not None:
        job_dir = _absolute_there(settings, "job_dir", job_dir)
    elif job_dir is None:
        job_dir = str(output_root() / "jobs")
    else:
        job_dir = str(located_path(settings.file, job_dir))
    machines = _machines(settings, spec)
    if "container_image" in machines and not settings.has("container_image"):
        machines["container_image"] = _enroot_name(machines["container_image"])
    return SlurmSettings(
        **{key: value for key in _AS_THEY_ARE if (value := get(key)) is not None},
        **machines,
        partition=_partition(settings, "batch_partition" if batch else "run_partition"),
        mounts=tuple(get("mounts", ())),
        launcher=get("launcher", "torchrun"),
        launcher_options=tuple(get("launcher_options", ())),
        job_dir=job_dir,
        ssh=ssh,
    )


def _machines(settings: _Settings, spec: Runspec | None) -> dict[str, Any]:
    """How many nodes, GPUs and processes the job gets, and the image that it runs in, where there is one."""
    get, block = settings.get, Resources() if spec is None else spec.resources
    needs_no_gpu = block.gpus_per_node == 0 and not settings.job_says("gpus_per_node")
    gpus = 0 if needs_no_gpu else get("gpus_per_node", block.gpus_per_node)
    machines = {
        "nodes": 1 if spec is not None and spec.run.launch == "direct" else get("nodes", block.nodes),
        "gpus_per_node": gpus,
        "processes_per_node": get("processes_per_node", gpus or 1),
    }
    image = get("container_image") if settings.has("container_image") else None if spec is None else spec.image
    return {**machines, "container_image": image} if image else machines


def _enroot_name(image: str) -> str:
    """The image of a script's block as enroot reads it: behind the host of a registry stands "#", not "/"."""
    host, _, name = image.partition("/")
    return f"{host}#{name}" if name and host.strip(".") and ("." in host or ":" in host) else image


def _partition(settings: _Settings, special: str) -> str | None:
    # Source by source: `run.env.partition=x` on the command line goes before `run_partition` of the profile.
    for layer in settings.layers("partition"):
        for key in (special, "partition"):
            if key in layer:
                partition: str | None = layer[key]
                return partition
    return None


def _ssh(settings: _Settings) -> Ssh | None:
    get, keys = settings.get, ("host", "user", "port", "identity")
    if get("tunnel", "local") == "local":
        # An explicit `tunnel = "local"` switches off the ssh keys of an extended profile (on the login node itself).
        stray = [key for key in keys if settings.has(key)]
        if stray and not settings.has("tunnel"):
            at = f"{settings.where(*stray)} {stray[0]}: is for an ssh login, and no tunnel is asked for"
            raise UserError(at, 'write tunnel = "ssh"')
        return None
    missing = [key for key in ("host", "user", "job_dir") if get(key) is None]
    if missing:
        raise UserError(f'{settings.where("tunnel")} tunnel = "ssh" also needs {", ".join(missing)}')
    identity = get("identity")
    if identity is not None:
        identity = str(located_path(settings.file, identity))
        if not Path(identity).is_file():
            raise UserError(f"{settings.where('identity')} identity = {get('identity')!r}: no such file: {identity}")
    return Ssh(get("host"), get("user"), get("port"), identity)


def _absolute_there(settings: _Settings, key: str, text: str) -> str:
    """A path on the other side of an ssh login, where this machine's folders and home mean nothing."""
    if not text.startswith("/"):
        raise UserError(f"{settings.where(key)} {key} = {text!r}: must be an absolute path on the cluster")
    return text.rstrip("/") or "/"


def _venv(settings: _Settings, slurm: SlurmSettings | None) -> str | None:
    """The virtual environment that the profile names, as a path of the cluster."""
    venv: str | None = settings.profile.get("venv")
    if venv is None:
        return None
    if settings.executor == "local":
        raise UserError(f"{settings.where('venv')} venv: is for jobs on a cluster, and the profile is local")
    shared = slurm is not None and slurm.ssh is None
    return str(located_path(settings.file, venv)) if shared else _absolute_there(settings, "venv", venv)


def _activation(venv: str | None) -> list[str]:
    return [] if venv is None else [f"source {shlex.quote(venv)}/bin/activate"]


def _ray(settings: _Settings) -> str:
    rule = EXECUTOR_KEYS["ray"]["address"]
    server = os.environ.get(RAY_API_SERVER)
    if server and "address" not in settings.command_line:
        if not rule.allows(server):
            raise UserError(f"{RAY_API_SERVER}={without_login(server)}: must be {rule.text}")
        return server
    address: str | None = settings.get("address")
    if address is None:
        at = f"{settings.where('executor')} executor = 'ray': no address of a cluster"
        raise UserError(at, f'write address = "http://head:8265", or set {RAY_API_SERVER}')
    return address


def _artifacts(settings: _Settings, output: str | None, ssh: bool) -> str | None:
    """The root of the registry as the job sees it; None for a local job of a profile that does not name one."""
    root = settings.profile.get("artifacts")
    if root is not None and ssh and "://" not in root:
        return _absolute_there(settings, "artifacts", root)
    if root is not None:
        return str(located_root(root, settings.file))
    if output is None and not ssh:
        return None
    root = settings.toml.data.get("artifacts", {}).get("root")
    root_here = os.environ.get(ARTIFACTS_ROOT)
    # Behind ssh only a URL means the same as here.
    if root_here and (not ssh or is_url(root_here)):
        return str(located_root(root_here, None))
    # Behind ssh a path of env.toml counts if it is absolute: relative ones and `~` mean folders of this machine.
    if root is None or (ssh and not root.startswith("/") and not is_url(root)):
        return None if output is None else f"{output}/artifacts"
    return str(located_root(root, settings.file))


def _bytes(size: str) -> int:
    """`200MB` -> 200,000,000; `1GiB` -> 2**30."""
    number = size.rstrip("KMGiB ")
    unit = size[len(number) :].strip().removesuffix("B")
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** " KMG".index(unit[:1] or " "))
