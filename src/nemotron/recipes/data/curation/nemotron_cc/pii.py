# /// script
# [tool.runspec]
# docs = "Replace personal data by placeholders"
# name = "data/curate/pii"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/pii"
# schema = "schema.py:PiiConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 7: documents -> documents in which placeholders stand for personal data.

    nemotron data curate pii -c tiny
    python pii.py --config tiny 'kinds=[email, phone]'

E-mail addresses, telephone numbers, IP addresses, card numbers, IBAN, US social security numbers, keys and tokens,
private keys: found by patterns, confirmed by check digits and by the text around them. What is left alone on purpose is
listed in data_prep/curation/pii.py; tests/nemotron/data_prep/curation/test_pii.py measures precision and recall.

Simplified against what NeMo Curator offers: no names and no street addresses, which take a model.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation import pii
from nemotron.data_prep.curation.step import list_documents, open_step, read_documents
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import PiiSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import PiiConfig

SAMPLES, REACH = 3, 40  # samples of each placeholder, and characters around it
LOOKED_AT = 10_000  # documents that samples are taken from


def main() -> None:
    """Replace personal data and publish the documents."""
    cfg: PiiConfig = load_script_config(__file__, inputs=read_pipe)

    with open_step(cfg, __file__) as step:
        with step.run.phase("replace"):
            table = step.filter(pii.judge, PiiSettings.of(cfg))
        step.publish(table, {"replaced_samples": _samples(list_documents(step.work_dir))})


def _samples(files: list[Path]) -> dict[str, list[str]]:
    """Some places where something was replaced, without what stood there."""
    samples_of: dict[str, list[str]] = {placeholder: [] for placeholder in pii.PLACEHOLDERS.values()}
    for document in islice(chain.from_iterable(map(read_documents, files)), LOOKED_AT):
        for placeholder, samples in samples_of.items():
            place = document["text"].find(placeholder)
            if place >= 0 and len(samples) < SAMPLES:
                around = document["text"][max(0, place - REACH) : place + len(placeholder) + REACH]
                samples.append(" ".join(around.split()))
    return {placeholder: samples for placeholder, samples in samples_of.items() if samples}


if __name__ == "__main__":
    run_data_script(main)
