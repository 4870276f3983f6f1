"""Pages that the declarations of fields and metrics make: ``python -m docs.reference PAGE > docs/PAGE.md``."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from sfactory.config import Config
from sfactory.config.declaring import DeviceNames, Setting, settings_of, types_of
from sfactory.config.presets import PRESETS
from sfactory.config.short_help import documentation_of
from sfactory.telemetry.metrics import METRICS, Report

_CONFIG = """# Every config field

Each field is a flag (`--optim.lr 1e-3`, with `-` or `_`), a key of a YAML file (`--config run.yaml`) and an argument of
`sfactory.Config` or of one of its groups. Later wins: defaults < the preset of the environment < YAML < flags.

```yaml
env: CartPole-v1
steps: 300000
optim:
  lr: 1e-3
```

```python
from sfactory import Config, OptimConfig

config = Config(env="CartPole-v1", steps=300_000, optim=OptimConfig(lr=1e-3))
```

A field that is *unset* follows from others or from the machine. A default here is that of no preset; the
[presets](#presets) come last. [What happens if a field changes when a run is resumed](resume.md) has a page of its own.
This page is printed by `python -m docs.reference config`.
"""
_METRICS = """# What the numbers mean

A run writes one row of `metrics.csv` each `log.report_every_s` seconds. TensorBoard shows the same figures, the live
display some of them. An empty cell was not known in that interval.

```sh
sfactory plot runs/cartpole --y return_mean fps
```

## Reading them

- **Does it learn?** `episode_return_mean` is of sampled actions while the policy changes. For a figure to publish, take
  `eval_return_mean` (`--eval.every`) or `sfactory eval`.
- **Is a step too large?** `kl` is what the epochs of a batch change, `clip_fraction` how many samples are beyond
  the clip range. If both grow while returns fall, lower `optim.lr` or `epochs`.
- **Are samples too old?** `behaviour_kl` tells what `policy_lag_mean` amounts to. If it is larger than `kl`, see
  [what policy lag costs](lag.md).
- **Does the critic follow?** `explained_variance` near 1 is good, near 0 it knows nothing yet, below 0 it misleads. If
  it stays 0 except for rounding, the critic gives every observation the same value; the run then says so.
- **Does the policy still explore?** `entropy` falls slowly. If it is near 0 while returns are low, raise
  `loss.entropy_coef`. With `loss.exploration kl` the column is log n less the entropy of n allowed choices, and rises.
- **What limits the speed?** Whoever is busy near 1; rollout and policy together where inference is inline, as by
  default on a CPU. `sfactory profile` says it exactly: [tuning for throughput](throughput.md).
- **Is anything wrong?** `env_faults`, `restarts` and `skipped_updates` stay at 0 in a healthy run:
  [faults](fault-tolerance.md).

## Every column

`summary.json` has the last of them. *Share* is between 0 and 1. This page is printed by
`python -m docs.reference metrics`.
"""
_WORDS = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Any: "name or callable",
    dict: "mapping",
    tuple: "list",
}
_EXTRAS = """
## Columns of your own

Numeric entries of `info` at an episode's end are columns `extra/NAME`: means over the same window as returns. Your own
loss terms ([extending](extending.md#a-loss-term)) are `term/NAME`.
"""


def config_page() -> str:
    """docs/config.md."""
    groups = [f for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(Config(), f.name))]
    parts = [_CONFIG, *_config_group("", Config)]
    for group in groups:
        parts += _config_group(f"{group.name}.", type(getattr(Config(), group.name)))
    parts.append("\n## Presets\n\n`--preset NAME` takes one; `auto` chooses it by the environment's id.\n")
    for name, values in PRESETS.items():
        parts.append(f"\n### {name}\n\n```yaml\n{yaml.safe_dump(values, sort_keys=False).strip()}\n```\n")
    return "".join(parts)


def _config_group(prefix: str, cls: type) -> Iterator[str]:
    title = f"`{prefix.rstrip('.')}`" if prefix else "The run"
    yield f"\n## {title}\n\n{' '.join((cls.__doc__ or '').split())}\n\n"
    yield "| field | values | default | |\n|---|---|---|---|\n"
    settings, texts, default = settings_of(cls), documentation_of(cls), cls()
    for f in dataclasses.fields(cls):
        if f.name in settings:
            cells = (_values(types_of(cls)[f.name], settings[f.name]), _told(getattr(default, f.name)), texts[f.name])
            yield f"| `{prefix}{f.name}` | {' | '.join(map(_cell, cells))} |\n"


def _values(kind: Any, declared: Setting) -> str:
    """What a field may be, for a reader."""
    if isinstance(declared.limits, DeviceNames):
        return str(declared.limits)
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    told = _WORDS[origin or kind]
    return told if declared.limits is None else f"{told}, {declared.limits}"


def _told(value: Any) -> str:
    if value is None or value == "":
        return "unset"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """docs/metrics.md."""
    texts = documentation_of(Report)
    rows = (
        f"| `{each.name}` | {each.unit} | {f'`{each.tag}`' if each.tensorboard else ''} | {_cell(texts[each.name])} |\n"
        for each in METRICS
    )
    heads = "\n| column | unit | in TensorBoard | |\n|---|---|---|---|\n"
    return _METRICS + heads + "".join(rows) + _EXTRAS


PAGES = {"config": config_page, "metrics": metrics_page}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"name a page: {', '.join(PAGES)}")
    print(PAGES[sys.argv[1]](), end="")
