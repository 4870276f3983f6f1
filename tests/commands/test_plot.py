"""Learning curves: the right runs together, and a word about those that cannot be shown."""

from __future__ import annotations

import fcntl
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from sfactory.commands import main
from sfactory.commands.plot import band_of, grouped
from sfactory.errors import ConfigError
from sfactory.runs.curves import Curve, read_curve


def curve(name: str, **settings: Any) -> Curve:
    return Curve(name, {"env_steps": np.array([1.0])}, settings)


def files(folder: Path, **curves: list[tuple[float, float]]) -> list[str]:
    """CSV files of curves, given as pairs of env steps and return."""
    for name, points in curves.items():
        rows = (f"{steps},{steps / 10},{value}\n" for steps, value in points)
        (folder / f"{name}.csv").write_text("env_steps,wall_s,episode_return_mean\n" + "".join(rows))
    return [str(folder / f"{name}.csv") for name in curves]


def test_seeds_of_one_configuration_are_one_group() -> None:
    shared = {"env": "A", "log.keep": 3}
    curves = [curve(f"a-{i}", seed=i, run=f"a-{i}", **shared | {"log.keep": i}) for i in range(3)]
    assert {label: len(group) for label, group in grouped(curves, "config").items()} == {"A": 3}


def test_a_group_is_called_by_its_environment_and_what_differs() -> None:
    settings = [{"env": "A", "optim.lr": 0.1}, {"env": "A", "optim.lr": 0.2}, {"env": "B", "optim.lr": 0.1}]
    curves = [curve(str(i), **one) for i, one in enumerate(settings)]
    assert list(grouped(curves, "config")) == ["A, optim.lr 0.1", "A, optim.lr 0.2", "B"]


def test_a_file_named_like_an_environment_hides_no_settings_of_its_runs() -> None:
    runs = [curve(str(i), env="A", **{"optim.lr": rate}) for i, rate in enumerate((0.1, 0.2))]
    assert list(grouped([*runs, curve("A-7")], "config")) == ["A, optim.lr 0.1", "A, optim.lr 0.2", "A"]


def test_files_are_seeds_of_one_name() -> None:
    curves = [curve(name) for name in ("hopper-71", "hopper-72", "hopper-sync-71")]
    assert list(grouped(curves, "config")) == ["hopper", "hopper-sync"]


def test_groups_by_a_pattern_and_by_none() -> None:
    curves = [curve(name) for name in ("x-fast-1", "y-fast-2", "x-slow-1")]
    assert [len(group) for group in grouped(curves, "fast|slow").values()] == [2, 1]
    assert list(grouped(curves, "^([xy])-")) == ["x", "y"]
    assert len(grouped([*curves, curves[0]], "none")) == 4
    for wrong in ("(", "nothing"):
        with pytest.raises(ConfigError, match=f"group is {'.' if wrong == '(' else wrong}"):
            grouped(curves, wrong)


