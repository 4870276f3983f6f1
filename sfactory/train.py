"""``python -m sfactory.train``: train an agent, or resume a run. In Python: :func:`sfactory.train`."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
from collections.abc import Sequence

from sfactory.runtime.interrupts import end_at_once_when_interrupted, ignore_interrupts

DESCRIPTION = """Train a reinforcement-learning agent. The same command again resumes the run in its folder;
--overwrite starts anew. --config FILE reads a YAML file of the same fields; flags win over it, and both win over the
preset of the environment's family."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 or 143 interrupted after saving.
    """
    from sfactory.config import from_command_line
    from sfactory.errors import SfactoryError
    from sfactory.runtime.processes import fork_server

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        config = from_command_line(sys.argv[1:] if args is None else args, "python -m sfactory.train", DESCRIPTION)
        with contextlib.nullcontext() if config.serial else fork_server():
            # Imports torch, which takes its time, while the server does the same.
            from sfactory.runtime.supervisor import (
                run_resolved,
            )

            result = run_resolved(config)
    except SfactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0 if result.status == "completed" else 128 + (result.signal or 2)


if __name__ == "__main__":
    end_at_once_when_interrupted()
    if sys.stderr is not None:
        faulthandler.enable()  # with --serial, environments can crash this process
    status = main()
    ignore_interrupts()
    sys.exit(status)
