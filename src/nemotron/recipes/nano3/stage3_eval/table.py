"""The results of `evaluate.py` as a plain text table."""

from __future__ import annotations

from typing import Any

from nemotron.kit.tables import aligned
from nemotron.recipes.nano3.stage3_eval.bands import BandCheck


def format_table(metrics: dict[str, Any]) -> str:
    """All of `metrics` that fits a terminal: scores a family and model, baselines, differences, text, bands."""
    roles = list(metrics["models"])
    parts = [_scores(metrics, roles, "greedy"), _scores(metrics, roles, "sampled")]
    parts += [_at_k(metrics, roles, "pass"), _at_k(metrics, roles, "majority"), _reasoning(metrics)]
    parts += [_hallucinated(metrics, roles), _differences(metrics), _text(metrics, roles), _ruler(metrics)]
    parts += [_drafts(metrics), _quantization(metrics), _bands(metrics)]
    return "\n\n".join(part for part in parts if part)


def _aligned(title: str, rows: list[list[str]]) -> str:
    """Rows under each other: the first column to the left, the others to the right."""
    lines = aligned(rows, "<" + ">" * (len(rows[0]) - 1))
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _scores(metrics: dict[str, Any], roles: list[str], which: str) -> str:
    """Scores with their 95 % intervals; greedy ones beside what understanding nothing would score.

    `seen, at most`: share of the task space among the tasks that the training data list. Training meets some of them:
    RL draws fewer of its prompts, and pretraining samples its sources by weight.
    """
    roles = [role for role in roles if which in metrics["tasks"][role]["mean"]]
    if not roles:
        return ""
    baselines = metrics["baselines"] if which == "greedy" else {}
    rows = [["family", *(["constant", "look-up", "seen, at most"] if baselines else []), *roles]]
    for family in [*metrics["baselines"], "mean"]:
        row = [family]
        if baselines:
            known = baselines.get(family)
            row += [_share(known["constant"]), _share(known["nearest_neighbour"])] if known else ["", ""]
            row += [_tiny_share(known["seen_fraction"])] if known else [""]
        for role in roles:
            scores = metrics["tasks"][role]
            entry = scores["mean"] if family == "mean" else scores["families"][family]
            low, high = entry[f"{which}_95"]
            row.append(f"{_share(entry[which])} [{_share(low)}, {_share(high)}]")
        rows.append(row)
    temperature = "greedy" if which == "greedy" else "sampled at temperature 1"
    return _aligned(f"pass@1 in %, {temperature}, with 95 % interval", rows)


def _at_k(metrics: dict[str, Any], roles: list[str], which: str) -> str:
    """pass@k or majority@k of all samples of a task; the smaller k are in the results alone."""
    name = f"{which}_at_k"
    roles = [role for role in roles if any(name in entry for entry in metrics["tasks"][role]["families"].values())]
    if not roles:
        return ""
    # A model without chat template may have been asked for fewer samples than the others.
    last = {role: str(metrics["tasks"][role]["samples"]) for role in roles}
    rows = [["family", *(f"{role} @{last[role]}" for role in roles)]]
    for family in [*metrics["baselines"], "mean"]:
        scores = [metrics["tasks"][role] for role in roles]
        entries = [each["mean"] if family == "mean" else each["families"][family] for each in scores]
        if any(name in entry for entry in entries):
            cells = [(entry[name][k], *entry[f"{name}_95"][k]) for entry, k in zip(entries, last.values(), strict=True)]
            rows.append([family, *(f"{_share(at)} [{_share(low)}, {_share(high)}]" for at, low, high in cells)])
    return _aligned(f"{which}@k in %, of all samples, with 95 % interval", rows)


def _reasoning(metrics: dict[str, Any]) -> str:
    """Greedy scores and lengths with reasoning on, under each budget, and off: the models that were asked so."""
    roles = list(metrics["reasoning"])
    if not roles:
        return ""
    by_control = {"on": metrics["tasks"]}
    for role, controlled in metrics["reasoning"].items():
        for control, scores in controlled.items():
            by_control.setdefault(control, {})[role] = scores
    rows = [["reasoning", *(head for role in roles for head in (role, "tokens"))]]
    for control, scores in by_control.items():
        row = [f"at most {control} tokens" if control.isdecimal() else control]
        for role in roles:
            mean = scores[role]["mean"] if role in scores else {}
            row += [_share(mean.get("greedy")), f"{mean['greedy_tokens']:.1f}" if mean else "-"]
        rows.append(row)
    return _aligned("pass@1 in %, greedy, mean over the families, and tokens a response", rows)


