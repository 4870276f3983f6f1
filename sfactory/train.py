"""``python -m sfactory.train``: train an agent, or resume a run. In Python: :func:`sfactory.train`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from sfactory.config import from_command_line
from sfactory.errors import SfactoryError
from sfactory.runner import Result, run_resolved, train

__all__ = ["Result", "main", "train"]

DESCRIPTION = """Train a reinforcement-learning agent. The same command again resumes the run in its folder; --overwrite starts anew.
--config FILE reads a YAML file of the same fields; flags win over it, and both win over the environment family's preset."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 or 143 interrupted after saving.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        result = run_resolved(from_command_line(sys.argv[1:] if args is None else args, "python -m sfactory.train", DESCRIPTION))
    except SfactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # before the run began
        return 130
    if result.status == "interrupted":
        return 128 + (result.signal or 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
