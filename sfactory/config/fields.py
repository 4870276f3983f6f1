"""The fields of a configuration: nested frozen dataclasses, the same for CLI flags, YAML keys and Python arguments.

A field is declared once: type, default, limits, rule for resuming, and its help as the docstring below it. Validation,
``--help`` and docs/resume.md follow (:mod:`sfactory.config.declaring`).
"""

# ruff: noqa: RUF009 - setting() makes a dataclasses.field()

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sfactory.config.declaring import (
    DeviceNames,
    Settings,
    above,
    at_least,
    between,
    refused,
    safe,
    setting,
    settings_group,
    warned,
)
from sfactory.config.env_source import folder_name
from sfactory.config.flags import Count, Id, Listed, Mapped, Name

_TASK = refused("another task")
_WEIGHTS = refused("the network has other weights")
_UNIT = refused("the critic's values have another unit")
_LOSS = warned("another loss from here on")
_STEP = warned("other optimizer steps from here on; Adam's moments stay")
_UPDATES = warned("another number of updates for as many env steps")
_PLACE = safe("where and how fast, not what")
_RESTART = safe("environments begin new episodes; the lag's bound follows")
_GIVE_UP = safe("when to give up")
_REPORTS = safe("reports only")
Checkpoint = Literal["latest", "best"]
"""The latest of a run, or its best: by evaluation where the run had it, else by the return in training."""


@settings_group
@dataclass(frozen=True)
class ModelConfig(Settings):
    """The actor-critic network."""

    encoder: Name = setting("auto", resume=_WEIGHTS)
    """auto (by the observation's shape), mlp, nature_cnn, impala_resnet, or a callable / module:Class taking an
    observation leaf."""
    hidden: tuple[int, ...] = setting((64, 64), at_least(1), resume=_WEIGHTS)
    """Widths of the fully connected layers of an MLP encoder."""
    features: int = setting(512, at_least(1), resume=_WEIGHTS)
    """Width of the last layer of an image encoder, and of the layer that merges it with others; where none reads an
    image, that layer is as wide as the last of `hidden`."""
    activation: Literal["tanh", "relu", "elu", "silu"] = setting(
        "tanh", resume=refused("the same weights would compute something else")
    )
    """Nonlinearity of MLP encoders; image encoders, and the layer that merges several encoders, use relu."""
    core: Name = setting("none", resume=_WEIGHTS)
    """none, gru, lstm, or a callable / module:Class."""
    core_size: int = setting(128, at_least(1), resume=_WEIGHTS)
    """Units of each recurrent layer."""
    core_layers: int = setting(1, between(1, 100), resume=_WEIGHTS)
    """Recurrent layers."""
    shared_critic: bool | None = setting(None, resume=_WEIGHTS)
    """One encoder and core for policy and value, or one for each. Unset: shared where observations are images or there
    is a core."""
    adaptive_std: bool = setting(False, resume=_WEIGHTS)
    """Standard deviation of continuous actions depends on the state; off: one learned vector."""
    initial_log_std: float = setting(0.0, between(-5, 2), resume=safe("only a new run begins with it"))
    """Logarithm of the initial standard deviation of continuous actions."""
    distribution: Name = setting("auto", resume=_WEIGHTS)
    """auto (categorical and Gaussian), or a callable / module:Class taking the action space: a subclass of
    sfactory.distributions.Distribution."""
    squash: Literal["clip", "tanh"] = setting(
        "clip", resume=refused("the same action samples would mean other actions")
    )
    """How a Gaussian sample gets into a bounded Box: clip(u) or tanh(u), each scaled to the bounds."""
    model: Name = setting("none", resume=_WEIGHTS)
    """none, or a whole model instead of encoder, core and heads: a callable / module:Class."""
    kwargs: Mapped = setting({}, resume=_WEIGHTS)
    """Keyword arguments for a user's own encoder, core or model."""
    categories: int | None = setting(None, between(0, 10_000), resume=_WEIGHTS)
    """One-hot encoding of integer Boxes. Unset: Boxes with at most 32 values. n: also wider Boxes, read as n categories
    (0 to n-1). 0: none."""
    channels: Literal["auto", "first", "last"] = setting("auto", resume=_WEIGHTS)
    """Where an image's channels are: [C, H, W], [H, W, C], or by its shape: beside the two sides of a square, else the
    smaller of the first and the last dimension."""
    normalize_obs: bool = setting(False, resume=refused("the same weights would see other numbers"))
    """Normalise float observations by their running mean and variance."""
    normalize_images: bool = setting(False, resume=refused("the same weights would see other numbers"))
    """Normalise each pixel of an image by its running mean and variance, to 25 steps in a standard deviation; not where
    the encoder is mlp or your own."""


