"""The configuration of a run: its fields, where their values come from, and what they must be."""

from sfactory.config.checking import check_types
from sfactory.config.command_line import (
    CommandLine,
    CommandOptions,
    Switch,
    first_word_as,
    from_command_line,
    read_command_line,
)
from sfactory.config.declaring import changed, given_values
from sfactory.config.env_source import env_name
from sfactory.config.fields import Config, EvalConfig, LogConfig, LossConfig, ModelConfig, OptimConfig, RuntimeConfig
from sfactory.config.fitting import fitted, fitted_anew
from sfactory.config.showing import annotated_yaml
from sfactory.config.sources import from_dict, load_yaml, merged, preset_value, resolve, to_dict

__all__ = [
    "CommandLine",
    "CommandOptions",
    "Config",
    "EvalConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "RuntimeConfig",
    "Switch",
    "annotated_yaml",
    "changed",
    "check_types",
    "env_name",
    "first_word_as",
    "fitted",
    "fitted_anew",
    "from_command_line",
    "from_dict",
    "given_values",
    "load_yaml",
    "merged",
    "preset_value",
    "read_command_line",
    "resolve",
    "to_dict",
]
