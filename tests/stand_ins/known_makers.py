"""A module to have loaded before a fork (`forked.py`): which command makes which artifact, read of all configs once."""

from nemotron.kit.commands import makers_by_artifact

makers_by_artifact()
