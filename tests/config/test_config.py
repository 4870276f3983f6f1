import dataclasses
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sfactory.config import (
    Config,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RuntimeConfig,
    devices,
    fitted,
    from_dict,
    load_yaml,
    merged,
    resolve,
    to_dict,
)
from sfactory.config.checking import check_types
from sfactory.config.command_line import from_command_line
from sfactory.config.declaring import given_names
from sfactory.config.lag import least_max_lag, max_lag, slot_count
from sfactory.config.presets import PRESETS, preset_for_env
from sfactory.config.validation import validate
from sfactory.envs import probe, resolve_env
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError


def parse(*args: str) -> Config:
    return from_command_line(args, "test")


def problems_of(call, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert caught.value.exit_status == 2
    return str(caught.value)


@pytest.fixture
def preset(monkeypatch):
    """A preset whose values differ from all defaults."""
    monkeypatch.setitem(PRESETS, "classic", {"rollout": 24, "epochs": 3, "optim": {"lr": 0.5, "minibatches": 2}})


def test_a_flag_that_is_true_or_false_may_be_followed_by_that():
    config = parse(
        "--env", "CartPole-v1", "--sync", "true", "--runtime.cuda_graphs=False", "--loss.normalize-returns", "FALSE"
    )
    assert (config.sync, config.runtime.cuda_graphs, config.loss.normalize_returns) == (True, False, False)
    assert parse("--env", "CartPole-v1", "--sync=false").sync is False
    assert parse("--env", "CartPole-v1", "--model.shared-critic", "true").model.shared_critic is True
    assert parse("--env", "CartPole-v1", "--model.shared_critic=false").model.shared_critic is False
    with pytest.raises(SystemExit):
        parse("--env", "CartPole-v1", "--no-sync", "true")
    with pytest.raises(SystemExit):
        parse("--env", "CartPole-v1", "--sync", "maybe")


def test_later_sources_win_field_by_field(preset, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("env: CartPole-v1\nepochs: 5\noptim:\n  lr: 1e-3\n")
    config = parse("--config", str(file), "--optim.lr", "0.125")
    assert (config.batch_size, config.rollout, config.epochs) == (Config().batch_size, 24, 5)
    assert (config.optim.lr, config.optim.minibatches, config.optim.eps) == (0.125, 2, OptimConfig().eps)
    assert parse("--config", str(file)).optim.lr == 0.001
    assert parse("--config", str(file), "--env", "Other-v0").rollout == Config().rollout, (
        "the flag's environment chooses the preset"
    )
    assert parse("--env=CartPole-v1", "--preset=none").rollout == Config().rollout


def test_a_preset_fills_only_what_a_python_caller_left_open(preset):
    config = resolve(Config(env="CartPole-v1", epochs=1, optim=OptimConfig(lr=3e-4)))
    assert (config.epochs, config.rollout, config.optim.lr, config.optim.minibatches) == (1, 24, 3e-4, 2)
    assert resolve(dataclasses.replace(config, rollout=7)).rollout == 7
    assert resolve(resolve(config)) == resolve(config)
    assert resolve(Config(env=lambda: None)).rollout == Config().rollout
    assert "unknown preset 'atarri'" in problems_of(resolve, Config(preset="atarri"))


def test_a_group_may_be_a_mapping(preset):
    given = Config(env="CartPole-v1", optim={"lr": 1e-3}, model={"core": "gru", "hidden": [8]})
    assert resolve(given) == resolve(
        Config(env="CartPole-v1", optim=OptimConfig(lr=1e-3), model=ModelConfig(core="gru", hidden=(8,)))
    )
    whole = resolve(Config(env="CartPole-v1"))
    assert resolve(Config(**dataclasses.asdict(whole))) == whole
    for groups, says in (
        ({"model": {"cor": "gru"}, "optim": 3}, "unknown key model.cor; did you mean model.core?"),
        ({"optim": 3}, "optim is a group and takes a mapping, not 3"),
        ({"model": OptimConfig()}, "model is a group and takes a mapping, not OptimConfig("),
    ):
        assert says in problems_of(resolve, Config(env="CartPole-v1", **groups))
    assert "optim is {}; it must be an OptimConfig" in problems_of(check_types, Config(env="CartPole-v1", optim={}))


def test_a_replaced_config_leaves_to_the_preset_what_the_original_left(preset):
    config = Config("CartPole-v1", steps=10, optim=OptimConfig(lr=1e-3))
    other = dataclasses.replace(pickle.loads(pickle.dumps(config)), epochs=1, steps=20)
    assert given_names(other) == {"env", "steps", "optim", "epochs"}
    assert (resolve(other).epochs, resolve(other).rollout, resolve(other).optim.minibatches) == (1, 24, 2)
    assert given_names(dataclasses.replace(config.optim, eps=1e-6)) == {"lr", "eps"}
    assert config == dataclasses.replace(other, epochs=config.epochs, steps=10)
    assert "_given" not in repr(config) and "_given" not in to_dict(config)


def test_words_of_yaml_mean_what_their_fields_say(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("env: CartPole-v1\nruntime: {kernels: off}\noptim: {lr: 1e-3, betas: [9e-1, 0.95]}\n")
    config = parse("--config", str(file))
    assert config.runtime.kernels == "off"
    assert (config.optim.lr, config.optim.betas) == (1e-3, (0.9, 0.95))
    file.write_text("env: CartPole-v1\nrun: null\nlog: {loggers: wandb}\n")
    said = problems_of(parse, "--config", str(file))
    assert "run is None; it must be a string" in said
    assert "log.loggers is 'wandb'; it must be a list of names" in said


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"optim": {"lr": float("inf")}}, "optim.lr is inf; it must be finite"),
        ({"loss": {"reward_scale": -float("inf")}}, "loss.reward_scale is -inf; it must be finite"),
        ({"optim": {"betas": (float("nan"), 0.5)}}, "must be finite"),
        ({"steps": 2**60}, "must be at most 2**53"),
        ({"loss": {"term_coefs": {"a": 1.0}}}, "loss.term_coefs is set, and loss.terms"),
        ({"loss": {"terms": "mine:terms", "term_coefs": {"a": "x"}}}, "loss.term_coefs a is 'x'; it must be a finite"),
        ({"loss": {"terms": "mine:terms", "term_coefs": {"a": float("nan")}}}, "loss.term_coefs a is nan"),
        ({"model": {"kwargs": {"a": 1}}}, "model.kwargs is set, and no part of the model takes it"),
    ],
)
def test_what_cannot_be_meant_is_refused(values, says):
    assert says in problems_of(validate, merged(Config(env="x", workers=1), values))


