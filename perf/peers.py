"""sfactory side by side with other trainers, each in a virtual environment of its own.

    python -m perf.peers --build                                   # once; about 1 GB a peer
    python -m perf.peers [--only NAME ...] [--rounds 3] [--json FILE] [--record]
    python -m perf.peers --search --only pong                      # tries the candidate settings of the peers
    python -m perf.peers --to-score [--only cartpole] [--json FILE] [--record]

Throughput: every trainer learns the same model with the same rollout length and epochs from the same environment on the
CPU. A round runs each once, in turn (A B C A B C); medians and ranges are over the rounds, ratios are of medians. Env
steps are decisions of the agent that have been trained on, counted over a window of `--seconds` after a warm-up, by
perf/peer_scripts/window.py in a peer's driver and from metrics.csv in sfactory. Rounds that `--json FILE` already holds
count too, so that a long measurement can be done in parts.

Each trainer has up to two rows. sfactory's *throughput* row has the setting of perf/fps.py, with bfloat16 for images
where the CPU multiplies in it, and is to be held against the peers' fastest, whatever batches they like best; *same*
has float32 and the usual batch of 1024 samples, and is to be held against the peers' *usual* rows, or their only ones.

Time to score: the wall clock from the command to an evaluation (or the mean of the last 20 training episodes, 100 more
having ended) of at least a target, with the presets and with what the peers' documentation has. A round is a seed; the
first is the one after those of the file.

With `--record` each round is appended to perf/data/peers.csv or time_to_score.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf import sessions
from perf.fps import settled_after
from perf.peer_scripts.window import KEPT, RECENT
from perf.peer_settings import PEERS, WORKLOADS, Setting
from perf.peer_tasks import SCORES, TASKS, Score
from perf.references import BY_NAME
from perf.runs import ROOT, Report, Run, exit_at_signals, training
from perf.tables import record

SCRIPTS = Path(__file__).resolve().parent / "peer_scripts"
NAMES = {"sample-factory": "Sample Factory", "stable-baselines3": "SB3", "pufferlib": "PufferLib", "rllib": "RLlib"}
"""Of trainers in perf/data, where they differ from those of the command line."""
VENVS = Path.home() / ".cache" / "sfactory-peers"
START_LIMIT_S = 60.0
"""Longest time from a command to its first report (sfactory: until it has settled), and from the end of its window to
its exit."""


class PeerError(Exception):
    """A trainer is not built, failed, or reported nothing."""


def build(peer: str, venvs: Path) -> None:
    """Make the peer's virtual environment. torch comes first, so that no package pulls another build of it."""
    folder = venvs / peer
    pip = [
        str(folder / "bin" / "pip"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, "torch"], check=True)
    if peer == "pufferlib":
        _build_from_source(
            folder, [*pip, "--no-build-isolation", *PEERS[peer]], [*pip, "numpy<2", "setuptools<81", "wheel", "ninja"]
        )
    else:
        subprocess.run([*pip, *PEERS[peer]], check=True)


def _build_from_source(folder: Path, install: list[str], install_tools: list[str]) -> None:
    """PufferLib 3.0.0's trainer, for the CPU and without its own games, which would be downloaded from elsewhere."""
    subprocess.run(install_tools, check=True)
    for packages in folder.glob(
        "lib/python*/site-packages"
    ):  # without the games its setup.py reads a name that it has not set
        (packages / "name_for_pufferlib.pth").write_text("import builtins; builtins.c_extension_paths = []\n")
    without_cuda = (place for place in os.environ["PATH"].split(os.pathsep) if not (Path(place) / "nvcc").exists())
    path = os.pathsep.join((str(folder / "bin"), *without_cuda))
    subprocess.run(install, check=True, env={**os.environ, "PATH": path, "NO_OCEAN": "1"})


