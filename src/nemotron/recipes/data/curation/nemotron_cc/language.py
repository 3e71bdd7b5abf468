# /// script
# dependencies = ["py3langid"]
#
# [tool.runspec]
# docs = "Tell the language of every document and keep the wanted ones"
# name = "data/curate/language"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/language"
# schema = "schema.py:LanguageConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 2: documents -> documents of the wanted languages, each with its language and a probability.

    nemotron data curate language -c tiny
    python language.py --config tiny 'keep=[en, de]' threshold=0.5

The language of a text with too few letters is not guessed; `short_texts` says whether it is dropped or kept as "und".

Simplified against the paper: the published data went through pyCLD2 on the raw page and then through fastText's
lid176. Here it is py3langid alone, whose model comes in its package, with the paper's threshold of 0.3.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation import language
from nemotron.data_prep.curation.step import open_step
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import LanguageSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import LanguageConfig


def main() -> None:
    """Keep the documents of some languages and publish them."""
    cfg: LanguageConfig = load_script_config(__file__, inputs=read_pipe)
    language.check_languages(cfg.keep)

    with open_step(cfg, __file__) as step:
        with step.run.phase("identify"):
            table = step.filter(language.judge, LanguageSettings.of(cfg))
        step.publish(table)


if __name__ == "__main__":
    run_data_script(main)
