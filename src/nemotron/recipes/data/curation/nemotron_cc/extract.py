# /// script
# [tool.runspec]
# schema = "1"
# docs = "Find the main text of crawled pages"
# name = "data/curate/extract"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/extract"
# default = "default"
# schema = "schema.py:ExtractConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 1: WARC files -> documents with the main text of each page, without what stands around it.

    nemotron data curate extract -c tiny
    python extract.py --config tiny run.data=null run.truth=null 'warc=[/data/CC-MAIN-2024-30/*.warc.gz]'

A page is decoded by its byte order mark, its HTTP header or its head. Pages without main text, too large, too slow,
undecodable, not HTML or not found, and records that are damaged, are counted by reason; nothing is lost in silence.

Simplified against the paper: the published data was extracted by jusText. Here it is trafilatura, which falls back on
jusText where it finds too little.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.data_prep.curation.extraction import ExtractionSettings, extract_shard, plan_extraction
from nemotron.data_prep.curation.step import (
    collect,
    list_documents,
    publish_step,
    read_documents,
    read_truth,
    share_text,
)
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.jsonl import read_jsonl
from nemotron.kit import Dataset, Source, open_run, print_complete, read_pipe
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import ExtractConfig


def main() -> None:
    """Extract the main text of all pages and publish the documents."""
    cfg: ExtractConfig = load_script_config(__file__, inputs=read_pipe)
    files = list_files(cfg.warc, formats=("warc",))
    settings = ExtractionSettings(cfg.max_html_bytes, cfg.max_seconds, cfg.min_chars, cfg.max_replaced)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        # --- A task a WARC file ---------------------------------------------------------------------------------------
        work_dir = run.dir / "work"
        plan = plan_extraction(files, {"step": "extract", **cfg.model_dump(exclude={"run"})})
        with run.phase("extract"):
            table = collect(plan, work_dir, extract_shard, settings, engine)
        print(table, file=sys.stderr)

        # --- Measure: what was planted is known -----------------------------------------------------------------------
        metrics: dict[str, Any] = {}
        if cfg.run.truth:
            metrics["planted"] = _measure(list_documents(work_dir), Dataset.load(cfg.run.truth).path)

        # --- Publish --------------------------------------------------------------------------------------------------
        # Reading a crawl once more, only for its digest, would take as long as the step itself.
        own = (
            [] if cfg.run.data else [Source(name=f.name, detail=f"{f.size} bytes, version {f.version}") for f in files]
        )
        dataset = publish_step(table, work_dir, run.output_dir, metrics, sources=own)
        print(f"{dataset.ref}: {dataset.num_examples} documents", file=sys.stderr)
        print_complete({"data": dataset})


def _measure(files: list[Path], truth_dir: Path) -> dict[str, Any]:
    """Precision and recall of lines against the planted main texts, and of the pages that had to give nothing."""
    planted = {row["url"]: row["text"] for _, row in read_jsonl(truth_dir / "main_text.jsonl")}
    broken = {
        url: case["type"] for url, cases in read_truth(truth_dir).items() for case in cases if case["kind"] == "broken"
    }
    found = right = wanted = 0
    kept, surplus, seen = Counter[str](), Counter[str](), set()
    for path in files:
        for document in read_documents(path):
            url = document["url"]
            if url in broken:
                kept[broken[url]] += 1
            elif url in planted:
                seen.add(url)
                lines, planted_lines = (
                    Counter(" ".join(line.split()) for line in text.split("\n") if line.strip())
                    for text in (document["text"], planted[url])
                )
                found += lines.total()
                wanted += planted_lines.total()
                right += (lines & planted_lines).total()
                surplus.update(lines - planted_lines)
    lost = len(planted.keys() - broken.keys() - seen)
    # Both are None where the truth is of another crawl.
    precision, recall = right / found if found else None, right / wanted if wanted else None
    metrics = {
        "line_precision": precision,
        "line_recall": recall,
        "lines": wanted,
        "pages_lost": lost,
        "broken_pages_kept": dict(kept),
        "most_frequent_surplus": [line[:100] for line, _ in surplus.most_common(3)],
    }
    print(
        f"planted main text: lines precision {share_text(precision)}, recall {share_text(recall)} of"
        f" {wanted}; {lost} good pages lost; of broken pages kept: {dict(kept) or 'none'}",
        file=sys.stderr,
    )
    return metrics


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main))
