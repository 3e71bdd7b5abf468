"""What a job on other machines needs there that not every environment has, and whether it is there.

An environment that the profile names (`venv`) is asked on the cluster, before anything is submitted. What an image
brings, and what `startup_commands` activate, cannot be asked from here: it is listed.
"""

from __future__ import annotations

import functools
import shlex

from nemo_runspec.errors import RunspecError, UserError
from nemo_runspec.execution.interrupts import say
from nemo_runspec.execution.slurm.remote import Completed, last_line, shell_for
from nemo_runspec.installation import STORE_CLIENTS, imported_from_extras, own_distribution
from nemo_runspec.profile import Env, Ssh
from nemo_runspec.runspec import Runspec

# Prints those of its arguments that are neither modules nor distributions (whose names are compared as pip does).
_MISSING = """\
import importlib.metadata as metadata, importlib.util, sys
def has(name):
    try:
        return bool(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        return "." not in name and importlib.util.find_spec(name) is not None
print(*[name for name in sys.argv[1:] if not has(name)])
"""


def needs_of(spec: Runspec, env: Env) -> list[str]:
    """What the job needs and not every environment has.

    Modules of extras that the script imports at its top, what it lists as dependencies, the client of the registry's
    store, and Ray where the job makes one over several nodes.
    """
    names = imported_from_extras(spec.script_path) if spec.run.cmd.startswith("python") else []
    own = own_distribution()
    names += [name for name in spec.dependencies if name not in (*names, own.name if own else "")]
    if spec.run.launch == "ray" and env.nodes > 1:
        names.append("ray")
    scheme = (env.artifacts or "").partition("://")[0]
    return [*names, STORE_CLIENTS[scheme].module] if scheme in STORE_CLIENTS else names


def needs_text(spec: Runspec, env: Env) -> str:
    """`what demo imports, torch (in the image …)`: what a job needs, and where it is expected.

    First stands this package, where the command is Python: its code travels, and what it imports does not. Empty where
    nothing is needed.
    """
    own = own_distribution() if spec.run.cmd.startswith("python") else None
    names = ", ".join([*([f"what {own.name} imports"] if own else []), *needs_of(spec, env)])
    if not names:
        return ""
    if env.ray is not None:
        return f"{names} (in the environment of the Ray cluster; not checked)"
    if image := env.container_image:
        return f"{names} (in the image {image}; not checked)"
    return f"{names} (in {env.venv})" if env.venv else f"{names} (not checked: the profile names no venv)"


def check_needs(spec: Runspec, env: Env, *, dry_run: bool) -> None:
    """Ask the environment that the profile names for what the job needs.

    Args:
        dry_run: a login node that cannot be reached costs a note.

    Raises:
        UserError: there is no such environment, or it lacks a module; the login node cannot be reached.
    """
    names = needs_of(spec, env)
    if env.slurm is None or env.venv is None or env.container_image or not names:
        return
    answer = _answer(env.slurm.ssh, env.venv, tuple(names), dry_run)
    if answer is None:
        return
    where = "this machine" if env.slurm.ssh is None else env.slurm.ssh.host
    if answer.code != 0:
        raise UserError(
            f"profile {env.profile}: venv = {env.venv!r}: no Python answers there, on {where}", last_line(answer.stderr)
        )
    if answer.text:
        raise UserError(
            f"{spec.name} needs {answer.text.replace(' ', ', ')}, and {env.venv} on {where} does not have it",
            f"install it there: {shlex.join([_python(env.venv), '-m', 'pip', 'install', *answer.text.split()])}",
        )


@functools.cache  # the steps of a pipeline ask the same
def _answer(ssh: Ssh | None, venv: str, names: tuple[str, ...], dry_run: bool) -> Completed | None:
    try:
        return shell_for(ssh).run(shlex.join([_python(venv), "-c", _MISSING, *names]))
    except RunspecError as error:
        if not dry_run:
            raise
        what = f"whether {venv} has {', '.join(names)}"
        say(f"not asked, since the login node does not answer: {what} ({error.message})")
        return None


def _python(venv: str) -> str:
    return f"{venv}/bin/python"
