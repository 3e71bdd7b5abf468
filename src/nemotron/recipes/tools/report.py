"""One HTML page from the records of a recipe: python report.py nano3-eval-results-tiny --output report.html

Everything is read from records: the results of the evaluation, the models and data behind it, and the metrics of the
runs that made them. The page needs no network and no script; it follows the reader's dark or light setting. A record
that is no longer there, such as a deleted run directory, leaves its figure out. Like `chat.py` it is a tool and no step
of a recipe: it takes plain options and carries no runspec block.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.env import output_root
from nemo_runspec.errors import UserError, run_main
from nemotron.kit.chat import END_THINK, IM_END, parse_response
from nemotron.kit.commands import command_hint
from nemotron.kit.lineage import format_lineage, walk
from nemotron.kit.metrics import format_seconds, read_metrics
from nemotron.recipes.tools.svg import Interval, Series, interval_chart, line_chart, smooth

NAMES = {"base": "base", "sft": "SFT", "sft_continued": "SFT continued", "rl": "RL"}

# Model, title, y axis, {metric: label}. `reward_*` is every metric that begins so, labelled by what follows; a metric
# that is a dictionary gives one line an entry.
CURVES: list[tuple[str, str, str, dict[str, str]]] = [
    ("base", "Pretraining: loss", "nats a token", {"loss": "training"}),
    ("base", "Pretraining: held-out text (dashed: a trigram model)", "bits a byte", {"valid_bits_per_byte": ""}),
    ("sft", "SFT: loss", "nats a trained token", {"loss": "training", "valid_loss": "held out"}),
    ("rl", "RL: reward of the rollouts", "mean reward", {"reward": "all families", "reward_*": ""}),
    ("rl", "RL: validation tasks", "pass@1", {"valid_greedy": "greedy", "valid_sampled": "sampled"}),
    ("rl", "RL: entropy of the policy", "nats a token", {"entropy": "sampled tokens"}),
]

ABOUT = (
    "One model from raw text to its aligned form, and what each stage of training reached on tasks that it never saw. "
    "Below: whether that is in the range expected of this recipe, how training went, the scores with their "
    "uncertainty, answers side by side, and everything that the last model was made from."
)

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbf9;--card:#fff;--ink:#1d1f21;--muted:#666b70;--rule:#e2e3e0;
--good:#2e7d32;--bad:#c62828;--c0:#3b7dd8;--c1:#e07b39;--c2:#3a9d6e;--c3:#a05bc4;--c4:#c2506b;--c5:#8a8f3a}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1c1f23;--ink:#e4e6e8;--muted:#969ca3;--rule:#2e3237;
--good:#7bc67e;--bad:#ef7b7b;--c0:#6ea8f2;--c1:#f0a06a;--c2:#67c799;--c3:#c493e0;--c4:#e68aa0;--c5:#c3c86f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1100px;margin:0 auto;padding:48px 24px 96px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px}h2{font-size:21px;margin:56px 0 12px}
p{max-width:72ch;margin:8px 0}.muted,.note{color:var(--muted)}.note{font-size:14px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:16px;margin:28px 0}
.card,figure{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:0}
.tile b{display:block;font-size:28px;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums}
figcaption{font-weight:600;margin-bottom:8px}svg{display:block;width:100%;height:auto}
svg text{fill:var(--muted);font:12px system-ui,sans-serif}svg .label{font-size:13px}
svg .rowname{fill:var(--ink);font-size:13px}
svg .grid{stroke:var(--rule)}svg .axis{stroke:var(--muted)}svg .baseline{stroke:var(--muted);stroke-width:3}
svg .whisker{stroke-width:2}svg polyline{fill:none;stroke-width:2;stroke-linejoin:round}
svg .faint{opacity:.28;stroke-width:1}svg .dashed{stroke-dasharray:6 4}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:8px;font-size:14px;color:var(--muted)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:15px}
th,td{padding:7px 12px;border-bottom:1px solid var(--rule);text-align:right;vertical-align:top;
font-variant-numeric:tabular-nums}tr:last-child td{border-bottom:0}
td:not(:first-child){white-space:nowrap}th{font-weight:600;color:var(--muted);vertical-align:bottom}
td small{display:block;color:var(--muted);white-space:nowrap}
tr.sum td{font-weight:600}
th:first-child,td:first-child,.texts td,.texts th,.words td:last-child,.words th:last-child{text-align:left}
.good{color:var(--good)}.bad{color:var(--bad)}.two td:nth-child(2),.two th:nth-child(2){text-align:left}
pre,.texts td{font:13px/1.5 ui-monospace,Consolas,monospace}
pre{overflow-x:auto;margin:0}.texts td,.texts td:not(:first-child){white-space:pre-wrap;overflow-wrap:anywhere}
.thought{color:var(--muted)}
.texts table{table-layout:fixed;min-width:900px}.texts th:first-child{width:190px}
.texts td small{white-space:pre-wrap}
"""