def run_driver(peer: str, venvs: Path, asked: Setting, limit_s: float) -> tuple[dict[str, float] | None, float]:
    """A driver's answer (None if it gave none in time) and the seconds from its start to the answer; ends all its
    processes.

    Raises:
        PeerError: If the peer is not built, or its driver failed; with the end of what it printed.
    """
    python = venvs / peer / "bin" / "python"
    if not python.exists():
        raise PeerError(f"{peer} is not built in {venvs}; run python -m perf.peers --build --peers {peer}")
    command = [str(python), str(SCRIPTS / f"{peer.replace('-', '_')}_driver.py"), json.dumps(asked)]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        begin = time.monotonic()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=env
        )
        try:
            answer, seconds, printed = _read_answer(process, begin + limit_s, begin)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(START_LIMIT_S if answer else 0.1)
        finally:
            end_session(process)
        if answer is None and process.returncode not in (0, -signal.SIGKILL):
            log.seek(0)
            raise PeerError(
                f"{peer} failed: {shlex.join(command)}\n{(log.read() + printed)[-3000:].decode(errors='replace')}"
            )
    return answer, seconds


def _read_answer(
    process: subprocess.Popen[bytes], deadline: float, begin: float
) -> tuple[dict[str, float] | None, float, bytes]:
    """Follow a driver's output to its RESULT line, its end or the deadline: the answer, seconds since `begin`, and the
    last output."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    tail = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            chunk = process.stdout.read(1 << 16)
            if chunk == b"":
                break
            tail = (tail + (chunk or b""))[-100_000:]
            for line in tail.split(b"\n")[:-1]:
                if line.startswith(b"RESULT "):
                    return json.loads(line[7:]), time.monotonic() - begin, tail
    return None, time.monotonic() - begin, tail


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a driver's session, and take away the torch shared memory that bears the numbers of those
    processes and of the driver."""
    ended = sessions.end(leader.pid)
    if leader.stdout:
        leader.stdout.close()
    leader.wait()
    for pid in {leader.pid, *ended}:
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def measure_sfactory(flags: str, warmup: float, seconds: float) -> float:
    """Env steps per second, counted as window.py does, with the reports of metrics.csv; the window opens once the run
    has settled, too."""
    settled = settled_after(flags)

    def window(reports: list[Report]) -> tuple[Report, Report] | None:
        """The reports that it opens and closes with."""
        begun = [report for report in reports if report["env_steps"] > 0]
        for opens in begun:
            if opens["wall_s"] - begun[0]["wall_s"] >= warmup and opens["env_steps"] > settled:
                return (opens, begun[-1]) if begun[-1]["wall_s"] - opens["wall_s"] >= seconds else None
        return None

    endless = f"{flags} --device cpu --steps {10**12} --log.report-every-s 0.5"
    with tempfile.TemporaryDirectory() as folder, training(shlex.split(endless), folder) as run:
        run.wait_until(window, START_LIMIT_S + warmup + seconds)
        measured = window(run.reports())
    if measured is None:
        raise PeerError(f"sfactory ended or reported nothing in time: {flags}")
    opens, closes = measured
    return (closes["env_steps"] - opens["env_steps"]) / (closes["wall_s"] - opens["wall_s"])


def score_sfactory(name: str, seed: int) -> tuple[float | None, float]:
    """(score or None, seconds from the command to it).

    Raises:
        PeerError: If the run fails.
    """
    begin, score = time.monotonic(), SCORES[name]
    flags = [*BY_NAME[name].command(seed), "--device", "cpu", "--log.episode-window", str(RECENT)]
    flags += [] if score.evaluated else ["--log.report-every-s", "0.5"]
    with tempfile.TemporaryDirectory() as folder, training(flags, folder) as run:
        found = _evaluated(run, score) if score.evaluated else _reached(run, score)
        seconds = time.monotonic() - begin
        if run.process.poll():
            raise PeerError(f"sfactory failed with status {run.process.returncode}: {shlex.join(flags)}")
    return found, seconds