def test_unknown_keys_are_named_with_the_nearest(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("bath_size: 3\noptim: {lrr: 1}\nmodel: 5\nloss.gamma: 0.9\n")
    said = problems_of(parse, "--config", str(file))
    for part in (
        "unknown key bath_size; did you mean batch_size?",
        "unknown key optim.lrr; did you mean optim.lr?",
        "unknown key loss.gamma; write it as a field of its group, loss: {gamma: VALUE}",
        "model is a group",
    ):
        assert part in said


@pytest.mark.parametrize(("text", "says"), [("- 1\n", "mapping"), ("a: [\n", "not YAML"), (None, "cannot read")])
def test_a_bad_file_is_refused(text, says, tmp_path):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    assert says in problems_of(parse, "--config", str(file))


def test_values_of_a_wrong_type_are_all_named(tmp_path):
    file = tmp_path / "run.yaml"
    plain = "steps: many\nrollout: 1.5\nsync: 'yes'\nalgo: a2c\nworkers: two\nenv_kwargs: 3\n"
    file.write_text(f"{plain}model: {{hidden: 3}}\noptim: {{betas: [0.9]}}\n")
    said = problems_of(parse, "--env", "CartPole-v1", "--config", str(file))
    for part in (
        "steps is 'many'; it must be an integer", "rollout is 1.5", "sync is 'yes'; it must be true or false",
        "algo is 'a2c'; it must be one of appo, impala, ppo", "workers is 'two'; it must be an integer or unset",
        "model.hidden is 3; it must be a list of integers", "optim.betas is (0.9,); it must be a list of 2 numbers",
        "env_kwargs is 3",
    ):  # fmt: skip
        assert part in said, part
    assert "steps is '5'" in problems_of(validate, Config(env="x", steps="5"))
    assert "runtime is None" in problems_of(validate, Config(env="x", runtime=None))
    validate(
        Config(
            env="CartPole-v1",
            workers=2,
            steps=np.int64(2048),
            optim=OptimConfig(lr=np.float32(0.5)),
            model=ModelConfig(hidden=[64]),
        )
    )


@pytest.mark.parametrize(
    "flags", [["--bath-size", "3"], ["--steps", "many"], ["--algo", "a2c"], ["--env-kwargs", "3"], ["stray"]]
)
def test_bad_flags_end_with_status_2(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--env", "CartPole-v1", *flags)
    assert caught.value.code == 2
    assert flags[0].strip("-") in capsys.readouterr().err


def test_help_without_an_environment_says_that_the_preset_is_chosen_by_it(capsys):
    def help_of(*args: str) -> str:
        with pytest.raises(SystemExit):
            parse(*args, "--help-all")
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    what = "Preset of defaults: auto (by the environment), none, or a preset's name. (default: "
    assert f"{what}auto)" in help_of()
    assert f"{what}atari)" in help_of("--env", "ALE/Pong-v5")
    assert f"{what}box2d)" in help_of("--preset", "box2d")


def test_every_bad_number_is_named():
    nested = {"runtime": RuntimeConfig(groups=0), "optim": OptimConfig(lr=0.0), "loss": LossConfig(gamma=1.5)}
    config = Config(env="x", steps=0, seed=-1, workers=0, **nested)
    said = problems_of(validate, config)
    for name in (
        "steps is 0",
        "seed is -1",
        "workers is 0",
        "runtime.groups is 0",
        "optim.lr is 0.0",
        "loss.gamma is 1.5",
    ):
        assert name in said
    assert "env is not set" in problems_of(validate, Config())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(env="x", model=ModelConfig(hidden=(64, 0))), "model.hidden is (64, 0); each must be at least 1"),
        (
            Config(env="x", optim=OptimConfig(betas=(0.9, 1.0))),
            "optim.betas is (0.9, 1.0); each must be at least 0 and below 1",
        ),
        (Config(env="x", optim=OptimConfig(lr=0.0)), "optim.lr is 0.0; it must be above 0"),
        (
            Config(env="x", model=ModelConfig(initial_log_std=-6.0)),
            "model.initial_log_std is -6.0; it must be between -5 and 2",
        ),
        (
            Config(env="x", runtime=RuntimeConfig(rollout_nice=20)),
            "runtime.rollout_nice is 20; it must be between 0 and 19",
        ),
        (Config(env="x", device="cuda:"), "device is 'cuda:'; it must be auto, cpu, cuda or cuda:N"),
        (Config(env="x", device="cpu,cpu"), "device is 'cpu,cpu'; it must be auto, cpu, cuda or cuda:N"),
        (
            Config(env="x", runtime=RuntimeConfig(inference_device="cuda:0,gpu")),
            "runtime.inference_device is 'cuda:0,gpu'; it must be auto, cpu, cuda or cuda:N, or several of them",
        ),
    ],
)
def test_a_value_beyond_the_limits_of_its_field_is_named_with_them(config, says):
    assert says in problems_of(validate, dataclasses.replace(config, workers=1))