@dataclass(frozen=True)
class Records:
    """The evaluation, the versions that it read by role, and the models' runs."""

    evaluation: Version
    inputs: dict[str, Version]
    registry: Registry

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the evaluation."""
        metrics: dict[str, Any] = self.evaluation.record["metrics"]
        return metrics

    @property
    def models(self) -> dict[str, Version]:
        """Role -> model, in the order of training."""
        return {role: self.inputs[role] for role in NAMES if role in self.inputs}


def read_records(ref: str, registry: Registry) -> Records:
    """The evaluation that `ref` means and what stands behind it. UserError if it is not an evaluation of models."""
    evaluation = registry.resolve(ref)
    if "bands" not in evaluation.record.get("metrics", {}):
        raise UserError(f"{evaluation.ref} is not the result of an evaluation", "as in nano3-eval-results-tiny")
    inputs = {role: registry.resolve(pinned) for role, pinned in evaluation.record["inputs"].items()}
    return Records(evaluation, inputs, registry)


def run_dir(version: Version) -> Path | None:
    """The directory of the run that made a version, or None when it is no longer there."""
    producer = version.record.get("producer") or {}
    if not (producer.get("name") and producer.get("fingerprint")):
        return None
    return next(output_root().joinpath(producer["name"]).glob(f"*-{producer['fingerprint']}"), None)


def wall_seconds(version: Version) -> float:
    """Seconds of all phases of the run that made a version; 0 when its records are gone."""
    folder = run_dir(version)
    return sum(line["seconds"] for line in read_metrics(folder / "phases.jsonl")) if folder else 0.0


def table(head: list[str], rows: list[list[str]], style: str = "", sum_row: bool = False) -> str:
    """A table from cells that are HTML already; with `sum_row` the last row is emphasised."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    if sum_row:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="sum">', 1)
    cells = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="card wide {style}"><table><tr>{cells}</tr>{"".join(lines)}</table></div>'


def section(title: str, about: str, *parts: str) -> str:
    """A headed section; nothing when all parts are empty."""
    body = "".join(parts)
    return f"<h2>{title}</h2><p class='muted'>{about}</p>{body}" if body else ""


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f}"


def scored(entry: dict[str, Any], which: str) -> str:
    """A score with its 95 % interval beneath, in percent; a dash where it was not measured."""
    if entry.get(which) is None:
        return "–"
    low, high = entry[f"{which}_95"]
    return f"{percent(entry[which])}<small>{percent(low)} – {percent(high)}</small>"


def header(records: Records) -> str:
    """Title, where it comes from, and the numbers that matter most."""
    metrics, record = records.metrics, records.evaluation.record
    tiles = []
    for role, model in records.models.items():
        mean = metrics["tasks"][role]["mean"]
        sampled = f", {mean['sampled']:.0%} sampled" if mean.get("sampled") is not None else ""
        seconds = wall_seconds(model)
        took = f"<br>run took {format_seconds(seconds)}" if seconds else ""
        tiles.append((NAMES[role], "", f"{mean['greedy']:.0%}", f"pass@1 greedy{sampled}{took}"))
    passed = sum(band["passed"] for band in metrics["bands"])
    state = ("good", "all in band") if metrics["in_band"] else ("bad", "not all in band")
    tiles.append(("expected numbers", state[0], f"{passed} / {len(metrics['bands'])}", state[1]))
    boxes = "".join(
        f'<div class="card tile"><span class="muted">{name}</span><b class="{mark}">{value}</b>'
        f'<span class="note">{note}</span></div>'
        for name, mark, value, note in tiles
    )
    about = [records.evaluation.ref, f"{record['created_at'][:16].replace('T', ' ')} UTC"]
    about += [f"commit {commit[:12]}" for commit in [record["producer"].get("git_commit")] if commit]
    sizes = {model.record["fields"].get("num_parameters") for model in records.models.values()} - {None}
    about += [f"{size / 1e6:.2f}\u00a0M\u00a0parameters" for size in sizes]
    title = records.evaluation.name.replace("-eval-results-", " ")
    return (
        f'<h1>{escape(title)}</h1><p class="muted">{escape(", ".join(about))}</p>'
        f'<p>{ABOUT}</p><div class="tiles">{boxes}</div>'
    )


def bands(records: Records) -> str:
    """Each expected number beside what was reached."""
    rows = []
    for band in records.metrics["bands"]:
        model, _, quantity = band["name"].partition(".")
        value = "not measured" if band["value"] is None else f"{band['value']:.3f}".replace("-", "−")
        mark = '<span class="good">in band</span>' if band["passed"] else '<span class="bad">outside</span>'
        expected = f"{'≥' if band['relation'] == '>=' else '≤'} {band['bound']:g}".replace("-", "−")
        rows.append([f"{NAMES.get(model, model)}: {quantity.replace('_', ' ')}", value, expected, mark])
    about = "The bounds stand in the config of the evaluation, under <code>bands</code>."
    return section("Expected numbers", about, table(["", "reached", "band", ""], rows, "words") if rows else "")


