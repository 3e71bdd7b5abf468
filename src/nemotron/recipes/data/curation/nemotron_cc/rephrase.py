# /// script
# dependencies = ["openai"]
#
# [tool.runspec]
# docs = "Let a language model behind an OpenAI-compatible endpoint reword documents, by quality"
# name = "data/curate/rephrase"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/rephrase"
# schema = "schema.py:RephraseConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 10: documents -> the documents, and synthetic ones that a language model made of them.

    nemotron data curate rephrase -c tiny endpoint.base_url=http://localhost:8000/v1 endpoint.model=my-model
    python rephrase.py --config tiny styles.distill=null

Documents of low quality are reworded as encyclopedia prose; those of high quality become questions and answers, a
shorter version, a textbook passage and a list of facts. Real documents lie in `documents/NAME`, synthetic ones in
`documents/NAME-synthetic`, with `rephrased_from`, `model` and a `source` of their own for the blend. No request is sent
twice once it has been answered: not after a stop, nor with other values of `endpoint.max_failed` or `endpoint.timeout`.

Simplified against the paper: the prompts are this project's own; texts are cut by words instead of tokens; all valid
questions are kept, eight at most, where the paper samples them by the length of the text.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed
from nemotron.data_prep.curation import rephrasing
from nemotron.data_prep.curation.step import StepRun, StepTable, plan_step
from nemotron.data_prep.work.engines import SerialEngine
from nemotron.data_prep.work.shards import freeze, run_shards
from nemotron.kit import open_run, read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import RephrasingSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import RephraseConfig


def main() -> None:
    """Reword documents and publish both kinds."""
    cfg: RephraseConfig = load_script_config(__file__, inputs=read_pipe)
    rephrasing.api_key(cfg.endpoint.api_key_env)  # a missing key is refused before any work
    settings, styles = RephrasingSettings.of(cfg), cfg.styles.rules()

    with open_run(cfg, script=__file__) as run:
        step = StepRun(run, SerialEngine())

        # --- Ask and check, shard after shard -----------------------------------------------------------------------
        # In this process, whatever cluster there is: the endpoint does the work, and so the bound on requests at a
        # time holds for all of them. How patiently it is asked decides nothing about the documents.
        model = {"base_url": cfg.endpoint.base_url, "model": cfg.endpoint.model}
        plan = plan_step(step.documents(), {"step": "rephrase", **model, **cfg.model_dump(exclude={"run", "endpoint"})})
        # Beside the run, not in it: a run with more patience, which is another one, asks nothing again.
        answers_dir = run.dir.with_name(f"answers-{plan.digest[:10]}")
        table = StepTable()
        usage: dict[str, Counter[str]] = {style: Counter() for style in styles}
        with run.phase("rephrase"):
            freeze(plan, step.work_dir)
            task, job = rephrasing.rephrase_shard, (settings, answers_dir)
            for receipt, _ in run_shards(plan, step.work_dir, task, job, step.engine, rephrasing.RephrasingCounts):
                table.merge(receipt.counts.table)
                for style, of_shard in receipt.counts.usage.items():
                    usage[style].update(of_shard)
        for style, total in usage.items():
            print(
                f"  {style:<18} {total['requests']:>7} requests, "
                f"{total['prompt_tokens']} tokens read, {total['completion_tokens']} written, "
                f"{total['retries']} repeated, {total['requests'] - total['answers']} failed",
                file=sys.stderr,
            )

        if not any(total["requests"] for total in usage.values()):
            wanted = sorted({label for rule in styles.values() for label in rule.labels})
            raise RunFailed(
                f"no document of quality {' or '.join(wanted) or '(no style is set)'}, so nothing to rephrase",
                "the quality step writes `quality` into documents; styles.STYLE.labels says which ones a style takes",
            )

        # --- Publish ------------------------------------------------------------------------------------------------
        metrics: dict[str, Any] = {
            "endpoint": model,
            "sampling": {"temperature": cfg.temperature, "top_p": cfg.top_p, "seed": cfg.seed},
            "usage": usage,
        }
        step.publish(table, metrics)
    shutil.rmtree(answers_dir, ignore_errors=True)  # the run is finished: who goes on does not ask again


if __name__ == "__main__":
    run_data_script(main)
