"""An environment as a resources server of NeMo Gym, for `nemotron env serve`, which starts this script.

The server is the standard library's: verification is what takes time, and an own web framework would be an extra for
five endpoints. It listens on this machine alone unless told otherwise. Ctrl-C ends it.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from dataclasses import dataclass
from typing import cast, get_args

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.environments import FAMILIES, Environment, load_environment
from nemotron.stack.environments.code_generation import FAMILY as CODE_GENERATION
from nemotron.stack.environments.gym_server import GymHTTPServer, ResourcesServer
from nemotron.stack.environments.repository_repair import FAMILY as REPOSITORY_REPAIR
from nemotron.stack.environments.sandbox import check_sandbox


@dataclass(frozen=True)
class Options:
    """Of `nemotron env serve`."""

    name: str
    host: str
    port: int
    sandbox: str


def find_environment(name: str) -> tuple[str, Environment | None]:
    """The family called `name`, and None; or what the tasks of one of the user's are called, and that environment.

    UserError: there is neither.
    """
    if ":" in name:
        return name.rpartition(":")[2].lower(), load_environment(name)
    if name not in FAMILIES:
        raise UserError(f"no family {name!r}", did_you_mean(name, FAMILIES) or "one of yours is FILE.py:NAME")
    return name, None


def main(options: Options) -> None:
    """Serve until interrupted."""
    if options.sandbox not in get_args(Sandbox):
        raise UserError(f"--sandbox {options.sandbox}", did_you_mean(options.sandbox, get_args(Sandbox)))
    sandbox = cast(Sandbox, options.sandbox)
    family, environment = find_environment(options.name)
    if family == REPOSITORY_REPAIR or (environment is not None and hasattr(environment, "open_episode")):
        raise UserError(f"{options.name} has episodes", "of tasks with several turns, workplace_assistant is served")
    if environment is None and family == CODE_GENERATION:
        check_sandbox(sandbox)
    try:
        server = GymHTTPServer(ResourcesServer(family, environment, sandbox), options.host, options.port)
    except OSError as failure:
        hint = "--host is an address of this machine, or its name; --port 0 takes any port that is free"
        raise UserError(f"cannot listen on {options.host}:{options.port}: {failure.strerror}", hint) from failure
    with server:
        print(
            f"{options.name} at {server.url}: /seed_session, /verify, /aggregate_metrics", file=sys.stderr, flush=True
        )
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