def _hallucinated(metrics: dict[str, Any], roles: list[str]) -> str:
    """How often models call tools that prompts do not declare; nothing where none does."""
    if not any(metrics["tasks"][role]["mean"].get("hallucinated_tool") for role in roles):
        return ""
    rows = [["family", *roles]]
    for family in metrics["baselines"]:
        entries = [metrics["tasks"][role]["families"][family] for role in roles]
        cells = [(entry["hallucinated_tool"], *entry["hallucinated_tool_95"]) for entry in entries]
        rows.append([family, *(f"{_share(rate)} [{_share(low)}, {_share(high)}]" for rate, low, high in cells)])
    return _aligned("responses that call a tool which the prompt does not declare, in %, with 95 % interval", rows)


def _tiny_share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2g} %"


def _differences(metrics: dict[str, Any]) -> str:
    """Paired differences of each pair of models."""
    rows = [["difference in points", "pass@1", "mean", "95 % interval", "p", "worse families"]]
    for pair, comparison in metrics["comparisons"].items():
        for which, entry in comparison.items():
            mean = entry["mean"]
            low, high = mean["difference_95"]
            rows.append(
                [
                    pair,
                    which,
                    f"{100 * mean['difference']:+.1f}",
                    f"[{100 * low:+.1f}, {100 * high:+.1f}]",
                    f"{mean['p']:.2g}",
                    ", ".join(entry["worse"]) or "none",
                ]
            )
    return _aligned("paired comparison on the same tasks", rows) if len(rows) > 1 else ""


def _text(metrics: dict[str, Any], roles: list[str]) -> str:
    """Bits per byte of each source: the models here, and the trigram as pretraining measured it."""
    sources = sorted({source for role in roles for source in metrics["text"][role]})
    if not sources:
        return ""
    measured = metrics["pretrain_text"]
    rows = [["source", *roles, "base, all text", "trigram, all text"]]
    for source in sources:
        whole = measured.get(source, {})
        row = [source, *(f"{text[source]:.3f}" if source in (text := metrics["text"][role]) else "-" for role in roles)]
        for key in ("bits_per_byte", "trigram_bits_per_byte"):
            row.append(f"{whole[key]:.3f}" if key in whole else "-")
        rows.append(row)
    return _aligned("bits per byte on held-out text", rows)


def _ruler(metrics: dict[str, Any]) -> str:
    """Recall of each of RULER's tasks by length, beside that of naming candidates at random."""
    by_role = metrics.get("ruler", {})
    rows = [["task", "tokens", "chance", *by_role]]
    for length, tasks in next(iter(by_role.values()), {}).items():
        for task in tasks:
            entries = [scores[length][task] for scores in by_role.values()]
            cells = [(entry["recall"], *entry["recall_95"]) for entry in entries]
            shown = [f"{_share(recall)} [{_share(low)}, {_share(high)}]" for recall, low, high in cells]
            rows.append([task, length, _share(entries[0]["chance"]), *shown])
    return _aligned("RULER: recall in %, greedy, with 95 % interval", rows) if len(rows) > 1 else ""


def _drafts(metrics: dict[str, Any]) -> str:
    """How many tokens a pass of speculative decoding settles, before multi-token prediction was healed and after."""
    rows = [["decoding", "before", "after"]]
    for mode, lengths in metrics["acceptance_length"].items():
        rows.append([mode, f"{lengths['before']:.3f}", f"{lengths['after']:.3f}"])
    return _aligned("tokens settled a pass of speculative decoding", rows) if len(rows) > 1 else ""


def _quantization(metrics: dict[str, Any]) -> str:
    """How far quantised models are from the full one, on held-out rows of SFT."""
    rows = [["model", "KL, nats a token", "next token right, %", "of the full model", "MB", "in bf16"]]
    for role, measured in metrics["quantization"].items():
        shares = [_share(measured[key]) for key in ("accuracy", "teacher_accuracy")]
        stored = measured["bytes"]
        sizes = [f"{stored[key] / 1e6:.2f}" if stored else "-" for key in ("quantized", "full")]
        rows.append([role, f"{measured['kl']:.4f}", *shares, *sizes])
    return _aligned("quantised models beside the full one, on held-out text of SFT", rows) if len(rows) > 1 else ""


def _bands(metrics: dict[str, Any]) -> str:
    """Each expected number, and whether it was reached; beside them the families that this machine cannot verify."""
    rows = [["number", "reached", "expected", ""]]
    for entry in metrics["bands"]:
        check = BandCheck(entry["name"], entry["value"], entry["relation"], entry["bound"])
        reached = "-" if check.value is None else f"{check.value:.3f}"
        verdict = "ok" if check.passed else "OUTSIDE"
        rows.append([check.name, reached, f"{check.relation} {check.bound:g}", verdict])
    rows += [[family, "-", "-", "not run"] for family in metrics["not_run"]]
    return _aligned("bands", rows) if len(rows) > 1 else ""
