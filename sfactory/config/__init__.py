"""The configuration of a run: its fields, where their values come from, and what they must be."""

from sfactory.config.checking import check_types
from sfactory.config.declaring import changed, given_values
from sfactory.config.env_source import env_name
from sfactory.config.fields import Config, EvalConfig, LogConfig, LossConfig, ModelConfig, OptimConfig, RuntimeConfig
from sfactory.config.fitting import fitted, fitted_with_free_batch_size
from sfactory.config.showing import annotated_yaml
from sfactory.config.sources import (
    alike,
    flattened,
    from_dict,
    load_yaml,
    merged,
    numbers_as_text,
    preset_value,
    resolve,
    to_dict,
)

__all__ = [
    "Config",
    "EvalConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "RuntimeConfig",
    "alike",
    "annotated_yaml",
    "changed",
    "check_types",
    "env_name",
    "fitted",
    "fitted_with_free_batch_size",
    "flattened",
    "from_dict",
    "given_values",
    "load_yaml",
    "merged",
    "numbers_as_text",
    "preset_value",
    "resolve",
    "to_dict",
]
