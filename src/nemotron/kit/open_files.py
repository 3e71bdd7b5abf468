"""How many files a process may have open: a mapped file is one, and a large corpus is thousands of token streams."""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 15
"""As many as anything here maps; systems have limits of their own below 2^16 (macOS for files, Linux for mappings)."""


def allow_open_files() -> None:
    """Raise this process's soft limit, often 1,024, to the hard one, to `MOST` at most; a higher one stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):  # what is too many is said where the file is opened
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
