"""perf/RESULTS.md is what the raw runs make, and every program appends rows that its table has columns for."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import pytest

from perf import learning_results, results, tables
from perf.fps import Result
from perf.learning import row_of
from perf.peers import records as peer_records
from perf.references import BY_NAME, REFERENCES
from sfactory.profiling.ceiling import Ceiling


def test_results_are_what_the_data_make(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["results", "--check"])
    assert results.main() == 0, capsys.readouterr().err


def test_a_changed_file_is_noticed(monkeypatch, tmp_path):
    changed = tmp_path / "RESULTS.md"
    changed.write_text(results.RESULTS.read_text() + "more\n")
    monkeypatch.setattr(results, "RESULTS", changed)
    monkeypatch.setattr(sys, "argv", ["results", "--check"])
    assert results.main() == 1


def test_results_are_short():
    lines = results.RESULTS.read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("table", tables.TABLES)
def test_a_table_has_its_columns(table):
    with (tables.DATA / f"{table}.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == tables.TABLES[table]
    assert rows
    assert {len(row) for row in rows} == {len(header)}


NUMERIC = {
    "runs", "env_steps_per_s", "ceiling", "fraction_of_ceiling", "ratio", "target", "score", "seconds", "seed",
    "env_steps", "expected", "value", "low", "high",
}  # fmt: skip


@pytest.mark.parametrize("table", tables.TABLES)
def test_figures_are_numbers(table):
    for row in tables.read(table):
        for column in NUMERIC & row.keys():
            if row[column]:
                float(row[column])


def test_runs_are_appended_with_their_origin(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["fps", "--json", "/here/x.json", "--only", "pong", "--record"])
    ceiling = Ceiling(2e-4, 1e-4, 1e-4, 2, 1024, "float32", "cpu", "cpu")
    runs = Result("pong", "--env ALE/Pong-v5", [4000.0, 3000.0], [ceiling] * 2).records()
    tables.record("throughput", runs, "perf.fps", header_in(tmp_path, "throughput"))
    first, second = tables.read("throughput", tmp_path)
    assert first["command"] == "python -m perf.fps --only pong"
    assert first["commit"]
    assert first["date"]
    assert first["machine"] == tables.machine_class()
    assert (first["env_steps_per_s"], second["env_steps_per_s"]) == ("4000", "3000")
    assert first["ceiling"] == "5000"
    assert first["fraction_of_ceiling"] == "0.800"


def test_a_command_is_told_without_the_places_of_a_machine(monkeypatch, tmp_path):
    places = ["--runs=/here/and there", "--venvs", "/my folder", "--only", "pong", "--json", "x.json", "--record"]
    monkeypatch.setattr(sys, "argv", ["learning", *places])
    tables.record("gains", [{"kernel": "tanh"}], "perf.learning", header_in(tmp_path, "gains"))
    assert [row["command"] for row in tables.read("gains", tmp_path)] == ["python -m perf.learning --only pong"]


def test_scores_are_appended(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["learning"])
    reference = next(r for r in REFERENCES if r.name == "cartpole-lstm")
    args = argparse.Namespace(peer=None, sync=True)
    rows = [row_of(reference, 11, args, 500.0, 31.4), row_of(reference, 12, args, 454.0, 40.0)]
    tables.record("learning", rows, "perf.learning", header_in(tmp_path, "learning"))
    first, second = tables.read("learning", tmp_path)
    assert first["flags"] == "--model.core lstm --sync"
    assert (first["seed"], first["score"], second["score"]) == ("11", "500.00", "454.00")


def test_peers_scores_are_told_apart_and_shown_beside(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["learning"])
    lander = BY_NAME["lunarlander"]
    rows = [row_of(lander, 11, argparse.Namespace(peer="sample-factory", sync=False), 99.0, 300.0)]
    tables.record("learning", rows, "perf.learning", header_in(tmp_path, "learning"))
    found = tables.read("learning", tmp_path)
    assert (found[0]["trainer"], found[0]["env"], found[0]["note"]) == (
        "Sample Factory",
        "LunarLander-v3",
        "LunarLander-v2",
    )
    shown = next(line for line in learning_results.references(found) if "LunarLander" in line)
    assert "99 (1), 300 s" in shown and "not run" in shown


def test_seeds_of_earlier_commits_count_where_nothing_that_trains_has_changed_since():
    runs = [("1", "11", "100"), ("2", "12", "200"), ("2", "13", "300"), ("3", "13", "500")]
    rows = [dict(zip(("commit", "seed", "score"), run, strict=True)) for run in runs]
    assert [row["score"] for row in learning_results.newest_seeds(rows)] == ["500"]
    assert [row["score"] for row in learning_results.newest_seeds(rows, since="2")] == ["200", "500"]
    assert [row["score"] for row in learning_results.newest_seeds(rows, since="unknown")] == ["500"]


def test_rounds_beside_peers_are_appended(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["peers"])
    speeds = {"sfactory, same": 2000.0, "sample-factory, usual": 500.0, "sample-factory": 800.0, "rllib": None}
    speeds["sfactory, throughput"] = 4000.0
    measured = [{"workload": "pong", "trainer": trainer, "fps": speed} for trainer, speed in speeds.items()]
    tables.record("peers", peer_records(measured, 1), "perf.peers", header_in(tmp_path, "peers"))
    rows = tables.read("peers", tmp_path)
    assert [(row["trainer"], row["setting"], row["ratio"]) for row in rows] == [
        ("sfactory", "same", ""),
        ("Sample Factory", "usual", "4"),
        ("Sample Factory", "best", "5"),
        ("sfactory", "throughput", ""),
    ]
    assert rows[1]["version"] == "2.1.1"


def test_times_to_a_score_are_appended(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["peers", "--to-score"])
    measured = [
        {"workload": "cartpole", "trainer": "sfactory", "seconds": 5.31, "score": 500.0, "target": 475},
        {"workload": "cartpole", "trainer": "stable-baselines3", "seconds": 180.0, "score": None, "target": 475},
    ]
    tables.record("time_to_score", peer_records(measured, 2), "perf.peers", header_in(tmp_path, "time_to_score"))
    mine, other = tables.read("time_to_score", tmp_path)
    assert (mine["seconds"], mine["round"]) == ("5.3", "2")
    assert (other["trainer"], other["seconds"], other["note"]) == ("SB3", "", "not in 180 s")
    assert results.score_cell([mine, other]) == "5.3 (1); 1 of 2 missed it"


def header_in(folder: Path, table: str) -> Path:
    (folder / f"{table}.csv").write_text(",".join(tables.TABLES[table]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("cpuinfo", "machine"),
    [
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f avx512_bf16 amx_tile", "Intel AMX, 2 cores"),
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f avx512_bf16", "AMD AVX-512 bf16, 2 cores"),
        ("vendor_id : AuthenticAMD\nflags : avx2", "AMD AVX2, 2 cores"),
        ("processor : 0", "other, 2 cores"),
    ],
)
def test_machines_are_told_apart_by_their_instructions(cpuinfo, machine):
    assert tables.machine_class(cpuinfo, cores=2) == machine