def test_numbers_of_numpy_become_pythons():
    config = resolve(
        Config(
            env="x", seed=np.int64(3), model=ModelConfig(hidden=(np.int32(8), 8)), optim=OptimConfig(lr=np.float32(1))
        )
    )
    assert (type(config.seed), type(config.optim.lr)) == (int, float)
    assert [type(width) for width in config.model.hidden] == [int, int]
    assert {"seed", "optim"} <= given_names(config)


def test_a_rate_that_follows_the_divergence_needs_a_second_update():
    config = Config(env="x", preset="none", workers=1, optim=OptimConfig(schedule="adaptive_kl"))
    assert "optim.schedule adaptive_kl follows" in problems_of(validate, resolve(config))
    validate(resolve(dataclasses.replace(config, epochs=2)))


def test_the_whole_help_shows_limits_and_default(capsys):
    with pytest.raises(SystemExit):
        parse("--preset", "none", "--help-all")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Learning rate of Adam. (above 0; default: 0.0003)" in said
    assert "Discount per env step. (between 0 and 1; default: 0.99)" in said
    text = "Nonlinearity of MLP encoders; image encoders, and the layer that merges several encoders, use relu."
    assert f"{text} (default: tanh)" in said


@pytest.mark.parametrize(
    ("config", "rows", "says", "remedy"),
    [
        (
            Config(env="x", workers=2, envs_per_worker=7),
            1,
            "envs_per_worker 7 is not a multiple of runtime.groups 2; try 8",
            {"envs_per_worker": 8},
        ),
        (
            Config(env="x", workers=2, batch_size=1000),
            1,
            "1000 is not a multiple of rollout 32 x rows 16 = 512; try 1024",
            {"batch_size": 1024},
        ),
        (
            Config(env="x", workers=2),
            3,
            "1024 is not a multiple of rollout 32 x rows 48 = 1536; try 1536",
            {"batch_size": 1536},
        ),
        (
            Config(env="x", workers=2, optim=OptimConfig(minibatches=3)),
            1,
            "try 2",
            {"optim": OptimConfig(minibatches=2)},
        ),
    ],
)
def test_sizes_that_do_not_divide_come_with_a_remedy_that_works(config, rows, says, remedy):
    assert says in problems_of(validate, config, rows)
    repaired = dataclasses.replace(config, **remedy)
    if repaired.envs_per_worker == 8:
        repaired = dataclasses.replace(repaired, batch_size=128)
    validate(repaired, rows)


