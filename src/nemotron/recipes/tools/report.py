"""One HTML page from the records of a recipe: python report.py nano3-eval-results-tiny --output report.html

Everything is read from records: the results of the evaluation, the models and data behind it, and the metrics of the
runs that made them, which the versions carry wherever they are moved. The family's `report.yaml` says what is shown of
its training, `report.html.jinja` how the page looks. The page needs no network and no script; it follows the reader's
dark or light setting. A record that is no longer there leaves its figure out. This is a tool and no step of a recipe:
it carries no runspec block. Unlike the other tools it has no command of its own and takes plain options.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.env import output_root
from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.curation.step import StepTable, source_rows, source_samples
from nemotron.data_prep.work.shards import restore
from nemotron.kit.chat import END_THINK, parse_response
from nemotron.kit.commands import command_hint
from nemotron.kit.lineage import format_lineage, iterate, walk
from nemotron.kit.metrics import format_seconds, parse_metrics, read_metrics
from nemotron.kit.run import METRICS_FILE, PHASES_FILE
from nemotron.recipes.tools.options import write_output
from nemotron.recipes.tools.runs_plot import drawn
from nemotron.recipes.tools.svg import Interval, Series, interval_chart, line_chart

RECIPES = Path(__file__).resolve().parents[1]
BEGIN_TURN, END_TURN = "<|im_start|>", "<|im_end|>"  # in the text of an answer that tools interrupt


@dataclass(frozen=True)
class Records:
    """The evaluation, the versions that it read by role, and what its family says about itself (`report.yaml`)."""

    evaluation: Version
    inputs: dict[str, Version]
    registry: Registry
    family: dict[str, Any]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the evaluation."""
        metrics: dict[str, Any] = self.evaluation.record["metrics"]
        return metrics

    @property
    def names(self) -> dict[str, str]:
        """Role -> what the page calls the model."""
        return {role: model["name"] for role, model in self.family["models"].items()}

    @property
    def models(self) -> dict[str, Version]:
        """Role -> model, in the order of training."""
        return {role: self.inputs[role] for role in self.names if role in self.inputs}


def read_records(ref: str, registry: Registry, family: Path | None = None) -> Records:
    """The evaluation that `ref` means and what stands behind it.

    Args:
        family: folder of the recipe that made it; None: the one here that the record names.

    Raises:
        UserError: it is not an evaluation of models, or was made by a family that has no report.
    """
    evaluation = registry.resolve(ref)
    if "bands" not in evaluation.record.get("metrics", {}):
        raise UserError(f"{evaluation.ref} is not the result of an evaluation", "as in nano3-eval-results-tiny")
    producer = str(evaluation.record["producer"].get("name") or "")
    about = (family or RECIPES / producer.partition("/")[0]) / "report.yaml"
    if not producer or not about.is_file():
        raise UserError(f"{evaluation.ref} was made by {producer or 'nobody known'}, which has no report.yaml")
    inputs: dict[str, Version] = {}
    for role, pinned in evaluation.record["inputs"].items():
        with contextlib.suppress(UserError):  # removed since
            inputs[role] = registry.resolve(pinned)
    return Records(evaluation, inputs, registry, yaml.safe_load(about.read_text(encoding="utf-8")))


def run_dir(version: Version) -> Path | None:
    """The directory of the run that made a version, or None when it is no longer there."""
    producer = version.record.get("producer") or {}
    if not (producer.get("name") and producer.get("fingerprint")):
        return None
    return next(output_root().joinpath(producer["name"]).glob(f"*-{producer['fingerprint']}"), None)


def run_lines(version: Version, name: str) -> list[dict[str, Any]]:
    """The lines of a JSONL file of the run that made a version; once its directory is gone, those that the version has.

    The version has what there was when it was published: of the wall times, not those of what came after.
    """
    folder = run_dir(version)
    if folder is not None and (folder / name).is_file():
        return read_metrics(folder / name)
    return parse_metrics((version.run_file(name) or "").encode(), f"{version.ref}: {name}")


def wall_time(version: Version) -> str:
    """Time of all phases of the run that made a version; empty when its records are gone."""
    seconds = sum(line["seconds"] for line in run_lines(version, PHASES_FILE))
    return format_seconds(seconds) if seconds else ""


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f}"


