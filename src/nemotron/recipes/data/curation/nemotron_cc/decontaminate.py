# /// script
# [tool.runspec]
# docs = "Drop documents that share text with evaluation sets"
# name = "data/curate/decontaminate"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/decontaminate"
# schema = "schema.py:DecontaminateConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 9: documents -> documents that share no text with what the model will be evaluated on.

    nemotron data curate decontaminate -c tiny
    python decontaminate.py --config tiny 'evaluation=[benchmarks/*.jsonl]' ngram=10

The questions and answers of evaluation sets are protected, and the prompts of this project's own evaluation tasks. A
document that shares 13 consecutive words with one of them is dropped, unless more than ten documents have these words.

Simplified against the paper, which leaves this out: the rule is that of GPT-3 (Brown et al. 2020, appendix C). The
whole document is dropped; GPT-3 removed 200 characters around the shared words.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.decontamination import drop_shard, hit_shard, leaks_of, protect, save_grams
from nemotron.data_prep.curation.step import collect, open_step, plan_step
from nemotron.data_prep.sources.files import FORMATS, RECORD_FORMATS, SourceFile
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import read_piece, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.kit import Source, read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.stack.environments import evaluation_prompts

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import DecontaminateConfig


def main() -> None:
    """Drop documents that overlap with evaluation text and publish the others."""
    cfg: DecontaminateConfig = load_script_config(__file__, inputs=read_pipe)

    with open_step(cfg, __file__) as step:
        # --- What is protected --------------------------------------------------------------------------------------
        formats = FORMATS if "text" in cfg.fields else RECORD_FORMATS  # the field of text files, a README among them
        evaluation_files = list_files(cfg.evaluation, formats) if cfg.evaluation else []
        texts = [text for file in evaluation_files for text in _texts_of(file, cfg.fields)]
        prompts = evaluation_prompts(cfg.environment_tasks) if cfg.environment_tasks else []
        protected = protect([*texts, *prompts], cfg.ngram)
        grams = sum(map(len, protected.values()))
        print(f"protected: {len(texts)} texts, {len(prompts)} prompts, {grams} n-grams", file=sys.stderr)

        # --- Look for it; then drop, now that boilerplate is known --------------------------------------------------
        versions = [[file.uri, file.size, file.version] for file in evaluation_files]  # of those on the Hub, too
        settings = {"step": "decontaminate", "evaluation_files": versions, **cfg.model_dump(exclude={"run"})}
        plan, hit_dir = plan_step(step.documents(), settings), step.run.dir / "hits"
        with step.run.phase("look"):
            collect(plan, hit_dir, hit_shard, save_grams(protected, hit_dir / "grams"), step.engine)
            leaks = leaks_of(plan, hit_dir, protected, cfg.boilerplate_documents)
        with step.run.phase("drop"):
            table = collect(plan, step.work_dir, drop_shard, leaks, step.engine)

        # --- Publish ------------------------------------------------------------------------------------------------
        raw = [Source(name=file.name, detail=f"evaluation set, version {file.version}") for file in evaluation_files]
        step.publish(table, {"protected_ngrams": grams}, sources=raw)
        shutil.rmtree(hit_dir, ignore_errors=True)


def _texts_of(file: SourceFile, fields: list[str]) -> Iterator[str]:
    """Each wanted column of a row, and all of them joined: one that is too short to be found alone is found with its
    neighbours. Says on stderr how many rows have none of them; UserError where no row has any."""
    rows = without = 0
    for row in read_piece(whole(file), Reading(required=()), ReadReport()):
        values = [text for name in fields for text in _texts_in(row.value.get(name))]
        rows += 1
        if values:
            yield from dict.fromkeys([*values, " ".join(values)])
        else:
            without += 1
    if without == rows:
        raise UserError(f"{file.name}: none of the columns {', '.join(fields)}", "name the ones to protect in fields")
    if without:
        print(f"{file.name}: {without:,} of {rows:,} records have no text in {', '.join(fields)}", file=sys.stderr)


def _texts_in(value: object) -> Iterator[str]:
    """The texts of a column, those within lists and objects as well: a prompt may be a list of messages."""
    if isinstance(value, dict):
        yield from (text for name, item in value.items() if name not in ("role", "from") for text in _texts_in(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts_in(item))
    elif isinstance(value, str):
        yield value


if __name__ == "__main__":
    run_data_script(main)
