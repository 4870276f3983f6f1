"""``sfactory train``: train an agent, or resume a run. In Python: :func:`sfactory.train`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfactory.errors import check_platform, telling_errors

if TYPE_CHECKING:
    from sfactory.config.command_line import CommandLine, TrainOptions

DESCRIPTION = """Train a reinforcement-learning agent. The same command again resumes the run in its folder;
--overwrite starts anew."""


@telling_errors
def main(args: Sequence[str] | None = None, prog: str = "python -m sfactory.train") -> int:
    """Run the command.

    Args:
        args: The command line; None: that of the process, which does nothing else.
        prog: The command, as messages name it.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 129, 130 or 143 interrupted after saving.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    check_platform()
    from sfactory.runtime.interrupts import as_program

    with as_program() if args is None else contextlib.nullcontext():
        from sfactory.config.command_line import TrainOptions, read_command_line

        return _run(read_command_line(sys.argv[1:] if args is None else args, prog, DESCRIPTION, TrainOptions))


def _run(line: CommandLine[TrainOptions]) -> int:
    """Show the configuration, or train; gives the exit status."""
    if line.options.show_config:
        from sfactory.config import annotated_yaml
        from sfactory.runtime.planning import make_plan

        planned = make_plan(line.config).config if line.config.env else line.config
        print(annotated_yaml(line.config, line.origins, planned))
        return 0
    from sfactory.runtime.processes import fork_server, not_collecting

    with contextlib.nullcontext() if line.config.serial else fork_server():
        # Imports torch, which takes its time, while the server does the same.
        with not_collecting():
            from sfactory.runtime.runner import run_resolved

        result = run_resolved(line.config)
    return 0 if result.status == "completed" else 128 + (result.signal or 2)


if __name__ == "__main__":
    sys.exit(main())