@settings_group
@dataclass(frozen=True)
class OptimConfig(Settings):
    """The optimizer and how a batch is cut up for it."""

    lr: float = setting(
        3e-4,
        above(0),
        resume=warned(
            "other optimizer steps from here on; a rate that optim.schedule adaptive_kl has adapted goes on instead"
        ),
    )
    """Learning rate of Adam."""
    schedule: Literal["constant", "linear", "adaptive_kl"] = setting("constant", resume=_STEP)
    """linear: falls to zero at `steps`, after `hold`; adaptive_kl: follows `target_kl`."""
    hold: float = setting(0.0, at_least(0, below=1), resume=_STEP)
    """Share of `steps` with the full rate before linear falls."""
    target_kl: float = setting(0.01, above(0), resume=_STEP)
    """Target of adaptive_kl: KL divergence of the new policy from the proximal one, with which its batch was begun."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least(0, below=1), resume=_STEP)
    """Adam's moment decays."""
    eps: float = setting(1e-5, above(0), resume=_STEP)
    """Adam's epsilon."""
    max_grad_norm: float = setting(0.5, at_least(0), resume=_STEP)
    """Gradients are scaled down to this norm; 0: off."""
    max_skipped: int = setting(100, at_least(1), resume=_GIVE_UP)
    """Updates are skipped while the loss or its gradient is not finite; after so many in a row the run stops, saved."""
    minibatches: int = setting(1, at_least(1), resume=_STEP)
    """Optimizer steps per epoch. Without a recurrent core they draw from all single samples of a batch, with one from
    its rows."""
    compile: bool = setting(False, resume=_PLACE)
    """The learner's network goes through torch.compile, which delays the first update by up to a minute."""


@settings_group
@dataclass(frozen=True)
class LossConfig(Settings):
    """Returns, advantages and the loss (design: V-trace with the PPO clip, or GAE for algo ppo)."""

    gamma: float = setting(
        0.99,
        between(0, 1),
        resume=warned("the critic has learned values of another horizon, and needs time to follow"),
    )
    """Discount per env step."""
    lam: float = setting(0.95, between(0, 1), resume=_LOSS)
    """Lambda of V-trace and GAE."""
    estimator: Name = setting("auto", resume=_LOSS)
    """auto (V-trace, or GAE for algo ppo), vtrace, gae, or a callable / module:function with the arguments of
    sfactory.vtrace.unweighted_vtrace, which returns value targets and advantages."""
    terms: Name = setting("none", resume=_LOSS)
    """none, or further terms of the loss: a callable / module:function that takes sfactory.losses.TermSamples and the
    Config, and returns a mapping of names to tensors [T, B]. Their means are added to the loss."""
    term_coefs: Mapped = setting({}, resume=_LOSS)
    """Weights of these terms by name, 1 if not named."""
    rho_bar: float = setting(1.0, at_least(0), resume=_LOSS)
    """Truncation of the importance weight in V-trace's temporal difference."""
    c_bar: float = setting(1.0, at_least(0), resume=_LOSS)
    """Truncation of the trace-cutting importance weight."""
    rho_bar_pg: float = setting(1.0, at_least(0), resume=_LOSS)
    """Truncation of the importance weight in the policy gradient's advantage."""
    clip: float = setting(0.2, above(0), resume=_LOSS)
    """PPO clip range of the probability ratio to the policy with which a batch was begun (appo, ppo)."""
    tv_limit: float = setting(0.1, at_least(0), resume=_LOSS)
    """Where the total variation between the policy and the behaviour policy, averaged over a minibatch, is above this,
    samples that would push the policy further from the behaviour policy have no policy gradient (appo); 0: off. Without
    lag it matters where `clip` is more than twice as large."""
    value_clip: float = setting(0.0, at_least(0), resume=_LOSS)
    """Clip range of the value against the one with which a batch was begun, in units of the (normalised) value; 0:
    off."""
    value_coef: float = setting(0.5, at_least(0), resume=_LOSS)
    """Weight of the value loss, which is half the squared error."""
    entropy_coef: float = setting(0.0, resume=_LOSS)
    """Weight of the exploration bonus."""
    exploration: Literal["entropy", "kl"] = setting("entropy", resume=_LOSS)
    """The bonus: the policy's entropy, or minus KL(policy || uniform), of categorical actions only. With n allowed
    choices that is the entropy less log n, so both have the same gradient; what differs is the figure that is reported,
    and with mixed actions that `kl` leaves out the continuous ones."""
    normalize_advantage: bool = setting(True, resume=_LOSS)
    """Advantages of a batch get mean 0 and standard deviation 1, before importance weights multiply them."""
    normalize_returns: bool = setting(False, resume=_UNIT)
    """The critic predicts returns normalised by their running mean and variance; its last layer follows as they move
    (PopArt)."""
    reward_scale: float = setting(1.0, resume=_UNIT)
    """Rewards are multiplied by this before learning (reports keep the environment's own)."""
    reward_clip: float = setting(0.0, at_least(0), resume=_UNIT)
    """Then clipped to plus or minus this; 0: off."""
    max_lag: int | None = setting(None, at_least(0), resume=safe("another bound on the lag, which holds from here on"))
    """Highest policy lag, in learner updates, that a sample may have when it is trained on; it holds by construction.
    Unset: twice the smallest that lets every worker stay busy."""


