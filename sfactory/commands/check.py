"""``sfactory check``: find what is wrong with an environment before it is trained on, and what speed to expect."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sfactory.commands.checks.advice import Expectation, advise, expect
from sfactory.commands.checks.findings import Facts, Finding, Stage, Unmakeable
from sfactory.commands.checks.inspection import process_main
from sfactory.config import Config, check_types, env_name
from sfactory.config.command_line import CommandOptions, Switch, read_command_line
from sfactory.envs import probe
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError, SfactoryError, telling_errors
from sfactory.files import json_values
from sfactory.profiling.measure import Interrupted
from sfactory.runtime.processes import WorkerProcesses, fork_server
from sfactory.telemetry.console import new_console

DESCRIPTION = """Make an environment, play random actions in it, and say what is wrong with it, which speed to expect on
this machine and what limits it, and which preset and flags suit it. Takes the flags of a run, for their sizes decide
the speed."""
PROG = "sfactory check"
PROCESS = "check"
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
SHARED = 0.9
"""Share of its time that a step has a core below which it is told that there are other programs."""
SHOWN_OUTPUT = 2000
"""Last characters of what a process printed that are shown when it ends by itself."""


@dataclass(frozen=True)
class Options(CommandOptions):
    """Flags of the command besides those of a run."""

    json: Switch = False
    """Print one JSON object instead of tables."""
    seconds: float = 10.0
    """Longest time for 10,000 steps with random actions, and for measuring the speed."""
    timeout: float = 60.0
    """Seconds after which an environment that does not come back counts as hanging."""
    no_speed: Switch = False
    """Leave the expected speed out."""


@dataclass
class Result:
    """All that is known of an environment.

    Attributes:
        findings: Of all checks.
        facts: None if random actions could not be played.
        unmakeable: Whether it could not be made.
        expectation: None if it was not measured.
        advice: One sentence each.
    """

    findings: list[Finding] = field(default_factory=list)
    facts: Facts | None = None
    unmakeable: bool = False
    expectation: Expectation | None = None
    advice: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """The findings that must be mended."""
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def exit_status(self) -> int:
        """0 fine, 1 problems found, 2 the environment cannot be made."""
        return 2 if self.unmakeable else int(bool(self.problems))


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 fine, 1 problems found, 2 the environment cannot be made, 130 interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    line = read_command_line(sys.argv[1:] if args is None else args, PROG, DESCRIPTION, Options)
    options, config = line.options, line.config
    if not config.env:
        raise ConfigError("env is not set; name a Gymnasium id, for example sfactory check CartPole-v1")
    if not all(seconds > 0 and math.isfinite(seconds) for seconds in (options.seconds, options.timeout)):
        raise ConfigError("seconds and timeout must be above 0, and finite")
    result = check(config, options)
    if options.json:
        print(json.dumps(json_values(_values(config, result)), allow_nan=False))
    else:
        _show(new_console(), config, result)
    return result.exit_status


def check(config: Config, options: Options) -> Result:
    """Check an environment in processes of their own.

    Args:
        config: A resolved config that names the environment.
        options: What to do.
    """
    check_types(config)
    request = EnvRequest.of(config)
    with _silence(), fork_server():
        result = _inspect(request, options)
        if result.facts is not None and not result.problems:
            spec = probe(request)
            if not options.no_speed:
                try:
                    result.expectation = expect(config, spec, options.seconds)
                except Interrupted:
                    raise
                except SfactoryError as error:
                    result.findings.append(Finding("speed", "problem", str(error)))
            if not result.problems:
                result.advice = advise(config, result.facts, spec, result.expectation)
    return result


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let nothing that an environment prints, here or in other processes, reach the terminal; it is told instead."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        with (
            open(os.devnull, "w") as null,  # for streams that are not the descriptors', as in a notebook
            contextlib.redirect_stdout(null),
            contextlib.redirect_stderr(null),
        ):
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)


def _inspect(request: EnvRequest, options: Options) -> Result:
    """Have a process check the environment, and survive whatever the environment does to it."""
    result, stage = Result(), "start"
    with WorkerProcesses() as processes:
        processes.start(PROCESS, process_main, cloudpickle.dumps(request), options.seconds)
        output = Path(processes.folders[PROCESS]) / "output"
        deadline = time.monotonic() + options.timeout
        while processes.alive():
            for event in processes.take(0.1):
                deadline = time.monotonic() + options.timeout
                match event:
                    case Stage():
                        stage = event.name
                    case Finding():
                        result.findings.append(event)
                    case Facts():
                        result.facts = event
                    case Unmakeable():
                        result.findings.append(Finding("construction", "problem", event.message))
                        result.unmakeable = True
                    case None:  # the end
                        return result
            if time.monotonic() > deadline:
                message = f"it hangs: nothing came back within {options.timeout:g} s (--timeout)"
                return _ended(result, stage, message)
        code = processes.exit_codes().get(PROCESS)
        said = output.read_text(errors="replace")[-SHOWN_OUTPUT:].strip() if output.exists() else ""
    message = f"it ended its process with exit code {code}; an environment must raise an exception instead"
    return _ended(result, stage, f"{message}; its last output:\n{said}" if said else message)


def _ended(result: Result, stage: str, message: str) -> Result:
    """A result whose process did not come to its end."""
    result.findings.append(Finding(stage, "problem", message))
    result.unmakeable = stage in ("start", "construction")
    return result


# Showing


def _show(console: Console, config: Config, result: Result) -> None:
    table = Table("check", "", "", box=box.SIMPLE, show_header=False, title=escape(env_name(config.env)))
    for finding in result.findings:
        table.add_row(finding.check, f"[{COLOURS[finding.level]}]{finding.level}[/]", escape(finding.message.strip()))
    console.print(table)
    if result.facts is not None:
        console.print(_measured(result.facts))
    if result.expectation is not None:
        console.print(f"Speed: {result.expectation}", highlight=False, markup=False, soft_wrap=True)
    for sentence in result.advice:
        console.print(f"  {sentence}", highlight=False, markup=False, soft_wrap=True)
    problems = len(result.problems)
    told = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems"
    if result.unmakeable:
        told = "the environment cannot be made"
    console.print(f"{env_name(config.env)}: {told}", style="bold red" if problems else "bold green", markup=False)


def _measured(facts: Facts) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    agents = f", {facts.agents} agents" if facts.agents > 1 else ""
    rows = f", {facts.rows} rows a step" if facts.rows > 1 else ""
    table.add_row("kind", f"{facts.kind}{agents}{rows}, {facts.steps:,} env steps played")
    others = f"; other programs had its core for {1 - facts.running_share:.0%}" if facts.running_share < SHARED else ""
    table.add_row("step", f"{facts.step}, {facts.cpu_share:.0%} of it at work{others}")
    table.add_row("reset", str(facts.reset))
    return table


def _values(config: Config, result: Result) -> dict[str, Any]:
    return {
        "env": env_name(config.env),
        "problems": len(result.problems),
        "makeable": not result.unmakeable,
        "findings": [finding._asdict() for finding in result.findings],
        "facts": None if result.facts is None else dataclasses.asdict(result.facts),
        "expectation": None if result.expectation is None else dataclasses.asdict(result.expectation),
        "preset": config.preset,
        "advice": result.advice,
    }


if __name__ == "__main__":
    sys.exit(main())
