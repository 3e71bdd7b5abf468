"""The user's files of a job on other machines: whether they are where the job will look for them.

A path of a config means the same here and there where the file system is shared: Slurm on this machine, and a Ray
cluster as far as is known. Behind an ssh login it is a path of the cluster. What lies in one of the profile's
`remote_folders` is taken as it is; everything else is asked for on the login node, before anything is submitted. The
machines of a launcher that this toolkit does not know cannot be asked: there everything else is refused.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from nemo_runspec.config.validate import UserLocation
from nemo_runspec.env.keys import EXECUTORS
from nemo_runspec.env.roots import cache_folder
from nemo_runspec.errors import RunspecError, UserError
from nemo_runspec.execution.interrupts import say
from nemo_runspec.execution.slurm.remote import shell_for
from nemo_runspec.profile import Env
from nemo_runspec.user_files import local_path

# Prints the numbers of those of its arguments that are no file, no folder and no glob that matches something.
_MISSING = """\
shopt -s globstar
number=0
for path in "$@"; do
    case "$path" in "~" | "~/"*) path="$HOME${path#"~"}" ;; esac
    [ -e "$path" ] || compgen -G "$path" > /dev/null || echo $number
    number=$((number + 1))
done
"""


def split_remote(env: Env, locations: Sequence[UserLocation], *, dry_run: bool) -> list[UserLocation]:
    """Take out of `locations` those that the job finds on other machines, and return the others, to be found here.

    Args:
        dry_run: a login node that cannot be reached costs a note, and its files count as found.

    Raises:
        UserError: a file that is not there, whether or not it exists here; a relative path, which would begin in the
            job's bundle; the login node cannot be reached; the launcher is not known here, and the file is unmarked.
    """
    unmarked = [each for each in locations if not in_remote_folders(env, each.location)]
    ssh = None if env.slurm is None else env.slurm.ssh
    if ssh is None and env.executor in EXECUTORS:
        return unmarked
    # Artifacts of a registry that both machines reach: the job fetches its own copy.
    fetched = [each for each in unmarked if local_path(each.location).is_relative_to(cache_folder())]
    unmarked = [each for each in unmarked if each not in fetched]
    if not unmarked:
        return fetched
    if ssh is None:
        raise UserError(
            f"{unmarked[0].at}: {unmarked[0].location}: the machines of executor {env.executor} may not have it",
            'write s3://…, or name the folder that they mount: remote_folders = ["/folder"] in the profile',
        )
    paths = [each.location.removeprefix("file://") for each in unmarked]
    for each, path in zip(unmarked, paths, strict=True):
        if not path.startswith(("/", "~/")) and path != "~":
            raise UserError(
                f"{each.at}: {each.location}: a relative path, and the job runs on {ssh.host}",
                "write an absolute path of the cluster, or an address (s3://…, hf://…)",
            )
    try:
        answer = shell_for(ssh).run(f"bash -c {shlex.quote(_MISSING)} bash {shlex.join(paths)}")
    except RunspecError as error:
        if not dry_run:
            raise
        say(f"not looked for, since the login node does not answer: {', '.join(paths)} ({error.message})")
        return fetched
    for number in answer.text.split():
        each = unmarked[int(number)]
        here = local_path(each.location)
        if here.exists():
            what = f"{each.location} is on this machine only, and the job runs on {ssh.host}"
            copy = f"rsync -a {shlex.quote(str(here))} {ssh.user}@{ssh.host}:FOLDER/"
            hint = f"copy it there: {copy}, or give an address (s3://…, hf://…)"
        else:
            what = f"no such file on {ssh.host}: {each.location}"
            hint = 'remote_folders = ["/folder"] in the profile names folders that its login node does not see'
        raise UserError(f"{each.at}: {what}", hint)
    return fetched


def in_remote_folders(env: Env, location: str) -> bool:
    """Whether `location` is in one of the profile's `remote_folders`, which the job's machines have."""
    path = PurePosixPath(posixpath.normpath(location.removeprefix("file://")))
    return any(path.is_relative_to(folder) for folder in env.remote_folders)
