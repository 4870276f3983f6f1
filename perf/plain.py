"""The compiled kernels' work in plain array operations, for perf/kernels.py to check and time them against.

Most functions take ``xp``, the module whose arrays they are given: NumPy or torch, on any device.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfactory.config import LossConfig
from sfactory.distributions import FORBIDDEN
from sfactory.envs.native.base import RESTING
from sfactory.model.encoders import NatureCNN, flatten_pixels
from sfactory.model.layers import PixelConv
from sfactory.model.precision import compute_dtype

Array = Any
"""A NumPy array or a tensor."""

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def vtrace_numpy(
    log_ratios: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    final_values: np.ndarray,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace as NumPy operations on one time step after the other: value targets, and advantages without their
    weight."""
    weights = np.minimum(np.exp(log_ratios), 1.0)
    decay = np.where(terminated | truncated, 0.0, gamma * lam).astype(values.dtype)
    following = np.where(truncated, final_values, np.concatenate((values[1:], bootstrap_value[None])))
    delta = rewards + gamma * np.where(terminated, 0.0, following).astype(values.dtype) - values
    vs, advantages = np.empty_like(values), np.empty_like(values)
    correction = np.zeros_like(bootstrap_value)
    for t in range(len(values) - 1, -1, -1):
        advantages[t] = delta[t] + decay[t] * correction
        correction = weights[t] * advantages[t]
        vs[t] = values[t] + correction
    return vs, advantages


def gae_numpy(rewards: np.ndarray, *others: Any) -> tuple[np.ndarray, np.ndarray]:
    """GAE as :func:`vtrace_numpy` with an importance weight of 1, which it equals."""
    returns, advantages = vtrace_numpy(np.zeros_like(rewards), rewards, *others)
    return advantages, returns