def test_a_bound_on_the_lag_that_cannot_hold_is_refused_and_the_least_one_is_named():
    config = Config(env="x", workers=4, envs_per_worker=64, batch_size=1024)
    least = least_max_lag(config, 32)
    assert f"below {least}" in problems_of(validate, dataclasses.replace(config, loss=LossConfig(max_lag=least - 1)))
    held = dataclasses.replace(config, loss=LossConfig(max_lag=least))
    validate(held)
    assert max_lag(held, 32) == least


def test_without_lag_there_are_slots_for_one_batch_alone():
    for config in (Config(sync=True), Config(serial=True), Config(algo="ppo")):
        assert slot_count(config, 16) == 2
        assert max_lag(config, 16) == 0
    assert slot_count(Config(workers=3), 16) == 3 * 2 + 2


def test_a_config_survives_its_file():
    config = resolve(
        Config(
            env="Pendulum-v1",
            run=Path("a/b"),
            seed=np.int64(3),
            env_kwargs={"g": 9.81},
            model=ModelConfig(hidden=(8, 8)),
        )
    )
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config
    assert to_dict(Config(env=Config))["env"] == "<Config>"


def test_merging_nothing_changes_nothing():
    assert merged(Config(epochs=2), {}) == Config(epochs=2)


@pytest.mark.parametrize(("agents", "envs", "minibatches"), [(1, 32, 4), (3, 32, 4), (5, 6, 1), (2, 10, 3)])
def test_a_batch_size_left_to_the_preset_fits_the_environment(agents, envs, minibatches):
    config = fitted(
        resolve(Config(env="x", workers=2, envs_per_worker=envs, optim=OptimConfig(minibatches=minibatches))), agents
    )
    validate(config, agents)
    assert config.batch_size >= 256


def test_a_batch_size_that_was_asked_for_is_never_changed():
    config = fitted(resolve(Config(env="x", batch_size=1000)), 3)
    assert config.batch_size == 1000
    with pytest.raises(ConfigError, match="batch_size 1000 is not a multiple"):
        validate(config, 3)
    flags = fitted(from_command_line(["--env", "CartPole-v1", "--batch-size", "1000"], "x"), 3)
    assert flags.batch_size == 1000
    assert fitted(from_command_line(["--env", "CartPole-v1", "--envs-per-worker", "32"], "x"), 3).batch_size == 1536


