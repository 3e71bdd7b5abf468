# /// script
# [tool.runspec]
# docs = "Tell the language of every document and keep the wanted ones"
# name = "data/curate/language"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/language"
# default = "default"
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

import sys
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.data_prep.curation import language
from nemotron.data_prep.curation.step import filter_shards, list_documents, plan_step, publish_step
from nemotron.data_prep.work.engines import open_engine
from nemotron.kit import Dataset, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import LanguageConfig


def main() -> None:
    """Keep the documents of some languages and publish them."""
    cfg: LanguageConfig = load_script_config(__file__, inputs=read_pipe)
    settings = language.LanguageSettings(
        tuple(cfg.keep), cfg.threshold, cfg.min_letters, cfg.short_texts, cfg.max_chars
    )
    language.check_languages(settings.keep)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        # --- One shard of work for each document shard of the step before ---------------------------------------------
        files = list_documents(Dataset.load(cfg.run.data).path)
        work_dir = run.dir / "work"
        plan = plan_step(files, {"step": "language", **cfg.model_dump(exclude={"run"})})

        # --- Identify -------------------------------------------------------------------------------------------------
        with run.phase("identify"):
            table = filter_shards(plan, work_dir, language.judge, settings, engine)

        # --- Publish --------------------------------------------------------------------------------------------------
        dataset = publish_step(table, work_dir, run.output_dir)
        print_complete({"data": dataset})


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main, command_hint))
