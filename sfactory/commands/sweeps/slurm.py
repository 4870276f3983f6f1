"""A Slurm array job that runs all trials of a grid or of a random search."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from sfactory.commands.sweeps.listed import ListedTrials, trial_folder
from sfactory.commands.sweeps.runs import BEGINS, command, log_file
from sfactory.commands.sweeps.scheduler import write_config
from sfactory.commands.sweeps.space import Space
from sfactory.errors import ConfigError
from sfactory.files import write_atomically

SCRIPT, LOGS = "array.sbatch", "slurm"
CORES = 8
"""Cores that the script asks for, for each run."""
SAVING_S = 120
"""Seconds before the time limit at which a run is asked to save: the script's shell (B:), which the run replaces."""


def write_array_job(space: Space, file: Path, folder: Path) -> Path:
    """Write the configurations of all trials, and the script; gives its path.

    Args:
        space: What is searched.
        file: The file that says so.
        folder: The sweep's folder, which all nodes must see under this name.

    Raises:
        ConfigError: If trials cannot be known beforehand.
    """
    if space.sampler == "tpe":
        raise ConfigError(
            "sampler is tpe, which chooses each trial by what the earlier ones have returned, so an array job cannot "
            "have them beforehand; write sampler: random or grid"
        )
    trials = ListedTrials(space, folder).all()
    for trial in trials:
        write_config(space, folder, trial)
    (folder / LOGS).mkdir(exist_ok=True)
    script = folder / SCRIPT
    write_atomically(script, _script(space, file, folder, len(trials)).encode())
    return script


def _script(space: Space, file: Path, folder: Path, trials: int) -> str:
    """Task number i trains trial i / seeds with seed number i % seeds. A run that is started again goes on."""
    seeds, runs = len(space.seeds), trials * len(space.seeds)
    limit = f"%{space.parallel}" if space.parallel else ""
    place = trial_folder(folder, 0).parent
    words = " ".join(f'"{word}"' if "$" in word else word for word in command(Path("$TRIAL"), "$SEED"))
    after = f"sfactory sweep {shlex.quote(str(file))} --folder {shlex.quote(str(folder))} --summary"
    name = re.sub(r"[^\w.-]", "_", folder.name)
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{runs - 1}{limit}
#SBATCH --cpus-per-task={CORES}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@{SAVING_S}
#SBATCH --output={_sbatch_path(folder / LOGS, "%a.log")}
# {trials} trials with {seeds} seeds each. Change the resources above to what your cluster has. Afterwards:
#   {after}
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}
SEEDS=({" ".join(map(str, space.seeds))})
TRIAL={shlex.quote(str(place))}/$(printf %04d $((SLURM_ARRAY_TASK_ID / {seeds})))
SEED=${{SEEDS[$((SLURM_ARRAY_TASK_ID % {seeds}))]}}
exec >> "{log_file(Path("$TRIAL"), "$SEED")}" 2>&1
echo {shlex.quote(BEGINS)}
exec {shlex.quote(sys.executable)} {words}
"""


def _sbatch_path(folder: Path, file: str) -> str:
    """An absolute path as a line of ``#SBATCH`` takes it: in quotes if it has spaces; patterns in the file alone."""
    text = f"{str(folder.absolute()).replace('%', '%%')}/{file}"
    return text if re.fullmatch(r"[\w./%+-]+", text) else f'"{text}"'
