"""Which node of a job this process is on, in names that are no launcher's own.

launch.sh makes the variables NODE_RANK, NUM_NODES and ATTEMPT of `variables.py` from what srun says; another launcher
sets them itself. Without them this is the only node.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

from nemo_runspec.errors import UserError
from nemo_runspec.variables import ATTEMPT, NODE_RANK, NUM_NODES


@dataclass(frozen=True)
class Place:
    """This node among those of the job. `attempt` names the files that belong to one start of the job."""

    node: int = 0
    nodes: int = 1
    attempt: str = "0"


def place() -> Place:
    """Where this process runs, from what launch.sh or a launcher sets.

    Raises:
        UserError: only some of the variables are set, or a number is none.
    """
    names = (NODE_RANK, NUM_NODES, ATTEMPT)
    texts = [os.environ.get(name, "") for name in names]
    if not any(texts):
        return Place(attempt=str(os.getpid()))
    for name, text in zip(names, texts, strict=True):
        if not text or (name != ATTEMPT and not text.isdigit()):
            shown = f"{name}={text}" if text else f"{name} is not set"
            raise UserError(f"which node of how many is this? {shown}", f"a launcher sets {', '.join(names)}")
    return Place(int(texts[0]), int(texts[1]), texts[2])


def first_node(here: Place) -> tuple[str, int]:
    """Address and port at which the nodes of a job meet: MASTER_ADDR and MASTER_PORT.

    Without MASTER_PORT it is one from 20000 to 29999 that follows from the attempt, so that all nodes come to the same.

    Raises:
        UserError: nothing says where the first node is.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise UserError(f"{here.nodes} nodes, but MASTER_ADDR, the address of the first one, is not set")
    return address, int(os.environ.get("MASTER_PORT") or 20000 + zlib.crc32(here.attempt.encode()) % 10000)
