"""Learning references: trains with the presets alone and holds evaluation returns against what is expected of them.

    python -m perf.learning [--only NAME ...] [--minutes 10] [--seeds 11 12 13] [--sync] [--runs FOLDER] [--record]
    python -m perf.learning --peer stable-baselines3 --only NAME ... [--seeds 11 12] [--record]

Each row of perf/references.py is one environment, trained for a stated number of env steps with each seed, then
evaluated for 50 episodes with another seed, by the most probable actions, or by drawn ones in Atari. A seed that has
its score in the folder of runs is not trained again, and one that was interrupted goes on. With `--record` a score is
appended to perf/data/learning.csv and its curve kept in perf/data/learning as soon as it is there, or later, but only
once; `python -m perf.results` makes perf/LEARNING.md of them.

With `--peer` another trainer learns the same, with the settings that its documentation has (perf/peer_tasks.py); it
must have been built by `python -m perf.peers --build`. What it has not finished it begins anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perf import tables
from perf.peer_tasks import TASKS
from perf.peers import NAMES, VENVS, run_driver
from perf.references import REFERENCES, Reference
from perf.runs import exit_at_signals

EPISODES = 50
SHORT = {"stable-baselines3": "sb3", "sample-factory": "sf"}
"""Of peers, in the names of curves."""
PEER_LIMIT_S = 4 * 3600.0
CURVES = Path(__file__).resolve().parent / "data" / "learning"
COLUMNS = ("env_steps", "wall_s", "episode_return_mean", "policy_lag_mean", "behaviour_kl", "kl", "clip_fraction")


def score_of(reference: Reference, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """(mean evaluation return, seconds of training) of a seed, which is trained if it has none yet."""
    kind = SHORT[args.peer] if args.peer else "sync" if args.sync else ""
    run = args.runs / curve_name(reference, kind, seed)
    kept = run / "score.json"
    if kept.exists():
        found = json.loads(kept.read_text())
    else:
        if args.peer:
            score, seconds = train_peer(reference, args.peer, seed, run, args.venvs)
        else:
            score, seconds = train(reference, seed, run, args.sync)
        found = {"score": score, "seconds": seconds, "recorded": False}
        kept.write_text(json.dumps(found))
        print(f"{run.name}: {score:.2f} after {seconds:.0f} s", flush=True)
    score, seconds = found["score"], found["seconds"]
    if args.record and not found.get("recorded", True):  # an older file does not say, and may have been
        keep_curve(run / "metrics.csv", CURVES / f"{run.name}.csv")
        tables.record("learning", [row_of(reference, seed, args, score, seconds)], "perf.learning")
        kept.write_text(json.dumps(found | {"recorded": True}))
    return score, seconds


def curve_name(reference: Reference, kind: str, seed: int | str) -> str:
    """Of a run folder, and of its curve in perf/data/learning.

    Args:
        kind: Empty, sync, or one of `SHORT`.
    """
    return "-".join(filter(None, (reference.name, kind, str(seed))))


def train(reference: Reference, seed: int, run: Path, sync: bool) -> tuple[float, float]:
    """Score and seconds of a run of sfactory, which goes on where it was interrupted."""
    command = [*reference.command(seed), "--run", str(run), "--log.display", "none", "--eval.no-at-end"]
    command += ["--sync"] if sync else []
    _run_to_its_end([sys.executable, "-m", "sfactory.train", *command])
    seconds = json.loads((run / "summary.json").read_text())["wall_s"]
    evaluation = ["--run", str(run), "--episodes", str(EPISODES), "--json", "--trust"]
    evaluation += ["--sampled"] if reference.sampled else []
    done = subprocess.run(
        [sys.executable, "-m", "sfactory.eval", *evaluation], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])["return_mean"], seconds


def _run_to_its_end(command: list[str]) -> None:
    """Run a command. Where this program is ended, it saves and ends, too."""
    with subprocess.Popen(command) as process:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def train_peer(reference: Reference, peer: str, seed: int, run: Path, venvs: Path) -> tuple[float, float]:
    """Score of a peer and the seconds from its command to the end of its evaluation."""
    run.mkdir(parents=True, exist_ok=True)
    asked = {"setting": TASKS[reference.name][peer], "steps": reference.steps, "seed": seed, "episodes": EPISODES}
    asked |= {"deterministic": not reference.sampled}
    asked |= {"curve": str((run / "metrics.csv").resolve()), "begun": time.time()}
    answer, seconds = run_driver(peer, venvs, asked, PEER_LIMIT_S)
    if answer is None:
        raise SystemExit(f"{peer} has not learned {reference.name} within {PEER_LIMIT_S:g} s")
    return answer["score"], seconds


def row_of(
    reference: Reference, seed: int, args: argparse.Namespace, score: float, seconds: float
) -> dict[str, object]:
    """A row of perf/data/learning.csv."""
    trainer = NAMES[args.peer] if args.peer else "sfactory"
    flags = () if args.peer else (*reference.flags, *(["--sync"] if args.sync else []))
    played = TASKS[reference.name][args.peer]["env"] if args.peer else reference.env
    return {
        "env": reference.env, "flags": " ".join(flags), "trainer": trainer, "env_steps": reference.steps,
        "measure": reference.measure, "expected": f"{reference.expected:g}", "seed": seed, "score": f"{score:.2f}",
        "seconds": f"{seconds:.0f}", "note": played if played != reference.env else "",
    }  # fmt: skip


def keep_curve(metrics: Path, curve: Path) -> None:
    """The columns of a metrics.csv that tell what was learned when, and how far the policy was behind."""
    curve.parent.mkdir(parents=True, exist_ok=True)
    with metrics.open() as source, curve.open("w", newline="") as target:
        writer = csv.DictWriter(target, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(csv.DictReader(source))


def chosen(names: Sequence[str] | None, minutes: float, peer: str | None = None) -> list[Reference]:
    """The references to run, the quick ones first."""
    asked = [r for r in REFERENCES if (r.name in names if names else r.minutes <= minutes)]
    asked = [r for r in asked if not peer or peer in TASKS.get(r.name, ())]
    return sorted(asked, key=lambda reference: reference.minutes)


def main() -> int:
    """Exit status 1 if sfactory has missed any reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[r.name for r in REFERENCES])
    parser.add_argument("--minutes", type=float, default=10, help="the most that a seed may take (10)")
    parser.add_argument("--seeds", nargs="*", type=int, help="instead of 11 to 15, or as many as their time allows")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", default=Path("build/learning"))
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--peer", choices=SHORT, help="another trainer instead of sfactory")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="where the peers are built")
    args = parser.parse_args()
    exit_at_signals()
    table = Table("environment", "env steps", "expected", "scores", "seconds")
    any_missed = False
    for reference in chosen(args.only, args.minutes, args.peer):
        seeds = args.seeds or reference.seeds
        found = [score_of(reference, seed, args) for seed in seeds]
        scores, seconds = zip(*found, strict=True)
        missed = reference.missed(scores)
        any_missed |= missed and not args.peer
        bound = f"{'<' if reference.at_most else '>'}= {reference.expected:g}{', missed' if missed else ''}"
        figures = (" ".join(f"{score:.2f}" for score in scores), " ".join(f"{each:.0f}" for each in seconds))
        table.add_row(reference.name, f"{reference.steps:,}", bound, *figures)
    Console().print(table)
    return int(any_missed)


if __name__ == "__main__":
    sys.exit(main())