@pytest.mark.parametrize("env", ["x", "CartPole-v1", "sfactory/MemoryGrid"])
@pytest.mark.parametrize("agents", [1, 2, 3, 4, 5, 6, 8, 12])
def test_a_batch_does_not_grow_with_the_number_of_agents(agents, env):
    usual = resolve(Config(env=env, workers=1))
    config = fitted(usual, agents)
    validate(config, agents)
    assert 0.75 <= config.batch_size / usual.batch_size <= 1.25
    assert 0.7 <= config.envs_per_group * agents / usual.envs_per_group <= 1.5
    assert fitted(config, agents) == config
    if agents == 1:
        assert config == usual


def test_environments_that_were_asked_for_stay_and_groups_divide_those_that_were_not():
    for asked in (resolve(Config(env="x", envs_per_worker=32)), parse("--env", "x", "--envs-per-worker=32")):
        assert fitted(asked, 8).envs_per_worker == 32, "also where it is what the preset has"
    for groups in (1, 2, 3, 5):
        config = fitted(resolve(Config(env="x", workers=1, runtime=RuntimeConfig(groups=groups))), 3)
        validate(config, 3)
    many = fitted(resolve(Config(env="x", workers=1)), 100)
    assert (many.envs_per_group, many.batch_size) == (1, 3200)
    validate(many, 100)
    exact = fitted(resolve(Config(env="x", batch_size=768)), 3)
    assert (exact.batch_size, exact.envs_per_worker) == (768, 8)
    validate(dataclasses.replace(exact, workers=2), 3)


@pytest.mark.parametrize("env", ["x", "CartPole-v1", "Hopper-v5", "LunarLander-v3", "MiniGrid-DoorKey-6x6-v0"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 14, 30, 62, 126])
@pytest.mark.parametrize("algo", ["appo", "ppo"])
def test_samples_under_way_do_not_grow_with_the_number_of_workers(workers, env, algo):
    usual = resolve(Config(env=env, workers=workers, algo=algo))
    config = fitted(usual, 1)
    validate(config, 1)
    assert config.batch_size == usual.batch_size
    under_way = workers * config.envs_per_worker * config.rollout / config.batch_size
    most = 1 if algo == "ppo" else 2
    assert 0.5 <= under_way <= most or (config.rollout, config.envs_per_worker) == (16, 2)
    assert fitted(config, 1) == config
    if workers == 1:
        assert config == usual
    for given in ({"envs_per_worker": usual.envs_per_worker}, {"preset": "none"}):
        asked = resolve(Config(env=env, workers=workers, algo=algo, **given))
        assert fitted(asked, 1) == asked


def test_images_are_sampled_as_by_two_workers_and_a_core_keeps_its_segments():
    pong = [fitted(resolve(Config(env="ALE/Pong-v5", workers=n)), 1, images=True) for n in (1, 2, 4, 14)]
    assert [(config.envs_per_worker, config.rollout) for config in pong] == [(8, 128), (8, 128), (4, 128), (2, 64)]
    core = ModelConfig(core="lstm")
    assert fitted(resolve(Config(env="x", workers=62, model=core)), 1).rollout == 32
    own = ModelConfig(model="some_module:Recurrent")
    assert fitted(resolve(Config(env="x", workers=62, model=own)), 1).rollout == 32, "which may have memory"
    assert fitted(resolve(Config(env="x", workers=62, rollout=32)), 1).rollout == 32


