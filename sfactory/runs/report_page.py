"""The page of a run: ``report.html``, one file with curves, configuration, machine, phases and evaluation inside it."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from sfactory.config import Config, flattened, from_dict, load_yaml, resolve, to_dict
from sfactory.config.importing import is_harmless
from sfactory.errors import ConfigError, clock, thousands
from sfactory.files import write_atomically
from sfactory.runs.charts import Chart, short
from sfactory.runs.curves import OWN_COLUMNS, Curve, last_known, read_curve
from sfactory.runs.run_files import CONFIG, EVALUATION, PAGE, SUMMARY, is_number, read_json, require_run, videos_of

MOST_VIDEO_BYTES = 16 * 2**20
"""Videos beyond this are linked: they show only beside their files."""
MOST_VIDEOS = 4
CUT_OFF = 10_000
"""Env steps of an evaluation's episodes where these may never end."""
SHARE_SHOWN = 0.001
"""Least share of a phase that is told."""
UNCHANGED = ("env", "run", "overwrite")
"""Settings that say nothing by being other than their default."""
CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Learning": {
        "loss": ("loss", "policy_loss"),
        "value loss": ("value_loss",),
        "entropy, nats": ("entropy",),
        "divergence of the new policy, nats": ("kl",),
        "clip fraction": ("clip_fraction",),
        "explained variance": ("explained_variance",),
        "gradient norm": ("grad_norm",),
        "learning rate": ("lr",),
    },
    "Policy lag": {
        "lag, updates": ("policy_lag_mean", "policy_lag_max"),
        "divergence by lag, nats": ("behaviour_kl",),
    },
    "Load": {
        "env steps/s": ("fps",),
        "busy, share": ("rollout_busy", "policy_busy", "learner_busy"),
        "memory, MiB": ("rss_mb",),
    },
}
"""Columns of metrics.csv in each chart, by section and title."""
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1.5em}
h1{margin-bottom:.1em}h2{margin-top:1.6em;border-bottom:1px solid #8884}
.facts{display:flex;flex-wrap:wrap;gap:.6em 2.4em;margin:.8em 0}
.facts b{display:block;font-size:1.35em;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(380px,1fr));gap:1em}
svg text{font-size:11px;fill:currentColor;opacity:.75}svg .title{font-size:13px;opacity:1;font-weight:600}
svg line{stroke:currentColor;opacity:.12}svg polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
table{border-collapse:collapse;font-size:14px}td,th{padding:.15em 1em .15em 0;text-align:left;vertical-align:top}
td.number{text-align:right;font-variant-numeric:tabular-nums}
tr.changed{font-weight:600}tr.changed td:first-child::before{content:"\\25cf";color:#d9822b;margin-right:.4em}
video,img{max-width:420px;width:100%;border-radius:4px;image-rendering:auto}figure{margin:0}
figcaption,.quiet{opacity:.7;font-size:13px}
"""


def evaluating_command(folder: Path, config: Mapping[str, Any], episodes: int, endless: bool = False) -> str:
    """The command that adds an evaluation and a video to the page of a run.

    Args:
        config: The run's configuration, of plain values.
        episodes: To be played.
        endless: Whether episodes may never end, so that they have to be cut off.
    """
    words = ["sfactory", "report", str(folder), "--episodes", str(episodes), "--video"]
    values = flattened(config)
    names = [str(value) for name, value in values.items() if name == "env" or name.startswith("model.")]
    if str(config.get("env")).startswith("<"):  # a callable, of which only the name is left
        words += ["--env", "module:Name"]
    if any(":" in name for name in names) or not is_harmless(config.get("env_kwargs")):
        words.append("--trust")
    return shlex.join([*words, *(("--max-steps", str(CUT_OFF)) if endless else ())])


def write_page(folder: Path, ended: bool = False, out: Path | None = None) -> Path:
    """Write the page of a run, from the files in its folder; a living or killed run has one as far as it has come.

    Args:
        ended: The run has ended, though this process still holds its folder.
        out: The file; None: report.html in the folder.

    Returns:
        Its path.

    Raises:
        ConfigError: If the folder holds no run, or a damaged file.
        OSError: For example if the disk is full.
    """
    require_run(folder)
    out = folder / PAGE if out is None else out
    curve, summary, config = read_curve(folder), read_json(folder / SUMMARY), load_yaml(folder / CONFIG)
    sections = {
        "Returns": _returns(curve),
        "Evaluation": _evaluation(folder, out.parent, config, "episode_length_mean" not in last_known(curve.columns)),
        **{title: _charts(curve, charts) for title, charts in CHARTS.items()},
        "Of the environment and of loss terms": _charts(curve, _extras(curve)),
        "Where the time went": _phases(_mapping(summary.get("phases"))),
        "Configuration": _configuration(config),
        "Machine": _table(_mapping(summary.get("machine"))),
    }
    title = f"{escape(str(config.get('env')))}, seed {escape(str(config.get('seed')))}"
    body = "".join(f"<section><h2>{name}</h2>{text}</section>\n" for name, text in sections.items() if text)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>{_facts(curve, summary, curve.living and not ended)}\n{body}</body></html>\n"
    )
    write_atomically(out, page.encode(errors="backslashreplace"))  # a folder's name may be no text
    return out


def _facts(curve: Curve, summary: Mapping[str, Any], living: bool) -> str:
    """What the run has come to, in a line."""
    last = dict.fromkeys(("env_steps", "wall_s", "episode_return_mean"), np.nan) | last_known(curve.columns)
    status = "still training" if living else summary.get("status", "ended without a summary")
    told = {name: value for name, value in summary.items() if is_number(value)}
    steps, wall_s = (told.get(name, last[name]) for name in ("env_steps", "wall_s"))
    facts = {
        "status": str(status),
        "env steps": thousands(steps),
        "wall time": clock(wall_s),
        "env steps/s": thousands(told.get("fps") or (steps / wall_s if wall_s else np.nan)),
        "return in training": _figure(last["episode_return_mean"]),
    }
    if (evaluated := last.get("eval_return_mean")) is not None:
        facts["return in evaluation"] = _figure(evaluated)
    items = "".join(
        f'<div><span class="quiet">{name}</span><b>{escape(value)}</b></div>' for name, value in facts.items()
    )
    error = f"<pre>{escape(str(summary['error']))}</pre>" if summary.get("error") else ""
    return f'<div class="facts">{items}</div>{error}'


def _mapping(value: object) -> Mapping[str, Any]:
    """A mapping of a JSON file, which anyone may have edited; empty where it is none."""
    return value if isinstance(value, Mapping) else {}


def _figure(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else "-"


def _evaluation(folder: Path, place: Path, config: Mapping[str, Any], endless: bool) -> str:
    """A table of the last evaluation, and videos.

    Args:
        place: Folder of the page, from which what is not inside it is linked.
        endless: Whether no episode has ended so far.
    """
    found = read_json(folder / EVALUATION)
    rows: dict[str, str] = {}

    def number(name: str) -> float:
        return value if is_number(value := found.get(name)) else np.nan

    if found:
        rows = {
            "checkpoint": f"{found.get('checkpoint')}, {thousands(number('env_steps'))} env steps",
            "episodes": f"{found.get('episodes')}",
            "return": f"{number('return_mean'):.4g}, deviation {number('return_std'):.3g}, "
            f"from {number('return_min'):.4g} to {number('return_max'):.4g}",
            "length": f"{number('length_mean'):.4g} env steps",
        }
    table, videos = _table(rows), _videos(folder, place)
    if not (table or videos):
        command = evaluating_command(folder, config, 20, endless)
        return f"<p>none so far; <code>{escape(command)}</code> adds one, with a video</p>"
    return f'<div class="facts"><div>{table}</div>{videos}</div>'


def _videos(folder: Path, place: Path) -> str:
    """The newest videos, inside the page as far as they are small."""
    figures, room = [], MOST_VIDEO_BYTES
    for path in videos_of(folder, ".mp4", ".gif")[:MOST_VIDEOS]:
        source, size, kind = os.path.relpath(path, place), path.stat().st_size, path.suffix[1:]
        caption = f"<figcaption>{escape(path.relative_to(folder).as_posix())}</figcaption>"
        if size <= room:
            room -= size
            media = "image/gif" if kind == "gif" else "video/mp4"
            source = f"data:{media};base64,{base64.b64encode(path.read_bytes()).decode()}"
        element = (
            f'<img src="{escape(source)}" alt="an episode">'
            if kind == "gif"
            else f'<video src="{escape(source)}" controls muted loop autoplay playsinline></video>'
        )
        figures.append(f"<figure>{element}{caption}</figure>")
    return "".join(figures)


def _returns(curve: Curve) -> str:
    lines = {"training": curve.series("env_steps", "episode_return_mean")}
    if len((evaluated := curve.series("eval_env_steps", "eval_return_mean"))[0]):
        lines["evaluation"] = evaluated
    band = tuple(curve.series("env_steps", f"episode_return_{end}") for end in ("min", "max"))
    over_time = curve.series("wall_s", "episode_return_mean")
    charts = [
        Chart("return, with its range", lines, (band[0], band[1])),
        Chart("return over time", {"training": over_time}, x_label="seconds"),
        Chart("episode length, env steps", {"mean": curve.series("env_steps", "episode_length_mean")}),
    ]
    return _grid(chart.svg() for chart in charts)


def _charts(curve: Curve, charts: Mapping[str, Iterable[str]]) -> str:
    return _grid(
        Chart(title, {column: curve.series("env_steps", column) for column in columns}).svg()
        for title, columns in charts.items()
    )


def _extras(curve: Curve) -> dict[str, tuple[str, ...]]:
    """Charts of what the environment's ``info`` has, and of a user's own loss terms."""
    return {name: (name,) for name in curve.columns if name.startswith(OWN_COLUMNS)}


def _grid(drawn: Iterable[str]) -> str:
    found = "".join(drawn)
    return f'<div class="charts">{found}</div>' if found else ""


def _phases(told: Mapping[str, Any]) -> str:
    """A table of the shares of phases, as ``sfactory profile`` has it, of the whole of the last command."""
    phases = {kind: {n: x for n, x in _mapping(shares).items() if is_number(x)} for kind, shares in told.items()}
    names = [
        name
        for name in dict.fromkeys(name for shares in phases.values() for name in shares)
        if any(shares.get(name, 0) >= SHARE_SHOWN for shares in phases.values())
    ]
    if not names:
        return ""
    head = "".join(f"<th>{escape(kind)}</th>" for kind in phases)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(
            f'<td class="number">{f"{share:.1%}" if (share := shares.get(name, 0)) >= SHARE_SHOWN else ""}</td>'
            for shares in phases.values()
        )
        + "</tr>"
        for name in names
    )
    note = '<p class="quiet">Shares of each kind of worker\'s wall time, from its start to the end of the command.</p>'
    return f"{note}<table><tr><th>phase</th>{head}</tr>{rows}</table>"


def _configuration(config: Mapping[str, Any]) -> str:
    """All settings; those that differ from the defaults for this environment come first and are marked."""
    values, defaults = flattened(config), _defaults(config)

    def changed(name: str) -> bool:
        default = defaults.get(name)  # None: chosen when the run began
        return name not in UNCHANGED and default is not None and default != values[name]

    def row(name: str) -> str:
        mark = ' class="changed"' if changed(name) else ""
        default = f"default {_told(defaults[name])}" if mark else ""
        return f"<tr{mark}><td>{escape(name)}</td><td>{_told(values[name])}</td><td class='quiet'>{default}</td></tr>"

    def rows(wanted: Callable[[str], bool]) -> str:
        return "".join(row(name) for name in values if wanted(name))

    marked = rows(changed)
    rest = rows(lambda name: not changed(name))
    note = '<p class="quiet">Marked: other than the default for this environment.</p>' if marked else ""
    return f"{note}<table>{marked}</table><details><summary>all others</summary><table>{rest}</table></details>"


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the same environment has without any flag; those of no environment where they cannot be told.

    The environment, which a stranger's folder may name, is not imported: a run's config names its preset.
    """
    chosen = {name: config[name] for name in ("env", "algo", "preset") if name in config}
    if chosen.get("preset", "auto") == "auto":
        return flattened(to_dict(Config()))
    try:
        return flattened(to_dict(resolve(from_dict(chosen))))
    except ConfigError:
        return flattened(to_dict(Config()))


def _told(value: Any) -> str:
    return escape(short(value) if isinstance(value, float) and abs(value) < 1 else str(value))


def _table(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>" if rows else ""
