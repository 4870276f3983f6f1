"""Send every report of a run to a logger of your own.

    python examples/logger.py
    python -m sfactory.train --env CartPole-v1 --log.loggers examples.logger:JsonLines

A logger has three methods, which are called in a thread of its own: what it waits for holds up no run, and what it
raises ends the logger with one line, not the run.
"""

import argparse
import json
from pathlib import Path

from sfactory import Config, LogConfig, train
from sfactory.telemetry.metrics import Report, scalars


class JsonLines:
    """Writes the figures of each report as a line of JSON."""

    def start(self, config: Config, run_dir: Path) -> None:
        self._file = (run_dir / "reports.jsonl").open("a")  # a run that is resumed adds to it

    def write(self, report: Report) -> None:
        figures = {"env_steps": report.env_steps, **dict(scalars(report))}
        print(json.dumps(figures), file=self._file, flush=True)

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--run", default="runs/logger")
    args = parser.parse_args()

    log = LogConfig(loggers=(JsonLines,), report_every_s=1.0)
    train(Config(env="CartPole-v1", steps=args.steps, run=args.run, log=log))
    last = (Path(args.run) / "reports.jsonl").read_text().splitlines()[-1]
    print(f"last report: {json.loads(last)['episode/episode_return_mean']:.1f} return")
