"""Write a small file in one step: whoever reads it finds the old text or the new one, also after a power cut."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_in_one_step(path: Path, text: str, *, only_new: bool = False) -> None:
    """Write `text` to `path`. `only_new`: a file that is there stays."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with aside.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if only_new:
            try:
                path.hardlink_to(aside)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                aside.replace(path)
        else:
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
