"""The keys that env.toml and `run.env` may have, and what their values must be."""

from __future__ import annotations

from nemo_runspec.rules import TEXT, WORD, Rule, choice, integer

# The executors that this toolkit knows. The table of another one is handed to the command file unread.
EXECUTORS = ("local", "slurm", "ray")
CODE_LIMIT = 100_000_000
# Of a network address: 1 to 65535.
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"

# Keys that every profile may have.
GENERAL: dict[str, Rule] = {
    "executor": WORD,
    "extends": TEXT,
    "env": Rule(dict, "a table of strings"),
    "secrets": Rule(list, "a list of strings"),
    "startup_commands": Rule(list, "a list of strings, each a shell command", r"(?s).*\S.*"),
    "venv": TEXT,
    "artifacts": TEXT,
    "remote_folders": Rule(list, "a list of absolute paths", r"/.*"),
    "code_limit": Rule(str, 'a size as "200MB"', r"[0-9]+(\.[0-9]+)? ?([KMG]i?)?B"),
}
# Keys of each executor; under these names a config may have them too, in `run.env`.
EXECUTOR_KEYS: dict[str, dict[str, Rule]] = {
    "local": {},
    "slurm": {
        "account": WORD,
        "partition": WORD,
        "run_partition": WORD,
        "batch_partition": WORD,
        "nodes": integer(1),
        "gpus_per_node": integer(0),
        "processes_per_node": integer(1),
        "cpus_per_task": integer(1),
        "mem": Rule(str, 'a size as Slurm has it, as "64G" ("0": all of the node)', r"[0-9]+[KMGT]?"),
        "exclusive": Rule(bool, "true or false"),
        "time": Rule(
            str,
            'a time as Slurm has it, in quotes: "30" (minutes), "04:00:00" or "2-00:00:00"',
            r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED",
        ),
        "qos": WORD,
        "constraint": WORD,
        "container_image": Rule(str, 'an image without spaces ("": no container)', r"\S*"),
        "mounts": Rule(
            list, 'a list of "/there:/in/the/container" (absolute paths)', r"/[^:,\s]*:/[^:,\s]*(:(ro|rw))?"
        ),
        "signal": Rule(str, 'USR1@SECONDS or TERM@SECONDS, as "USR1@120"', r"(USR1|TERM)(@[0-9]{1,5})?"),
        "max_restarts": integer(0),
        "launcher": choice("torchrun", "ft_launcher"),
        "launcher_options": Rule(list, 'a list of options of the launcher, as ["--max-restarts=3"]', r"--\S+"),
        "job_dir": WORD,
        "tunnel": choice("local", "ssh"),
        # No leading dash: ssh would take it for an option.
        "host": Rule(str, "a host name without user", r"[A-Za-z0-9_.:\[][A-Za-z0-9_.:\[\]%-]*"),
        "user": Rule(str, "a user name", r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*"),
        "port": integer(1, 65535),
        "identity": TEXT,
    },
    "ray": {
        "address": Rule(
            str,
            'the address of the dashboard, as "http://head:8265" (ports from 1 to 65535)',
            rf"https?://([^\s/@]*@)?(\[[0-9A-Fa-f:.]+\]|[^\s/@:\[\]]+)(:{_PORT})?(/\S*)?",
        )
    },
}
PROFILE: dict[str, Rule] = {**GENERAL, **{key: rule for keys in EXECUTOR_KEYS.values() for key, rule in keys.items()}}
RESERVED: dict[str, dict[str, Rule]] = {
    "artifacts": {"root": TEXT},
    "cache": {"dir": TEXT},
    "cli": {"color": Rule(bool, "true or false")},
}
# Its tables belong to other programs, [tool.tracker] to one that tracks runs; their keys are unread here.
TOOL = "tool"
# A recipe knows which image it needs and how many processes: for these a config goes before the profile.
CONFIG_FIRST = ("container_image", "nodes", "gpus_per_node", "processes_per_node")