def curves(records: Records) -> str:
    """Loss, reward and entropy over the steps of the runs that made the models."""
    figures = []
    for role, title, y_label, labels in CURVES:
        folder = run_dir(records.models[role]) if role in records.models else None
        log = read_metrics(folder / "metrics.jsonl") if folder else []
        lines: dict[str, list[tuple[float, float]]] = {}
        for line in log:
            for label, value in labelled(line, labels):
                lines.setdefault(label, []).append((line["step"], value))
        series: list[Series] = []
        for label, points in lines.items():
            if len(points) > 40:  # noisy from step to step: the running mean, and the points faintly behind it
                series.append(Series(label, points, faint=True))
                points = smooth(points)
            series.append(Series(label, points))
        if "valid_bits_per_byte" in labels and log:
            series += trigram_lines(records, (log[0]["step"], log[-1]["step"]))
        figures.append(line_chart(title, "optimiser step", y_label, series))
    about = "Training curves are running means; the faint lines are the steps themselves."
    return section("Training", about, f'<div class="grid">{"".join(figures)}</div>' if any(figures) else "")


def labelled(line: dict[str, Any], labels: dict[str, str]) -> Iterator[tuple[str, float]]:
    """The numbers of one line of metrics that a figure shows, with the label of the curve that each belongs to."""
    for metric, label in labels.items():
        begin = metric.removesuffix("*")
        names = [key for key in line if key.startswith(begin)] if begin != metric else [metric]
        for name in names:
            value = line.get(name)
            for entry, number in value.items() if isinstance(value, dict) else [(name.removeprefix(begin), value)]:
                if isinstance(number, int | float):
                    yield label or entry, float(number)


def trigram_lines(records: Records, steps: tuple[float, float]) -> list[Series]:
    """Where an interpolated trigram model of the same training tokens stands: a level line a source, in its colour."""
    text = records.metrics.get("pretrain_text") or {}
    levels = {source: scores.get("trigram_bits_per_byte") for source, scores in text.items()}
    return [
        Series(source, [(step, level) for step in steps], dashed=True)
        for source, level in levels.items()
        if level is not None
    ]


def scores(records: Records) -> str:
    """pass@1 of every model on every family, with what understanding nothing would score."""
    metrics = records.metrics
    roles, baselines = list(records.models), metrics["baselines"]
    head = ["family", "constant<br>answer", "look-up", "seen,<br>at most"]
    columns = [
        (role, which)
        for which in ("greedy", "sampled")
        for role in roles
        if metrics["tasks"][role]["mean"].get(which) is not None
    ]
    head += [f"{NAMES[role]}<br>{which}" for role, which in columns]
    rows = []
    for family in [*baselines, "mean"]:
        base = baselines.get(family, {})
        seen = base.get("seen_fraction")
        row = [escape(family), percent(base.get("constant")), percent(base.get("nearest_neighbour"))]
        row.append("–" if seen is None else f"{100 * seen:.2g}")
        for role, which in columns:
            result = metrics["tasks"][role]
            row.append(scored(result["mean"] if family == "mean" else result["families"][family], which))
        rows.append(row)
    constant = {family: base["constant"] for family, base in baselines.items()}
    charts = []
    for which in ("greedy", "sampled"):
        intervals: list[tuple[str, dict[str, Interval]]] = []
        for family in baselines:
            entries = {NAMES[role]: metrics["tasks"][role]["families"][family] for role in roles}
            measured = {name: entry for name, entry in entries.items() if entry.get(which) is not None}
            intervals.append((family, {n: Interval(e[which], *e[f"{which}_95"]) for n, e in measured.items()}))
        title = f"pass@1, {which}, with 95 % intervals"
        labels = [NAMES[role] for role in roles]
        charts.append(interval_chart(title, "share of held-out tasks solved", intervals, labels, constant))
    about = (
        "In percent, with 95 % intervals, on held-out tasks; beside them the best constant answer, the answer of the "
        "most similar training task (look-up), and an upper bound on the share of all tasks that training has seen."
    )
    return section(
        "Evaluation", about, f'<div class="grid">{"".join(charts)}</div><br>', table(head, rows, sum_row=True)
    )