@settings_group
@dataclass(frozen=True)
class RuntimeConfig(Settings):
    """Processes, threads and queues."""

    groups: int = setting(2, between(1, 10_000), resume=_PLACE)
    """Groups of each rollout worker; with two, one steps while the other waits for its actions."""
    policy_workers: int | None = setting(None, between(0, 10_000), resume=_PLACE)
    """Processes that do batched inference for all rollout workers. 0: inline, each rollout worker infers for its own
    groups. Unset: 0 where several rollout workers share a CPU with it, else 1, or one for each of several devices of
    `inference_device`."""
    inference_device: str | None = setting(None, DeviceNames(several=True), resume=_PLACE)
    """Device of the policy workers, or several that they take in turn, as cuda:0,cuda:1; unset: as `device`."""
    kernels: Literal["auto", "off"] = setting("auto", resume=_PLACE)
    """Kernels in place of plain PyTorch code: for built-in parts of the model, the loss and the sampling, wherever they
    give the same numbers. off: everything is computed by the plain code (the environment variable SFACTORY_KERNELS=off
    does the same for auto)."""
    cuda_graphs: bool = setting(True, resume=_PLACE)
    """On a GPU record the forward pass of policy workers and the steps of the learner once, and launch each as a whole;
    what cannot be recorded runs without."""
    mps: bool = setting(False, resume=_PLACE)
    """Processes that share a GPU compute there side by side, by a daemon of NVIDIA's MPS that the run starts for
    itself; else they take turns. Not yet tried on a GPU."""
    learner_threads: int | None = setting(None, between(1, 1024), resume=_PLACE)
    """Threads of the learner; unset: from the number of cores."""
    inference_threads: int | None = setting(None, between(1, 1024), resume=_PLACE)
    """torch threads of each policy worker; unset: from the number of cores."""
    rollout_nice: int = setting(0, between(0, 19), resume=_PLACE)
    """Niceness of rollout workers. If the learner is the bottleneck on shared cores, use 5 with one rollout worker per
    core. If environments are the bottleneck, use 0."""
    env_threads: int = setting(1, between(1, 1024), resume=_PLACE)
    """Threads inside one vector environment that has its own (ALE, EnvPool)."""
    spare_batches: int = setting(1, at_least(0), resume=safe("the lag's bound follows"))
    """Training batches' worth of slots beyond those being filled: more keeps workers busier and raises the lag. With 0
    no group of environments is ahead of the others: those that are done wait for the batch."""
    step_timeout_s: float = setting(300.0, above(0), resume=_GIVE_UP)
    """A rollout worker that has shown no sign of life for this long, as when an environment hangs, is replaced. One
    step of all environments of a group, which take turns, must be shorter."""
    restarts: int = setting(10, at_least(0), resume=_GIVE_UP)
    """How often in a row processes that died or hung are started anew without any progress in between; then the run
    fails, saved."""
    validate_observations: bool = setting(True, resume=safe("what is noticed"))
    """Check that observations and rewards are finite. Without, what a model answers to an infinity is undefined."""
    env_fault_rate: float = setting(0.01, between(0, 1), resume=_GIVE_UP)
    """Faults of environments (they raise, or give NaN or something else than they promise) per env step that a run
    survives: they are made anew and their samples left out. With more, and more than 100, it ends as failed; 1: survive
    as many as there are."""