def minus(text: str) -> str:
    """`text` with the typographic minus sign."""
    return text.replace("-", "−")


def facts(records: Records) -> list[str]:
    """What stands under the title: the evaluation, when, of which commit, models of which size."""
    record = records.evaluation.record
    lines = [records.evaluation.ref, f"{record['created_at'][:16].replace('T', ' ')} UTC"]
    if commit := record["producer"].get("git_commit"):
        lines.append(f"commit {commit[:12]}")
    sizes = {model.record["fields"].get("num_parameters") for model in records.models.values()} - {None}
    return lines + [f"{size / 1e6:.2f}\u00a0M\u00a0parameters" for size in sizes]


def curves(records: Records) -> list[Markup]:
    """The figures that the family asks for: loss, reward and entropy over the steps of the models' runs."""
    figures = []
    for curve in records.family["curves"]:
        model = model_of(records, curve["model"])
        log = [] if model is None else run_lines(model, METRICS_FILE)
        lines: dict[str, list[tuple[float, float]]] = {}
        for line in log:
            for label, value in labelled(line, curve["metrics"]):
                lines.setdefault(label, []).append((line["step"], value))
        series: list[Series] = []
        for label, points in lines.items():
            series += drawn(label, points)
        if curve.get("trigram") and log:
            series += trigram_lines(records, (log[0]["step"], log[-1]["step"]))
        figures.append(line_chart(curve["title"], "optimiser step", curve["unit"], series))
    return [figure for figure in figures if figure]


def model_of(records: Records, place: str) -> Version | None:
    """The model of a figure: that of a role, or, as in `rlhf/judge`, an input of it, or one of that; None where it is
    not there."""
    role, *inputs = place.split("/")
    model = records.models.get(role)
    for key in inputs:
        pinned = None if model is None else model.record["inputs"].get(key)
        model = None
        with contextlib.suppress(UserError):
            model = records.registry.resolve(pinned) if pinned else None
    return model


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


def score_charts(records: Records) -> list[Markup]:
    """pass@1 of every model on every family of tasks, greedy and sampled, beside the best constant answer."""
    metrics, roles = records.metrics, list(records.models)
    constant = {family: base["constant"] for family, base in metrics["baselines"].items()}
    charts = []
    for which in ("greedy", "sampled"):
        rows: list[tuple[str, dict[str, Interval]]] = []
        for family in constant:
            entries = {records.names[role]: metrics["tasks"][role]["families"][family] for role in roles}
            measured = {name: entry for name, entry in entries.items() if entry.get(which) is not None}
            rows.append((family, {name: Interval(e[which], *e[f"{which}_95"]) for name, e in measured.items()}))
        title, labels = f"pass@1, {which}, with 95 % intervals", [records.names[role] for role in roles]
        charts.append(interval_chart(title, "share of held-out tasks solved", rows, labels, constant))
    return [chart for chart in charts if chart]


def at_k(records: Records) -> list[list[str]]:
    """pass@k and majority@k of each model by k, a row a family and k: of how many samples a task has."""
    by_role = {role: records.metrics["tasks"][role] for role in records.models}
    rows = []
    for family in [*records.metrics["baselines"], "mean"]:
        entries = [each["mean"] if family == "mean" else each["families"][family] for each in by_role.values()]
        for k in sorted({k for entry in entries for k in entry.get("pass_at_k", {})}, key=int):
            row = [family, k]
            for entry in entries:
                row += [percent(entry.get(name, {}).get(k)) for name in ("pass_at_k", "majority_at_k")]
            rows.append(row)
    return rows


def text_bits(records: Records) -> list[list[str]]:
    """Bits per byte of held-out text, a row a source: under every model, then base model and trigram on all of it."""
    metrics = records.metrics
    whole, by_role = metrics.get("pretrain_text") or {}, [metrics["text"].get(role, {}) for role in records.models]
    rows = []
    for source in sorted({source for bits in by_role for source in bits}):
        values = [bits.get(source) for bits in by_role]
        values += [whole.get(source, {}).get(key) for key in ("bits_per_byte", "trigram_bits_per_byte")]
        rows.append([source, *("–" if value is None else f"{value:.3f}" for value in values)])
    return rows


