"""Toolkit for self-describing scripts: name, launcher, image, configs and resources stand in a script's own header.

Knows nothing of language models and never imports torch. The specification is docs/runspec/v1/spec.md.
"""

from nemo_runspec.runspec import Runspec, parse

__version__ = "0.1.0"

__all__ = ["Runspec", "parse"]
