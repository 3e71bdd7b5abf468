"""`env.toml` as a file: where it is, whether every table says what it may say, and where it puts runs and artifacts.

`nemo_runspec.profile` makes of one of its tables what a job asks its executor for.
"""

from nemo_runspec.env.file import find_env_file
from nemo_runspec.env.keys import CODE_LIMIT
from nemo_runspec.env.roots import artifacts_root, output_root

__all__ = ["CODE_LIMIT", "artifacts_root", "find_env_file", "output_root"]
