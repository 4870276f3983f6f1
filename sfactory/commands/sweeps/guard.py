"""``python -m sfactory.commands.sweeps.guard ARGS...``: a Python process that does not outlive the sweep.

Each byte on standard input asks the process to end, by SIGTERM. The end of standard input does so, too, unless it was
asked before: it tells that the sweep is gone, however it ended. (The kernel's signal at a parent's death does not
serve: it comes once for each thread of the parent, and the second SIGTERM ends a run at once, unsaved. It does serve
where this process itself is killed, which has one thread.)
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

POLL_S = 0.1
PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""


def main(args: Sequence[str]) -> int:
    """Run a Python process to its end; gives its exit status."""
    prctl = ctypes.CDLL(None).prctl
    process = subprocess.Popen(
        [sys.executable, *args], stdin=subprocess.DEVNULL, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    )
    asked = gone = False
    while process.poll() is None:
        if gone:
            process.wait()
        elif select.select([sys.stdin], [], [], POLL_S)[0]:
            gone = not os.read(sys.stdin.fileno(), 1)
            if not (gone and asked):
                process.terminate()
            asked = True
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # handled, since the process would inherit that they are ignored
        signal.signal(number, lambda *_: None)
    sys.exit(main(sys.argv[1:]))
