"""`nemotron runs plot`: the marks stand where the numbers are, and a page has a chart a metric."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.kit.metrics import MetricsLog
from nemotron.recipes.tools.runs_plot import HEIGHT, Options, main, text_plot
from nemotron.recipes.tools.svg import Series


def logged(folder: Path, slope: float) -> Path:
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(1, 101):
        log.log(step, loss=10.0 + slope * step, lr=0.1, phase="a")
    log.log(100, valid_loss={"web": 2.0, "code": math.inf})
    log.close()
    return folder


def marks(lines: list[str], mark: str) -> list[tuple[int, int]]:
    """(row from above, column) of each mark of the plot itself."""
    cells = [line.partition("| ")[2] for line in lines[:HEIGHT]]
    return [(row, column) for row, text in enumerate(cells) for column, cell in enumerate(text) if cell == mark]


def test_a_straight_line_is_straight() -> None:
    lines = text_plot([Series("up", [(x, x) for x in range(61)]), Series("flat", [(x, 0.0) for x in range(61)])], 80)
    assert max(map(len, lines)) <= 80
    up, flat = marks(lines, "*"), marks(lines, "o")
    assert len({column for _, column in flat}) == len(flat) and len({row for row, _ in flat}) == 1
    slope = (up[0][0] - up[-1][0]) / (up[0][1] - up[-1][1])
    for row, column in up:
        assert abs(up[0][0] + slope * (column - up[0][1]) - row) <= 1
    assert lines[-2].strip() == "* up: 60 at step 60"


def test_points_far_apart_are_joined_and_what_is_not_finite_is_left_out() -> None:
    lines = text_plot([Series("a", [(0, 1.0), (5, math.nan), (10, 1.0)])], 40)
    columns = [column for _, column in marks(lines, "*")]
    assert columns == list(range(len(columns))) and len(columns) > 20
    with pytest.raises(UserError, match="no finite number"):
        text_plot([Series("a", [(0, math.nan)])], 40)


def test_runs_share_a_plot_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {name: str(logged(tmp_path / name, slope)) for name, slope in (("up", 0.1), ("down", -0.1))}
    main(Options(runs, None, None))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].strip() == "* up loss: 20 at step 100" and lines[-1].strip() == "o down loss: 0 at step 100"
    assert marks(lines, "*")[0][0] < HEIGHT / 2 and marks(lines, "o")[-1][0] > HEIGHT / 2
    main(Options(runs, "valid_loss", None))
    assert "valid_loss.web: 2 at step 100" in capsys.readouterr().out
    page = tmp_path / "new" / "page.html"
    main(Options(runs, None, str(page)))
    text = page.read_text()
    assert [text.count(f"<figcaption>{name}<") for name in ("loss", "lr", "valid_loss.web", "valid_loss.code")] == [
        1, 1, 1, 0
    ]  # fmt: skip
    assert "svg polyline{" in text and "http" not in text
    with pytest.raises(UserError, match="no metric 'los'") as refused:
        main(Options(runs, "los", None))
    assert refused.value.hint == "did you mean loss?"
    log = MetricsLog(tmp_path / "rl" / "metrics.jsonl")
    log.log(1, reward=0.5)
    log.close()
    capsys.readouterr()
    main(Options(runs | {"rl": str(tmp_path / "rl")}, None, None))
    assert capsys.readouterr().err == "rl is left out: it has logged no loss; choose with --metric: reward\n"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has logged no metrics"):
        main(Options({"empty": str(tmp_path / "empty")}, None, None))


def test_a_log_that_is_no_json_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\nnonsense\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object"):
        main(Options({"run": str(tmp_path)}, None, None))