@pytest.mark.parametrize(("cores", "of_vectors", "of_images"), [(1, 1, 1), (2, 2, 2), (4, 3, 4), (16, 14, 16)])
def test_every_core_steps_environments_with_images_unless_there_is_a_gpu(cores, of_vectors, of_images, monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: cores)
    vectors, images = (
        probe(EnvRequest(resolve_env(env), {}, "auto", "clip")).observation.has_images
        for env in ("CartPole-v1", "sfactory/MemoryGrid")
    )
    assert (vectors, images) == (False, True)
    for config in (Config(device="cpu"), Config(), Config(device="cpu", runtime=RuntimeConfig(inference_device="cpu"))):
        assert devices.rollout_processes(config, vectors) == of_vectors
        assert devices.rollout_processes(config, images) == (
            of_vectors if torch.cuda.is_available() and config == Config() else of_images
        )
    assert devices.rollout_processes(Config(device="cuda"), images) == of_vectors
    assert (
        devices.rollout_processes(Config(device="cpu", runtime=RuntimeConfig(inference_device="cuda:0,cuda:1")), images)
        == of_vectors
    )
    assert devices.rollout_processes(Config(workers=3), images) == 3
    assert devices.rollout_processes(Config(serial=True), images) == 1
    assert devices.rollout_processes(Config(), False, together=True) == (1 if cores == 2 else of_vectors)


@pytest.mark.parametrize(
    ("env", "preset"),
    [
        ("CarRacing-v3", "car_racing"),
        ("LunarLander-v3", "box2d"),
        ("HalfCheetah-v5", "mujoco_low_noise"),
        ("Ant-v5", "mujoco_few_updates"),
        ("Hopper-v5", "mujoco"),
        ("InvertedDoublePendulum-v5", "mujoco_small_steps"),
        ("InvertedPendulum-v5", "mujoco"),
        ("Swimmer-v5", "mujoco_far_sighted"),
        ("LunarLanderContinuous-v3", "box2d_low_noise"),
        ("MiniGrid-DoorKey-6x6-v0", "grid"),
        ("sfactory/MemoryGrid", "memory"),
        ("procgen:procgen-coinrun-v0", "procgen"),
        ("MountainCar-v0", "classic"),
        ("MountainCarContinuous-v0", "default"),
        ("MountainCarContinuous", "default"),
        ("HalfCheetah", "mujoco_low_noise"),
        ("PongNoFrameskip", "atari"),
        ("LunarLanderContinuous", "box2d_low_noise"),
        ("gymnasium:Hopper", "mujoco"),
    ],
)
def test_ids_of_unlike_tasks_have_presets_of_their_own(env, preset):
    assert preset_for_env(env) == preset


def test_presets_know_the_algorithm():
    """The plain policy gradient has no clip that would bear several passes over a batch."""
    assert from_command_line(["--env", "Hopper-v5", "--algo", "impala"], "train").epochs == 1
    assert from_command_line(["--env", "Hopper-v5", "--algo", "impala", "--epochs", "3"], "train").epochs == 3
    assert resolve(Config(env="Hopper-v5", algo="impala")).epochs == 1
    assert resolve(Config(env="Hopper-v5")).epochs == resolve(Config(env="Hopper-v5", algo="ppo")).epochs > 1


@pytest.mark.parametrize(
    ("text", "steps"), [("2e6", 2_000_000), ("2_000", 2000), ("2.5e5", 250_000), ("9007199254740991", 2**53 - 1)]
)
def test_a_number_of_env_steps_may_be_written_shortly(text: str, steps: int) -> None:
    assert from_command_line(["--env", "CartPole-v1", "--steps", text], "train").steps == steps


@pytest.mark.parametrize("text", ["1.5", "inf", "nan", "x", "1e400", ""])
def test_what_is_no_number_of_env_steps_is_refused(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        from_command_line(["--env", "CartPole-v1", "--steps", text], "train")
    assert "is not a whole number" in " ".join(capsys.readouterr().err.split())


def test_a_key_that_comes_twice_in_a_file_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: CartPole-v1\noptim:\n  lr: 1.0e-3\n  lr: 1.0e-2\n")
    with pytest.raises(ConfigError, match="line 4 has the key lr again; keep one of them"):
        load_yaml(file)
    file.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, <<: *a, z: 4}\n")
    assert load_yaml(file)["b"] == {"x": 3, "y": 2}


def test_loggers_of_a_file_warn_of_nothing(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: CartPole-v1\nlog: {loggers: [wandb, 'my_code:Logger']}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = from_command_line(["--config", str(file)], "train")
    assert config.log.loggers == ("wandb", "my_code:Logger")
