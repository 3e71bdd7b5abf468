# /// script
# [tool.runspec]
# schema = "1"
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

A text with too few letters is not guessed at; `short_texts` says whether it goes or stays as "und".

Simplified against the paper: the published data went through pyCLD2 on the raw page and then through fastText's
lid176. Here it is py3langid alone, whose model comes in its package, with the paper's threshold of 0.3.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.data_prep.curation import language
from nemotron.data_prep.curation.step import (
    filter_shards,
    list_documents,
    plan_step,
    publish_step,
    read_documents,
    read_truth,
    score_drops,
    share_text,
    urls_of,
)
from nemotron.data_prep.work.engines import open_engine
from nemotron.kit import Dataset, open_run, print_complete, read_pipe
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
        print(table, file=sys.stderr)

        # --- Measure: what was planted is known -----------------------------------------------------------------------
        metrics: dict[str, Any] = {}
        if cfg.run.truth:
            metrics["planted"] = _measure(files, work_dir, Dataset.load(cfg.run.truth).path, settings)

        # --- Publish --------------------------------------------------------------------------------------------------
        dataset = publish_step(table, work_dir, run.output_dir, metrics)
        print(f"{dataset.ref}: {dataset.num_examples} documents", file=sys.stderr)
        print_complete({"data": dataset})


def _measure(files: list[Path], work_dir: Path, truth_dir: Path, settings: language.LanguageSettings) -> dict[str, Any]:
    """Accuracy on the planted languages, over the texts that are long enough, and the score of what was dropped."""
    truth = read_truth(truth_dir)
    planted = {url: case["language"] for url, cases in truth.items() for case in cases if case["kind"] == "language"}
    right, wrong = 0, Counter[str]()
    for path in files:
        for document in read_documents(path):
            expected = planted.get(document.get("url", ""))
            found, _ = language.identify(document["text"], settings)
            if expected is None or found == language.UNDETERMINED:
                continue
            if found == expected:
                right += 1
            else:
                wrong[f"{expected} taken for {found}"] += 1
    total = right + wrong.total()
    score = score_drops(
        urls_of(files) & planted.keys(),
        urls_of(list_documents(work_dir)),
        truth,
        lambda case: case["kind"] == "language" and case["language"] not in settings.keep,
    )
    accuracy = right / total if total else None
    print(
        f"planted languages: accuracy {share_text(accuracy)} of {total}; dropping the others: {score}", file=sys.stderr
    )
    return {
        "accuracy": accuracy,
        "identified": total,
        "confusions": dict(wrong.most_common(5)),
        "drop": score.to_json(),
    }


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main))