@settings_group
@dataclass(frozen=True)
class LogConfig(Settings):
    """Reports and checkpoints."""

    report_every_s: float = setting(5.0, above(0), resume=_REPORTS)
    """Seconds between rows of metrics.csv."""
    episode_window: int = setting(
        100,
        at_least(1),
        resume=safe("reports, and by which mean the best checkpoint is chosen from here on"),
    )
    """Reported returns and lengths are means over at least this many of the last episodes."""
    tensorboard: bool = setting(True, resume=_REPORTS)
    """Write TensorBoard files."""
    loggers: tuple[Listed, ...] = setting((), resume=_REPORTS)
    """Where reports go besides: wandb, trackio, mlflow, or a callable / module:Class that makes a logger
    (sfactory.telemetry.loggers.Logger)."""
    report: bool = setting(True, resume=_REPORTS)
    """Write report.html into the run folder at the end: curves, configuration, machine and phases on one page."""
    display: Literal["auto", "live", "plain", "none"] = setting("auto", resume=_REPORTS)
    """auto: live on a terminal and in a notebook, plain lines elsewhere."""
    save_every_s: float = setting(120.0, at_least(0), resume=safe("when to save"))
    """Seconds between checkpoints."""
    keep: int = setting(
        3, at_least(1), resume=safe("the next save removes what is beyond it, never the best or milestones")
    )
    """Latest checkpoints kept; the best, by evaluation or by return, is kept besides."""
    milestone_every: Count = setting(0, at_least(0), resume=safe("milestones so far stay"))
    """Keep a checkpoint for good every so many env steps; 0: none."""


@settings_group
@dataclass(frozen=True)
class EvalConfig(Settings):
    """Evaluation in a process of its own: beside training at a low priority, or at its end."""

    every: Count = setting(
        0, at_least(0), resume=safe("once there is an evaluation, the best checkpoint is that of the best one")
    )
    """Evaluate the policy every so many env steps, or as often as one core allows; 0: off."""
    episodes: int = setting(10, at_least(1), resume=safe("evaluations are means over other numbers from here on"))
    """Episodes of an evaluation."""
    sampled: bool = setting(False, resume=safe("evaluations draw actions, or not, from here on"))
    """Draw actions from the policy instead of taking the most probable ones."""
    video_every: Count = setting(0, at_least(0), resume=_REPORTS)
    """Record one more episode as videos/ENV_STEPS.mp4 in the run folder every so many env steps; 0: none."""
    at_end: bool = setting(True, resume=_REPORTS)
    """Without `every`, evaluate the last policy of a completed run and record 300 env steps for report.html, in a tenth
    of the time that was trained, but in 5 to 60 s; runs of less than 5 s go without."""