def test_png_and_svg_are_drawn_with_seeds_of_other_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = files(tmp_path, a_1=[(10, 1), (20, 2)], a_2=[(12, 2), (40, 8)], b=[(5, 1)])
    assert main(["plot", *runs, "--group", "^(.)", "--out", str(tmp_path / "out"), "--smooth", "0.1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == [str(tmp_path / "out.png"), str(tmp_path / "out.svg")]
    assert "drawn to 20, where a_1 ends, of 40" in shown.err
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")


def test_runs_with_one_report_meet_if_it_is_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = files(tmp_path, a_1=[(9081, 20)], a_2=[(9065, 22)], a_3=[(4000, 30)])
    band = band_of("a", [read_curve(run) for run in runs[:2]], "env_steps", "episode_return_mean", 0.0)
    assert band is not None and (band.runs, list(band.x), list(band.line)) == (2, [9065], [21])
    assert main(["plot", *runs, "--group", "(a)_", "--out", str(tmp_path / "none.svg")]) == 2
    said = capsys.readouterr().err
    assert "the runs of a have no env_steps in common; plot them with --group none" in said
    assert "there is no curve of episode_return_mean by env_steps; name another column" in said
    assert not (tmp_path / "none.svg").exists()


def test_several_columns_are_panels_and_time_is_an_axis(tmp_path: Path) -> None:
    (run,) = files(tmp_path, a=[(10, 1), (20, 2), (30, 1)])
    out = str(tmp_path / "one.svg")
    assert main(["plot", run, "--y", "return_mean", "wall_s", "--x", "time", "--out", out]) == 0
    assert (tmp_path / "one.svg").read_text().count('id="axes_') == 2


def test_a_column_without_values_has_no_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "env_steps,episode_return_mean,kl,eval_env_steps,eval_return_mean\n"
    (tmp_path / "a.csv").write_text(names + "10,1,0.1,,\n20,2,0.2,,\n")
    command, out = ["plot", str(tmp_path / "a.csv")], tmp_path / "out.svg"
    assert main([*command, "--y", "return_mean", "eval_return_mean", "kl", "--out", str(out)]) == 0
    assert out.read_text().count('id="axes_') == 2
    assert "there is no curve of eval_return_mean by eval_env_steps, which has no panel" in capsys.readouterr().err
    assert main([*command, "--y", "eval_return_mean", "--out", str(tmp_path / "none.svg")]) == 2
    said = capsys.readouterr().err
    assert "there is no curve of eval_return_mean by eval_env_steps; name another column with --y" in said
    assert not (tmp_path / "none.svg").exists()


def test_runs_without_reports_are_left_out_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = files(tmp_path, a=[(10, 1), (20, 2)], empty=[])
    living = tmp_path / "living"
    living.mkdir()
    (living / "config.yaml").write_text("env: A\n")
    (living / "metrics.csv").write_text("env_steps,wall_s,episode_return_mean\n10,1,5\n20,2,6\n30,")
    lock = os.open(living / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert main(["plot", *runs, str(living), "--out", str(tmp_path / "out.svg")]) == 0
    finally:
        os.close(lock)
    said = capsys.readouterr().err
    assert "empty has no report, and is left out" in said and "living still goes on" in said
    assert main(["plot", runs[1]]) == 2
    assert "none of these runs has a report; name others" in capsys.readouterr().err


def test_what_is_no_run_is_left_out_and_a_folder_of_runs_is_searched(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "sweep" / "trials" / "0000" / "seed-3"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("env: A\n")
    (run / "metrics.csv").write_text("env_steps,episode_return_mean\n10,1\n20,2\n")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("env: [")
    others = [str(tmp_path / name) for name in ("notes.txt", "empty", "damaged")]
    assert main(["plot", *others, str(tmp_path / "sweep"), "--out", str(tmp_path / "out.svg")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("note: ") and line.endswith("; it is left out") for line in said] == [True] * 3
    assert "notes.txt is no run folder and no CSV file" in said[0]
    assert main(["plot", *others]) == 2
    assert len(capsys.readouterr().err.splitlines()) >= 3


@pytest.mark.parametrize("style", ["default", "ggplot"])
def test_more_groups_than_colours_have_other_lines(tmp_path: Path, style: str) -> None:
    matplotlib_style = pytest.importorskip("matplotlib.style")
    runs = files(tmp_path, **{f"run{i}": [(10, i), (20, i)] for i in range(12)})
    with matplotlib_style.context(style):
        assert main(["plot", *runs, "--group", "none", "--out", str(tmp_path / "out.svg")]) == 0
    drawn = (tmp_path / "out.svg").read_text()
    styles = re.findall(r'<path d="[^"]*"[^>]* style="fill: none; ([^"]*stroke-width: 1.5[^"]*)"', drawn)
    assert len(set(styles)) == 12


@pytest.mark.parametrize("names", [[f"run{i}" for i in range(40)], [f"a-{'long-' * 30}name-{i}" for i in range(3)]])
def test_the_legend_of_many_groups_and_of_long_names_is_whole(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    runs = files(tmp_path, **{name: [(10, 1), (20, 2)] for name in names})
    assert main(["plot", *runs, "--group", "none", "--out", str(tmp_path / "out.png")]) == 0
    (figure,) = drawn
    figure.draw_without_rendering()
    extents = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert len(extents) == len(names)
    for extent in extents:
        assert extent.x1 <= figure.bbox.x1 and figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1
        assert extent.y1 <= figure.axes[0].get_window_extent().y0


def test_dollar_signs_and_missing_glyphs_in_names_are_no_matter(tmp_path: Path, recwarn: Any) -> None:
    names = ["$a_{b$", "\N{CJK UNIFIED IDEOGRAPH-4E2D}"]
    runs = files(tmp_path, **{name: [(10, 1), (20, 2)] for name in names})
    assert main(["plot", *runs, "--group", "none", "--out", str(tmp_path / "out.png")]) == 0
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--out", "."], "out is ., a folder; name a file in it"),
        (["--out", "x.gif"], "its suffix must be one of .png, .svg, .pdf"),
        (["--out", "/nowhere/x"], "there is no folder /nowhere"),
        (["--smooth", "2"], "smooth is 2; it must be 0 to 1"),
        (["--y", "reward"], "y is reward, and no run has such a column; there are env_steps"),
    ],
)
def test_a_mistake_is_one_error_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    runs = files(tmp_path, a=[(10, 1)])
    assert main(["plot", *runs, *flags]) == 2
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", *files(tmp_path, a=[(10, 1)])]) == 2
    assert 'pip install -e ".[plot]"' in capsys.readouterr().err