def _evaluated(run: Run, score: Score) -> float | None:
    """The score of a run's policy once it has ended; None if that takes too long."""
    try:
        if run.process.wait(score.limit_s):
            return None
    except subprocess.TimeoutExpired:
        return None
    command = [sys.executable, "-m", "sfactory.eval", "--run", str(run.folder), "--episodes", "20", "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])["return_mean"]


def _reached(run: Run, score: Score) -> float | None:
    """The first return in training that is at least the target; None if there is none in time."""
    reached: list[float] = []

    def look(reports: list[Report]) -> list[float]:
        value = recent_return(reports)
        reached.extend([value] if value >= score.target else [])
        return reached

    run.wait_until(look, score.limit_s)
    return reached[0] if reached else None


def recent_return(reports: list[Report]) -> float:
    """The newest mean return, once enough episodes have ended; before, less than any."""
    if sum(report.get("episodes", 0.0) for report in reports) < KEPT:
        return -math.inf
    return next((x["episode_return_mean"] for x in reversed(reports) if "episode_return_mean" in x), -math.inf)


def score_peer(name: str, peer: str, seed: int, venvs: Path) -> tuple[float | None, float]:
    """(score or None, seconds from the command to it)."""
    score = SCORES[name]
    asked = {"setting": TASKS[name][peer], "steps": score.steps.get(peer, BY_NAME[name].steps), "seed": seed}
    asked |= {"episodes": 20, "deterministic": True} if score.evaluated else {"target": score.target}
    answer, seconds = run_driver(peer, venvs, asked, score.limit_s)
    return (answer["score"] if answer else None), seconds


def measure_peer(peer: str, venvs: Path, setting: Setting, warmup: float, seconds: float) -> float | None:
    """Env steps per second; None if the peer was not done in time."""
    asked = {"setting": setting, "warmup": warmup, "seconds": seconds}
    answer, _ = run_driver(peer, venvs, asked, START_LIMIT_S + warmup + 2 * seconds)
    return answer["fps"] if answer else None


def search(name: str, peer: str, args: argparse.Namespace) -> None:
    """Show how fast every candidate setting of a peer is, the fastest first."""
    tuned = WORKLOADS[name].peers[peer]
    speeds: list[tuple[float | None, Setting]] = []
    for tried in tuned.tried:
        try:
            speeds.append((measure_peer(peer, args.venvs, {**tuned.fixed, **tried}, args.warmup, args.seconds), tried))
        except PeerError as error:  # a setting that the peer refuses
            print(error)
    table = Table("env steps/s", "setting", title=f"{name}, {peer}")
    for speed, tried in sorted(speeds, key=lambda pair: -(pair[0] or 0)):
        table.add_row(
            f"{speed:,.0f}" if speed else "none in time", " ".join(f"{key}={value}" for key, value in tried.items())
        )
    Console(width=160).print(table)


def throughput_round(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures each trainer once, by turns."""
    workload = WORKLOADS[name]

    def measured(trainer: str, speed: float | None) -> dict[str, Any]:
        return {"workload": name, "trainer": trainer, "fps": speed}

    yield measured("sfactory, same", measure_sfactory(workload.same, args.warmup, args.seconds))
    for peer in _chosen(workload.peers, args):
        tuned = workload.peers[peer]
        for trainer, setting in ((f"{peer}, usual", tuned.usual), (peer, tuned.best)):
            if setting:
                of_peer = measure_peer(peer, args.venvs, {**tuned.fixed, **setting}, args.warmup, args.seconds)
                yield measured(trainer, of_peer)
    yield measured("sfactory, throughput", measure_sfactory(workload.throughput, args.warmup, args.seconds))


def score_round(name: str, seed: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs each trainer once, from its command to its score."""
    for trainer in ("sfactory", *_chosen(TASKS[name], args)):
        if trainer == "sfactory":
            reached, seconds = score_sfactory(name, seed)
        else:
            reached, seconds = score_peer(name, trainer, seed, args.venvs)
        target = SCORES[name].target
        yield {"workload": name, "trainer": trainer, "seconds": seconds, "score": reached, "target": target}


def next_round(name: str, measurements: Sequence[dict[str, Any]]) -> int:
    """The number of a workload's next round, which is its seed, after those that have been measured."""
    return 1 + max(Counter(m["trainer"] for m in measurements if m["workload"] == name).values(), default=0)


def measure_round(name: str, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a round, and keep what was asked for; of one that breaks off what it had by then."""
    measured: list[dict[str, Any]] = []
    try:
        measured.extend(score_round(name, number, args) if args.to_score else throughput_round(name, args))
    finally:
        if args.record:
            record("time_to_score" if args.to_score else "peers", records(measured, number), "perf.peers")
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else []
            args.json.write_text(json.dumps(before + measured, indent=2))
    return measured


def records(measurements: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """One round's rows of perf/data/peers.csv or time_to_score.csv; those that gave no figure are left out."""
    speeds = {m["trainer"]: m.get("fps") for m in measurements}
    rows = []
    for m in measurements:
        trainer, _, kind = m["trainer"].partition(", ")
        version = PEERS[trainer][0].partition("==")[2] if trainer in PEERS else ""
        row = {"workload": m["workload"], "trainer": NAMES.get(trainer, trainer), "version": version, "round": number}
        if "target" in m:
            missed, seconds = m["score"] is None, m["seconds"]
            row |= {"target": m["target"], "score": m["score"], "note": f"not in {seconds:.0f} s" if missed else ""}
            rows.append(row | {"seconds": "" if missed else f"{seconds:.1f}"})
        elif m["fps"]:
            own = speeds.get("sfactory, same" if kind == "usual" else "sfactory, throughput")
            ratio = f"{own / m['fps']:.3g}" if trainer in PEERS and own else ""
            rows.append(row | {"setting": kind or "best", "env_steps_per_s": f"{m['fps']:.0f}", "ratio": ratio})
    return rows


def _chosen(peers: Iterable[str], args: argparse.Namespace) -> list[str]:
    return [peer for peer in peers if not args.peers or peer in args.peers]


def throughput_table(measurements: Sequence[dict[str, Any]]) -> Table:
    """Medians, ranges, and how many times as fast as each peer sfactory is in its two settings."""
    table = Table("workload", "trainer", "env steps/s", "range", "rounds", "sfactory same", "sfactory throughput")
    for name in dict.fromkeys(m["workload"] for m in measurements):
        speeds: dict[str, list[float]] = {}
        for m in measurements:
            if m["workload"] == name and m["fps"] is not None:
                speeds.setdefault(m["trainer"], []).append(m["fps"])
        medians = {trainer: statistics.median(values) for trainer, values in speeds.items()}
        for trainer, values in speeds.items():
            own = [medians.get(f"sfactory, {kind}") for kind in ("same", "throughput")]
            ratios = [f"{speed / medians[trainer]:.1f} x" if speed else "" for speed in own]
            spread = f"{min(values):,.0f} to {max(values):,.0f}"
            table.add_row(name, trainer, f"{medians[trainer]:,.0f}", spread, str(len(values)), *ratios)
    return table


def score_table(measurements: Sequence[dict[str, Any]]) -> Table:
    """Seconds to the target, with the scores; a run that missed it is shown as such."""
    table = Table("workload", "trainer", "target", "seconds by round", "scores")
    for name, trainer in dict.fromkeys((m["workload"], m["trainer"]) for m in measurements):
        rows = [m for m in measurements if (m["workload"], m["trainer"]) == (name, trainer)]
        seconds = [f"{m['seconds']:.1f}" + ("" if (m["score"] or -1e9) >= m["target"] else " (missed)") for m in rows]
        scores = ["none" if m["score"] is None else f"{m['score']:,.0f}" for m in rows]
        table.add_row(name, trainer, f"{rows[0]['target']:g}", ", ".join(seconds), ", ".join(scores))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices={**WORKLOADS, **SCORES}, help="workloads; all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="peers; all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warmup", type=float, default=4.0, help="seconds between a trainer's first report and its window"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window")
    parser.add_argument("--venvs", type=Path, default=VENVS)
    parser.add_argument("--json", type=Path, help="keeps the measurements; those that it holds count too")
    parser.add_argument("--record", action="store_true", help="append the rounds to perf/data")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--build", action="store_true", help="make the virtual environments")
    kind.add_argument("--search", action="store_true", help="try the candidate settings of the peers")
    kind.add_argument("--to-score", action="store_true", help="wall time to a score instead of throughput")
    args = parser.parse_args()
    exit_at_signals()
    if args.build:
        for peer in _chosen(PEERS, args):
            build(peer, args.venvs)
        return
    names = [name for name in (SCORES if args.to_score else WORKLOADS) if not args.only or name in args.only]
    if args.search:
        for name in names:
            for peer in _chosen(WORKLOADS[name].peers, args):
                search(name, peer, args)
        return
    table = score_table if args.to_score else throughput_table
    measurements = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for _ in range(args.rounds):
        for name in names:
            measurements += measure_round(name, next_round(name, measurements), args)
    Console(width=160).print(table(measurements))


if __name__ == "__main__":
    main()