def loss_numpy(
    config: LossConfig,
    log_prob: np.ndarray,
    value: np.ndarray,
    exploration: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray,
    old_log_prob: np.ndarray,
    valid: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The loss of algo appo without value clipping, and its gradients by log_prob, value and exploration; no
    statistics."""
    count = max(valid.sum(), 1)
    gain = np.exp(log_prob - old_log_prob) * advantages
    limit = advantages + config.clip * np.abs(advantages)
    error = value - returns
    losses = -np.minimum(gain, limit) + 0.5 * config.value_coef * error * error - config.entropy_coef * exploration
    gradients = (
        np.where(gain > limit, 0.0, -gain),
        config.value_coef * error,
        np.full_like(value, -config.entropy_coef),
    )
    return losses[valid].sum() / count, *(np.where(valid, gradient, 0.0) / count for gradient in gradients)


def sample_rows(
    xp: ModuleType, params: Array, mask: Array | None, sizes: tuple[int, ...], uniforms: Array, normals: Array
) -> tuple[Array, Array, Array]:
    """:func:`sfactory.kernels.sampling.sample_rows`: categorical ``[N, K]``, continuous ``[N, D]`` and
    log-probabilities ``[N]``."""
    begin, dims = 0, normals.shape[1]
    categorical, log_prob = [], 0.0
    for k, size in enumerate(sizes):
        logits = params[:, begin : begin + size]
        if mask is not None:
            logits = xp.where(mask[:, begin : begin + size], logits, -math.inf)
        highest = xp.amax(logits, 1)[:, None]
        weights = xp.exp(logits - highest)
        sums = xp.cumsum(weights, 1)
        mass = sums[:, -1:]
        threshold = uniforms[:, k : k + 1] * mass
        taken = (sums > threshold) & (sums - weights <= threshold)
        categorical.append((sums <= threshold).sum(1))
        log_prob = log_prob + (xp.where(taken, logits, 0.0).sum(1) - highest[:, 0] - xp.log(mass[:, 0]))
        begin += size
    mean, log_std = params[:, begin : begin + dims], params[:, begin + dims :]
    continuous = mean + xp.exp(log_std) * normals
    log_prob = log_prob - (0.5 * normals * normals + log_std + _HALF_LOG_2PI).sum(1)
    return xp.stack(categorical, 1) if categorical else uniforms, continuous, log_prob


def densities_numpy(
    params: np.ndarray,
    mask: np.ndarray | None,
    sizes: tuple[int, ...],
    categorical: np.ndarray,
    continuous: np.ndarray,
    of_log_prob: np.ndarray,
    of_entropy: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities and entropies ``[N]``, and the gradient ``[N, P]`` of their sums weighted with `of_log_prob`
    and `of_entropy`."""
    begin, dims = 0, continuous.shape[1]
    log_prob, entropy, gradients = np.zeros(len(params), np.float32), np.zeros(len(params), np.float32), []
    for k, size in enumerate(sizes):
        logits = params[:, begin : begin + size]
        if mask is not None:
            logits = np.where(mask[:, begin : begin + size], logits, np.float32(FORBIDDEN))
        excess = logits - logits.max(1, keepdims=True)
        log_probs = excess - np.log(np.exp(excess).sum(1, keepdims=True))
        own = -(np.exp(log_probs) * log_probs).sum(1)
        chosen = categorical[:, k : k + 1] == np.arange(size)
        log_prob += log_probs[chosen]
        entropy += own
        pull = of_log_prob[:, None] + of_entropy[:, None] * (log_probs + own[:, None])
        gradients.append(of_log_prob[:, None] * chosen - np.exp(log_probs) * pull)
        begin += size
    mean, log_std = params[:, begin : begin + dims], params[:, begin + dims :]
    z = (continuous - mean) * np.exp(-log_std)
    log_prob -= (0.5 * z * z + log_std + _HALF_LOG_2PI).sum(1)
    entropy += (log_std + 0.5 + _HALF_LOG_2PI).sum(1)
    of_std = of_log_prob[:, None] * (z * z - 1) + of_entropy[:, None]
    return log_prob, entropy, np.concatenate((*gradients, of_log_prob[:, None] * z * np.exp(-log_std), of_std), 1)


def area_matrix(source: int, target: int) -> np.ndarray:
    """float32 ``[target, source]``: the share of each input pixel in each output pixel, along one dimension."""
    ratio = source / target
    begins, pixels = np.arange(target)[:, None] * ratio, np.arange(source)
    covered = np.minimum(pixels + 1, begins + ratio) - np.maximum(pixels, begins)
    return (np.clip(covered, 0, 1) / ratio).astype(np.float32)


def resample(xp: ModuleType, image: Array, rows: Array, columns: Array) -> tuple[Array]:
    """:class:`sfactory.envs.kernels.resampling.Resampler` as two matrix products: uint8 ``[H, W, C]`` to ``[C, h,
    w]``."""
    narrow = xp.tensordot(columns, xp.asarray(image, dtype=xp.float32), ([1], [1]))
    return (xp.asarray(xp.tensordot(narrow, rows, ([1], [1])) + 0.5, dtype=xp.uint8).swapaxes(0, 1).swapaxes(1, 2),)


class RecordedConsole:
    """Stands for an ``ale_py.ALEInterface``: shows recorded screens, random ones that differ from those before in some
    lines.

    Args:
        changing: Share of the lines that change with a screen; with one in three, at random, none does. The first
            screen is all zeros.
    """

    def __init__(self, screens: int, sides: tuple[int, int], changing: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.greys = rng.permutation(256).astype(np.uint8)
        self.screens = np.zeros((screens, *sides), np.uint8)
        for before, screen in pairwise(self.screens):
            lines = rng.random(sides[0]) < changing * (rng.random() < 2 / 3)
            screen[:] = np.where(lines[:, None], rng.integers(0, 128, sides) * 2, before)
        self.shown = 0

    def show(self, screen: int) -> None:
        self.shown = screen % len(self.screens)

    def getScreenDims(self) -> tuple[int, int]:
        return self.screens.shape[1:]

    def getScreen(self, out: np.ndarray) -> None:
        out[:] = self.screens[self.shown]

    def getScreenGrayscale(self) -> np.ndarray:
        return self.greys[self.screens[self.shown]]


def picture(xp: ModuleType, screens: Array, greys: Array, rows: Array, columns: Array) -> Array:
    """What :class:`sfactory.envs.kernels.screens.ScreenStacks` makes of two screens: uint8 ``[2, H, W]`` to ``[h,
    w]``."""
    both = greys[xp.asarray(screens, dtype=xp.int64)]
    return resample(xp, xp.maximum(both[0], both[1])[..., None], rows, columns)[0][0]


def nature_cnn(encoder: NatureCNN, x: Tensor) -> Tensor:
    """An encoder as torch's own operations, the first convolution over single pixels."""
    x = x.permute(0, 3, 1, 2) if encoder.convolutions[0].leaf.channels_last else x
    for layer in encoder.convolutions:
        weight = layer.weight * layer.scale if isinstance(layer, PixelConv) else layer.weight
        dtype = compute_dtype(layer.weight)
        x = F.relu_(
            F.conv2d(x.to(dtype, memory_format=torch.channels_last), weight, layer.bias, layer.stride, layer.padding)
        )
    return F.relu_(encoder.linear(flatten_pixels(x)))


def uniform(xp: ModuleType, random: Array, which: Array) -> Array:
    """The next float64 of the streams of some rows, as :func:`sfactory.envs.native.base.uniform`.

    Args:
        random: int64 ``[rows]``, bit for bit the uint64 states, because torch cannot shift those; advanced in place.
        which: bool ``[rows]``.
    """
    random[which] += -0x61C8864680B583EB
    bits = random[which]
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    bits = bits ^ _shifted(bits, 31)
    return xp.asarray(_shifted(bits, 11), dtype=xp.float64) * 2.0**-53


def _shifted(bits: Array, by: int) -> Array:
    """A logical shift to the right of int64."""
    return bits >> by & ((1 << 64 - by) - 1)


class PlainEnvironments:
    """What the environments below have in common; they write what :class:`sfactory.envs.native.base.NativeGroup` would.

    Args:
        random: int64 ``[rows]``, the random streams.
        max_steps: Env steps after which an episode is truncated.
    """

    def __init__(self, xp: ModuleType, random: Array, max_steps: int) -> None:
        self.xp, self.random, self.max_steps = xp, random, max_steps
        self.elapsed = xp.full_like(random, RESTING)

    def end(self, fresh: Array, ended: Array) -> tuple[Array, Array, Array, Array]:
        """Count the step; (begins, terminated, truncated, active) of every row."""
        self.elapsed += ~fresh
        truncated = ~fresh & ~ended & (self.elapsed >= self.max_steps)
        begins = fresh | ended
        self.elapsed[begins] = 0
        self.elapsed[truncated] = RESTING
        return begins, ended, truncated, ~truncated


class PlainCartPole(PlainEnvironments):
    """``sfactory/CartPole``."""

    def __init__(self, xp: ModuleType, random: Array, max_steps: int = 500) -> None:
        super().__init__(xp, random, max_steps)
        self.state = xp.stack([xp.zeros_like(random, dtype=xp.float64)] * 4, 1)

    def step(self, actions: Array) -> tuple[Array, ...]:
        """(obs, reward, first, terminated, truncated, active)."""
        xp, fresh = self.xp, self.elapsed == RESTING
        x, x_dot, theta, theta_dot = (self.state[:, i] for i in range(4))
        force = 20.0 * (actions == 1) - 10.0
        cos, sin = xp.cos(theta), xp.sin(theta)
        push = (force + 0.05 * theta_dot * theta_dot * sin) / 1.1
        theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        moved = (x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc)
        state = self.state = xp.where(fresh[:, None], self.state, xp.stack(moved, 1))
        ended = ~fresh & ((xp.abs(state[:, 0]) > 2.4) | (xp.abs(state[:, 2]) > 24 * math.pi / 360))
        begins, *ends = self.end(fresh, ended)
        for i in range(4):
            state[begins, i] = 0.1 * uniform(xp, self.random, begins) - 0.05
        return xp.asarray(state, dtype=xp.float32), xp.asarray(~fresh, dtype=xp.float32), begins, *ends


class PlainPendulum(PlainEnvironments):
    """``sfactory/Pendulum`` with clipped actions."""

    def __init__(self, xp: ModuleType, random: Array, max_steps: int = 200) -> None:
        super().__init__(xp, random, max_steps)
        self.theta = xp.zeros_like(random, dtype=xp.float64)
        self.speed = xp.zeros_like(random, dtype=xp.float64)

    def step(self, actions: Array) -> tuple[Array, ...]:
        """(obs, reward, first, terminated, truncated, active)."""
        xp, fresh = self.xp, self.elapsed == RESTING
        torque = 2.0 * xp.clip(xp.asarray(actions, dtype=xp.float64), -1.0, 1.0)
        angle = (self.theta + math.pi) % (2.0 * math.pi) - math.pi
        cost = angle * angle + 0.1 * self.speed * self.speed + 0.001 * torque * torque
        speed = xp.clip(self.speed + (15.0 * xp.sin(self.theta) + 3.0 * torque) * 0.05, -8.0, 8.0)
        self.theta = xp.where(fresh, self.theta, self.theta + speed * 0.05)
        self.speed = xp.where(fresh, self.speed, speed)
        begins, *ends = self.end(fresh, fresh & ~fresh)
        self.theta[begins] = math.pi * (2.0 * uniform(xp, self.random, begins) - 1.0)
        self.speed[begins] = 2.0 * uniform(xp, self.random, begins) - 1.0
        obs = xp.stack((xp.cos(self.theta), xp.sin(self.theta), self.speed), 1)
        return (
            xp.asarray(obs, dtype=xp.float32),
            xp.asarray(xp.where(fresh, 0.0, -cost), dtype=xp.float32),
            begins,
            *ends,
        )


class PlainMemoryGrid(PlainEnvironments):
    """``sfactory/MemoryGrid`` as it is by default.

    Args:
        views: uint8 ``[place, left_door, cue, pixels]``, every observation there is.
    """

    def __init__(self, xp: ModuleType, random: Array, views: Array) -> None:
        super().__init__(xp, random, len(views) + 1)
        self.views, self.place, self.cue = views, xp.zeros_like(random), xp.zeros_like(random)

    def step(self, actions: Array) -> tuple[Array, ...]:
        """(obs, reward, first, terminated, truncated, active)."""
        xp, fresh = self.xp, self.elapsed == RESTING
        moves = self.elapsed > 0
        ended = moves & (self.place == len(self.views) - 1)
        reward = xp.where(ended, xp.where((actions != 0) == (self.cue == 1), 1.0, -1.0), 0.0)
        self.place += moves & ~ended
        begins, *ends = self.end(fresh, ended)
        self.place[begins] = 0
        self.cue[begins] = xp.asarray(uniform(xp, self.random, begins) < 0.5, dtype=xp.int64)
        shown = xp.where(self.elapsed == 0, self.cue, 2)
        return self.views[self.place, 0, shown], xp.asarray(reward, dtype=xp.float32), begins, *ends