def comparisons(records: Records) -> str:
    """Paired differences between stages."""
    rows = []
    for pair, kinds in records.metrics["comparisons"].items():
        after, _, before = pair.partition(" - ")
        for which, result in kinds.items():
            mean = result["mean"]
            low, high = mean["difference_95"]
            worse = ", ".join(map(escape, result["worse"])) or "none"
            interval = f"{100 * low:+.1f} to {100 * high:+.1f}"
            difference = f"{100 * mean['difference']:+.1f}<small>{interval}</small>".replace("-", "−")
            rows.append([f"{NAMES[after]} over {NAMES[before]}, {which}", difference, f"{mean['p']:.2g}", worse])
    about = "Paired by task, in points of the mean over families; worse: significantly, corrected for all tests (Holm)."
    return section("From stage to stage", about, table(["", "difference", "p", "worse"], rows, "words") if rows else "")


def text_bits(records: Records) -> str:
    """Bits per byte of held-out text under every model."""
    metrics, roles = records.metrics, list(records.models)
    whole = metrics.get("pretrain_text") or {}
    rows = []
    for source in sorted({source for role in roles for source in metrics["text"].get(role, {})}):
        cells = [f"{metrics['text'][role][source]:.3f}" if source in metrics["text"][role] else "–" for role in roles]
        for key in ("bits_per_byte", "trigram_bits_per_byte"):
            value = whole.get(source, {}).get(key)
            cells.append("–" if value is None else f"{value:.3f}")
        rows.append([escape(source), *cells])
    head = ["source", *(NAMES[role] for role in roles), "base,<br>whole text", "trigram,<br>whole text"]
    about = (
        "Bits a byte, less is better. Every model reads the beginning of each source; what rises after the base model "
        "is what aligning it on conversations made it forget. On the right the base model on the whole text, beside "
        "a trigram model of the same training tokens."
    )
    return section("Held-out text", about, table(head, rows) if rows else "")


def generations(records: Records) -> str:
    """The same tasks, answered by every model."""
    roles, rows = list(records.models), []
    for row in records.metrics.get("generations", []):
        cells = [f"{escape(row['prompt'])}<small>expected: {escape(str(row['demonstration']))}</small>"]
        cells += [spoken(row[role]) if row.get(role) else "–" for role in roles]
        rows.append([escape(row["family"]), *cells])
    head = ["family", "task", *(NAMES[role] for role in roles)]
    about = "Greedy answers of the models to the same held-out tasks, with the reasoning before them in grey."
    return section("Side by side", about, table(head, rows, "texts") if rows else "")


def spoken(said: dict[str, Any]) -> str:
    """What a model said as HTML: whether it is right, the reasoning in grey, the answer."""
    mark = '<span class="good">✓</span> ' if said["right"] else '<span class="bad">✗</span> '
    text = said["text"].removesuffix("</s>")
    # A chat prompt ends with <think>, so the text begins within it; without the closing tag it is all answer.
    reasoning, answer = parse_response(text) if END_THINK in text else (None, text.removesuffix(IM_END).strip())
    thought = f'<span class="thought">{escape(reasoning)}</span>\n' if reasoning else ""
    return mark + thought + (escape(answer) or '<span class="thought">(nothing)</span>')


def curation(records: Records) -> str:
    """What curation read, kept and dropped, by source and reason, with examples."""
    data = records.inputs.get("pretrain_data")
    metrics = data.record["metrics"] if data else {}
    rows = [
        [escape(r["source"]), escape(r["outcome"]), f"{r['documents']:,}", f"{r['bytes'] / 1e6:,.3f}"]
        for r in metrics.get("curation", [])
    ]
    samples = [
        [escape(reason), escape(f"{sample['source']} {sample['id']}"), escape(sample["text"])]
        for reason, several in metrics.get("dropped_samples", {}).items()
        for sample in several[:1]
    ]
    return section(
        "What curation dropped",
        "Documents and megabytes by source and reason, and one example of each reason.",
        table(["source", "outcome", "documents", "MB"], rows, "two") if rows else "",
        "<br>" + table(["reason", "document", "begins"], samples, "texts") if samples else "",
    )


def lineage(records: Records) -> str:
    """The tree from the last model to the raw sources."""
    last = list(records.models.values())[-1]
    text = escape("\n".join(format_lineage(walk(last.ref, records.registry))))
    about = f"From {escape(last.ref)} to the raw sources, with the first digits of each payload digest."
    return section("Lineage", about, f'<div class="card"><pre>{text}</pre></div>')


def build_page(records: Records) -> str:
    """The whole page."""
    parts = (header, bands, curves, scores, comparisons, text_bits, generations, curation, lineage)
    body = "".join(part(records) for part in parts)
    title = escape(records.evaluation.ref)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def main() -> None:
    """Parse the command line and write the page."""
    parser = argparse.ArgumentParser(description="Write one HTML page from the records behind an evaluation.")
    parser.add_argument("evaluation", help="reference of the evaluation's results, as in nano3-eval-results-tiny")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args()
    page = build_page(read_records(args.evaluation, Registry.default()))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