@settings_group
@dataclass(frozen=True)
class Config(Settings):
    """A training run. `steps` and every other count of steps are env steps: one decision of one agent."""

    env: Id = setting("", resume=_TASK)
    """A Gymnasium id, module:Id, sfactory/Name for a native one; in Python also a callable returning an environment."""
    env_kwargs: Mapped = setting({}, resume=_TASK)
    """Keyword arguments of the environment."""
    env_backend: Literal["auto", "gymnasium", "vector", "envpool", "tensors"] = setting(
        "auto", resume=warned("another implementation of the game; other spaces are refused")
    )
    """auto: what is fastest for the id; gymnasium: single environments; vector: the vector environment that comes with
    it, or an error, and one on the device as seen from the host; tensors: one on the learner's device."""
    steps: Count = setting(
        1_000_000,
        at_least(1),
        resume=safe("the run becomes longer or shorter; with optim.schedule linear the rate is that of the new length"),
    )
    """Env steps to train for."""
    seed: int = setting(0, at_least(0), resume=warned("from here on the run is neither seed's"))
    """Seed of the run; the seeds of all environments and workers derive from it."""
    run: str = setting("", resume=safe("a run folder may be moved"))
    """Run folder; unset: runs/ENV-SEED, where a callable has its module and name, and a hash where these do not tell it
    from others."""
    overwrite: bool = setting(False, resume=safe("removes the run, and begins anew"))
    """Start anew where the run folder already holds a run."""
    device: str = setting("auto", DeviceNames(), resume=_PLACE)
    """Device of the learner and the policy workers; auto: where the model trains faster, on the first GPU if there is
    one, but on the CPU if it has few dense layers and nothing else."""
    algo: Literal["appo", "impala", "ppo"] = setting("appo", resume=_LOSS)
    """appo: V-trace with PPO's clip; impala: V-trace policy gradient; ppo: synchronous, with GAE."""
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", resume=warned("another rounding from here on; weights and optimizer are kept in float32 anyway")
    )
    """auto: bfloat16 for image encoders where the device computes in it, else float32."""
    workers: int | None = setting(None, between(1, 10_000), resume=_RESTART)
    """Rollout worker processes; unset: one for each core where environments with images share the cores with inference,
    else fewer; many where env steps wait for something else than a core, which is measured before the run."""
    envs_per_worker: int = setting(32, at_least(1), resume=_RESTART)
    """Environments of each rollout worker, over all its groups. Unset: the preset's, divided among the workers; fewer
    where each has several agents, which are rows of the batch."""
    rollout: int = setting(
        32,
        between(1, 1_000_000),
        resume=warned("returns are bootstrapped after another number of env steps"),
    )
    """Env steps per row in a segment. Unset: the preset's, or shorter where many workers fill segments at a time."""
    batch_size: int = setting(1024, at_least(1), resume=_UPDATES)
    """Samples per training batch: a multiple of rollout x rows of a group. Where it is left to the preset, the nearest
    such multiple."""
    batch_source: Name = setting("none", resume=warned("other samples beside the fresh ones from here on"))
    """none: batches are fresh segments; or a callable / module:Class that puts others beside them, as replay does
    (sfactory.data.batch.BatchSource)."""
    epochs: int = setting(1, at_least(1), resume=_UPDATES)
    """Passes over each batch."""
    sync: bool = setting(False, resume=warned("another policy lag"))
    """Sampling and learning alternate, so that the lag is 0; the processes are the same."""
    serial: bool = setting(False, resume=warned("another policy lag, and the seed no longer reproduces the whole run"))
    """Everything in one process, reproducible bit for bit from the seed; implies sync."""
    preset: str = setting("auto", resume=safe("the fields that it sets are compared, each by its own rule"))
    """Preset of defaults: auto (by the environment), none, or a preset's name."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def run_dir(self) -> Path:
        """The run folder, named after environment and seed where `run` is unset."""
        if self.run:
            return Path(self.run)
        return Path("runs") / f"{folder_name(self.env)}-{self.seed}"

    def takes_kernel(self, name: str) -> bool:
        """Whether a kernel may stand for plain code. The environment variable SFACTORY_KERNELS is off, or names those
        that are left out, as in ``-sampling,-LSTM``."""
        asked = os.environ.get("SFACTORY_KERNELS", "")
        return self.runtime.kernels == "auto" and asked != "off" and f"-{name}" not in asked.split(",")

    @property
    def lag_free(self) -> bool:
        """Whether sampling waits for the learner, so that every sample has lag 0."""
        return self.sync or self.serial or self.algo == "ppo"

    @property
    def envs_per_group(self) -> int:
        return self.envs_per_worker // self.runtime.groups

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.optim.minibatches