def curation(records: Records) -> list[tuple[list[dict[str, Any]], dict[str, list[dict[str, str]]]]]:
    """What was read, kept and dropped on the way to the pretraining data, as rows and as samples by reason.

    First the steps whose documents it was made from, in their order, each under the name of its run; then the sources
    of the data itself.
    """
    data = records.inputs.get("pretrain_data")
    if data is None:
        return []
    steps: dict[str, dict[str, StepTable]] = {}
    for node in iterate(walk(data.ref, records.registry)):
        if not node.problem:
            table = records.registry.resolve(node.ref).record.get("metrics", {}).get("table")
            with contextlib.suppress(TypeError, KeyError, AttributeError):  # a metric of another kind
                steps[node.ref] = {node.made_by: restore(StepTable, table)}
    metrics = data.record["metrics"]
    return [
        *((source_rows(step), source_samples(step)) for step in reversed(steps.values())),
        (metrics.get("curation", []), metrics.get("dropped_samples", {})),
    ]


def spoken(generation: dict[str, Any]) -> Markup:
    """What a model said as HTML: whether it is right; of each turn the reasoning in grey, what it says, what a tool
    answered with a bar beside it.
    """
    mark = Markup('<span class="{}">{}</span> ').format(*(("good", "✓") if generation["right"] else ("bad", "✗")))
    first, *others = generation["text"].removesuffix("</s>").split(BEGIN_TURN)
    parts = [_said(first)]
    for turn in others:
        role, _, text = turn.partition("\n")
        results = text.removesuffix("\n").removesuffix(END_TURN)
        parts.append(_said(text) if role == "assistant" else Markup('<span class="tool">{}</span>').format(results))
    return mark + Markup("\n").join(parts)


def _said(turn: str) -> Markup:
    # A chat prompt ends with <think>, so the text begins within it; without the closing tag it is all answer.
    text = turn.removesuffix("\n").removesuffix(END_TURN)
    reasoning, answer = parse_response(text) if END_THINK in text else (None, text.strip())
    thought = Markup('<span class="thought">{}</span>\n').format(reasoning) if reasoning else Markup("")
    return thought + (answer or Markup('<span class="thought">(nothing)</span>'))


def build_page(records: Records) -> str:
    """The whole page. UserError: none of the models is there, or none is one that the family describes."""
    metrics, roles = records.metrics, list(records.models)
    if not roles:
        described = f"{', '.join(records.names)} of its family's report.yaml"
        raise UserError(f"{records.evaluation.ref}: none of its models is left that is one of {described}")
    measured = [
        (which, role)
        for which in ("greedy", "sampled")
        for role in roles
        if metrics["tasks"][role]["mean"].get(which) is not None
    ]
    counts = curation(records)
    dropped = [
        [row["source"], row["outcome"], f"{row['documents']:,}", f"{row['bytes'] / 1e6:,.3f}"]
        for rows, _ in counts
        for row in rows
    ]
    samples = [
        [reason, f"{sample['source']} {sample['id']}", sample["text"]]
        for _, by_reason in counts
        for reason, several in by_reason.items()
        for sample in several[:1]
    ]
    last = records.models[roles[-1]]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"percent": percent, "minus": minus}
    return environment.get_template("report.html.jinja").render(
        evaluation=records.evaluation,
        facts=facts(records),
        family=records.family,
        names=records.names,
        models=records.models,
        metrics=metrics,
        wall_times={role: wall_time(model) for role, model in records.models.items()},
        curves=curves(records),
        score_charts=score_charts(records),
        columns=measured,
        at_k=at_k(records),
        text=text_bits(records),
        spoken=spoken,
        dropped=dropped,
        samples=samples,
        last=last,
        lineage="\n".join(format_lineage(walk(last.ref, records.registry))),
    )


def main() -> None:
    """Parse the command line and write the page."""
    parser = argparse.ArgumentParser(description="Write one HTML page from the records behind an evaluation.")
    parser.add_argument("evaluation", help="reference of the evaluation's results, as in nano3-eval-results-tiny")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
    parser.add_argument("--family", type=Path, help="folder of the recipe (default: that of the results' name, here)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args()
    page = build_page(read_records(args.evaluation, Registry.default(), args.family))
    write_output(args.output, page)


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
