"""Fully connected layers in two compiled passes over CPU memory: all layers forward, all of them backward.

A tile of the batch goes through all layers feature by feature, ``[features, TILE]``, so that it stays in the cache, and
products and activations run over rows, many at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sfactory.kernels.tanh import tanh_of
from sfactory.model.heads import LOG_STD_RANGE

Array = NDArray[np.float32]
Layer = tuple[Array, Array]
"""Weight ``[out, in]`` and bias ``[out]``."""

TILE = 256
"""Rows of a tile: few enough for the second-level cache, and so many that setting up a product costs little."""
_LOWEST, _HIGHEST = map(np.float32, LOG_STD_RANGE)


class Pass(NamedTuple):
    """Layers that follow one another, up to their share of a network's outputs.

    Attributes:
        hot: What stands for a category in the first layer's inputs.
        table: What each category adds to the first layer's outputs, ``[V, out]``.
        layers: Filled up with zeros to multiples of four; the last one has no activation.
        params, value: How many of the last layer's outputs are the first parameters of the policy, and then the value.
    """

    hot: np.float32
    table: Array
    layers: tuple[Layer, ...]
    params: int
    value: int


class Inputs(NamedTuple):
    """What the first layers take of a number x: ``(x - mean) * scale``, at most `limit` in size."""

    mean: Array
    scale: Array
    limit: np.float32


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _product(weight, bias, x, y, width):
    """``y = weight @ x + bias`` of the first columns of tiles ``[in, TILE]`` and ``[out, TILE]``.

    Four outputs and four inputs at a time: sixteen weights stay in registers while rows pass by. Both blocks are one
    flat view each, so that the compiler need not ask for each pair of lines whether they overlap.
    """
    for j in range(0, weight.shape[0], 4):
        out = y[j : j + 4].reshape(4 * TILE)
        for i in range(4):
            for r in range(width):
                out[i * TILE + r] = bias[j + i]
        for k in range(0, weight.shape[1], 4):
            inp = x[k : k + 4].reshape(4 * TILE)
            a0, a1, a2, a3 = weight[j, k], weight[j, k + 1], weight[j, k + 2], weight[j, k + 3]
            b0, b1, b2, b3 = weight[j + 1, k], weight[j + 1, k + 1], weight[j + 1, k + 2], weight[j + 1, k + 3]
            c0, c1, c2, c3 = weight[j + 2, k], weight[j + 2, k + 1], weight[j + 2, k + 2], weight[j + 2, k + 3]
            d0, d1, d2, d3 = weight[j + 3, k], weight[j + 3, k + 1], weight[j + 3, k + 2], weight[j + 3, k + 3]
            for r in range(width):
                x0, x1, x2, x3 = inp[r], inp[TILE + r], inp[2 * TILE + r], inp[3 * TILE + r]
                out[r] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                out[TILE + r] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                out[2 * TILE + r] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                out[3 * TILE + r] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")
def _add_gradients(gradient, x, of_weight, of_bias, width):
    """Add ``gradient @ x.T`` and the gradient's sums over rows, in blocks as :func:`_product` has them."""
    for j in range(0, of_weight.shape[0], 4):
        own = gradient[j : j + 4].reshape(4 * TILE)
        for i in range(4):
            total = np.float32(0)
            for r in range(width):
                total += own[i * TILE + r]
            of_bias[j + i] += total
        for k in range(0, of_weight.shape[1], 4):
            inp = x[k : k + 4].reshape(4 * TILE)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
            for r in range(width):
                x0, x1, x2, x3 = inp[r], inp[TILE + r], inp[2 * TILE + r], inp[3 * TILE + r]
                a, b, c, d = own[r], own[TILE + r], own[2 * TILE + r], own[3 * TILE + r]
                a0, a1, a2, a3 = a0 + a * x0, a1 + a * x1, a2 + a * x2, a3 + a * x3
                b0, b1, b2, b3 = b0 + b * x0, b1 + b * x1, b2 + b * x2, b3 + b * x3
                c0, c1, c2, c3 = c0 + c * x0, c1 + c * x1, c2 + c * x2, c3 + c * x3
                d0, d1, d2, d3 = d0 + d * x0, d1 + d * x1, d2 + d * x2, d3 + d * x3
            _add(of_weight[j], k, a0, a1, a2, a3)
            _add(of_weight[j + 1], k, b0, b1, b2, b3)
            _add(of_weight[j + 2], k, c0, c1, c2, c3)
            _add(of_weight[j + 3], k, d0, d1, d2, d3)


@njit(cache=True, nogil=True)
def _add(line, k, v0, v1, v2, v3):
    line[k] += v0
    line[k + 1] += v1
    line[k + 2] += v2
    line[k + 3] += v3


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _activate(y, tanh, width):
    for j in range(y.shape[0]):
        line = y[j]
        if tanh:
            for r in range(width):
                line[r] = tanh_of(line[r])
        else:
            for r in range(width):
                line[r] = max(line[r], np.float32(0))


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _before_activation(gradient, y, tanh, width):
    """Turn the gradient with respect to an activation's results `y` into that with respect to what it took."""
    for j in range(y.shape[0]):
        line, result = gradient[j], y[j]
        if tanh:
            for r in range(width):
                line[r] *= np.float32(1) - result[r] * result[r]
        else:
            for r in range(width):
                line[r] = line[r] if result[r] > 0 else np.float32(0)


_TOGETHER = 16
"""Rows whose entries of a table are added up before they go into a tile, or come out of one: a line of the cache."""


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _add_entries(codes, table, y, n):
    """Add to the columns of a tile the sums of the lines of a table that its rows' codes name."""
    outputs = table.shape[1]
    sums = np.empty((_TOGETHER, outputs), np.float32)
    for begin in range(0, n, _TOGETHER):
        count = min(_TOGETHER, n - begin)
        for r in range(count):
            own = sums[r]
            own[:] = 0
            for k in range(codes.shape[1]):
                line = table[_within(codes[begin + r, k], table)]
                for j in range(outputs):
                    own[j] += line[j]
        for j in range(outputs):
            for r in range(count):
                y[j, begin + r] += sums[r, j]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _add_to_entries(codes, gradient, of_table, n):
    """Add the columns of a tile's gradient to the lines of a table's that its rows' codes name."""
    outputs = of_table.shape[1]
    own = np.empty((_TOGETHER, outputs), np.float32)
    for begin in range(0, n, _TOGETHER):
        count = min(_TOGETHER, n - begin)
        for j in range(outputs):
            for r in range(count):
                own[r, j] = gradient[j, begin + r]
        for r in range(count):
            of_row = own[r]
            for k in range(codes.shape[1]):
                line = of_table[_within(codes[begin + r, k], of_table)]
                for j in range(outputs):
                    line[j] += of_row[j]


@njit(cache=True, nogil=True)
def _within(code, table):
    """A code that names a line of a table, whatever an environment's observation has been."""
    return min(max(code, 0), len(table) - 1)


@njit(cache=True, nogil=True)
def transpose(weight, hot, table):
    """Write the last columns of a weight ``[outputs, F + V]``, times `hot`, into the lines of a table ``[V, at least
    outputs]``."""
    columns = weight[:, weight.shape[1] - len(table) :]
    for begin in range(0, len(table), _TOGETHER):
        end = min(begin + _TOGETHER, len(table))
        for j in range(len(weight)):
            for v in range(begin, end):
                table[v, j] = hot * columns[j, v]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def forward(numbers, codes, inputs, passes, tanh, log_std, kept, params, value):
    """All passes over numbers ``[N, F]`` and categories, int32 ``[N, K]``.

    Args:
        tanh: The activation; else relu.
        log_std: Within its bounds ``[D]`` where it does not depend on observations; else ``[0]``.
        kept: For each pass takes the input and each layer's output, ``[tiles, features of all, TILE]``; one tile if
            nobody needs them afterwards.
        params, value: Take the policy's parameters ``[N, P]``, whose last D are the log standard deviations, and the
            values ``[N, 1]``.
    """
    for i in range(len(passes)):
        _forward_pass(numbers, codes, inputs, passes[i], tanh, kept[i], params, value)
    own = params.shape[1] - log_std.size
    for r in range(len(params)):
        for d in range(log_std.size):
            params[r, own + d] = log_std[d]


@njit(cache=True, nogil=True)
def bound(params, dims):
    """Keep the last `dims` parameters, log standard deviations that depend on observations, within their bounds."""
    for r in range(len(params)):
        for i in range(params.shape[1] - dims, params.shape[1]):
            params[r, i] = min(max(params[r, i], _LOWEST), _HIGHEST)


@njit(cache=True, nogil=True)
def without_bounded(params, of_params, dims):
    """Take the gradient from what :func:`bound` has held."""
    for r in range(len(params)):
        for i in range(params.shape[1] - dims, params.shape[1]):
            if not _LOWEST < params[r, i] < _HIGHEST:
                of_params[r, i] = 0


@njit(cache=True, nogil=True)
def add_to_log_std(log_std, of_params, of_log_std):
    """Add the gradient of log standard deviations ``[D]`` that do not depend on observations and may be beyond their
    bounds."""
    first = of_params.shape[1] - log_std.size
    for d in range(log_std.size):
        if _LOWEST <= log_std[d] <= _HIGHEST:
            total = np.float32(0)
            for r in range(len(of_params)):
                total += of_params[r, first + d]
            of_log_std[d] += total


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def backward(of_params, of_value, codes, passes, tanh, kept, found):
    """The gradients of what :func:`forward` computed and kept.

    Args:
        of_params, of_value: With respect to its results, likewise.
        found: For each pass takes the gradients with respect to the weights that its table was made of, and to its
            layers' weights and biases: arrays like these.
    """
    for i in range(len(passes)):
        of_table, of_layers = found[i]
        of_table[:] = 0
        for k in range(len(of_layers)):
            of_weight, of_bias = of_layers[k]
            of_weight[:] = 0
            of_bias[:] = 0
        _backward_pass(of_params, of_value, codes, passes[i], tanh, kept[i], of_table, of_layers)
        if len(of_table):
            of_table *= passes[i].hot


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _forward_pass(x, codes, inputs, own_pass, tanh, kept, params, value):
    """One pass; the arguments are those of :func:`forward`."""
    mean, scale, limit = inputs
    _, table, layers, own_params, own_value = own_pass
    rows, features = x.shape
    for tile in range(-(-rows // TILE)):
        begin = tile * TILE
        n = min(TILE, rows - begin)
        width = -(-n // 16) * 16
        own, line = kept[tile % len(kept)], 0
        own[: layers[0][0].shape[1], :width] = 0  # also what is no row: so it stays finite
        for i in range(features):
            for r in range(n):
                own[i, r] = min(max((x[begin + r, i] - mean[i]) * scale[i], -limit), limit)
        for i in range(len(layers)):
            weight, bias = layers[i]
            below = own[line : line + weight.shape[1]]
            line += weight.shape[1]
            y = own[line : line + weight.shape[0]]
            _product(weight, bias, below, y, width)
            if i == 0 and len(table):
                _add_entries(codes[begin : begin + n], table, y, n)
            if i < len(layers) - 1:
                _activate(y, tanh, width)
        for r in range(n):
            for i in range(own_params):
                params[begin + r, i] = own[line + i, r]
            for i in range(own_value):
                value[begin + r, i] = own[line + own_params + i, r]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _backward_pass(of_params, of_value, codes, own_pass, tanh, kept, of_table, of_layers):
    """One pass; adds to the last two."""
    _, _, layers, own_params, own_value = own_pass
    rows = len(of_value)
    widest = 0
    for weight, _ in layers:
        widest = max(widest, weight.shape[0], weight.shape[1])
    above, below = np.empty((widest, TILE), np.float32), np.empty((widest, TILE), np.float32)
    zeros = np.zeros(widest, np.float32)
    for tile in range(len(kept)):
        begin = tile * TILE
        n = min(TILE, rows - begin)
        width = -(-n // 16) * 16
        above[: layers[-1][0].shape[0], :width] = 0
        for r in range(n):
            for i in range(own_params):
                above[i, r] = of_params[begin + r, i]
            for i in range(own_value):
                above[own_params + i, r] = of_value[begin + r, i]
        own = kept[tile]
        end = len(own)
        for i in range(len(layers) - 1, -1, -1):
            weight = layers[i][0]
            outputs, inputs = weight.shape
            y, x = own[end - outputs : end], own[end - outputs - inputs : end - outputs]
            if i < len(layers) - 1:
                _before_activation(above, y, tanh, width)
            of_weight, of_bias = of_layers[i]
            _add_gradients(above, x, of_weight, of_bias, width)
            if i == 0 and len(of_table):
                _add_to_entries(codes[begin : begin + n], above, of_table, n)
            if i > 0:
                _product(weight.T, zeros, above, below, width)
                above, below = below, above
            end -= outputs


@njit(cache=True, nogil=True)
def add_to(of_table, of_layers, hidden, heads):
    """Add layers' gradients to those of their weights and biases; the table's are the first weight's last columns, and
    the heads' are one after another in the last layer's."""
    for i in range(len(hidden)):  # zip, with one layer more in `of_layers`, would never give that one's memory back
        (of_weight, of_bias), (weight, bias) = of_layers[i], hidden[i]
        numbers = weight.shape[1] - (len(of_table) if i == 0 else 0)
        own = weight[:, :numbers]
        own += of_weight[: weight.shape[0], :numbers]
        bias += of_bias[: len(bias)]
    weight = hidden[0][0][:, hidden[0][0].shape[1] - len(of_table) :]
    for begin in range(0, len(of_table), _TOGETHER):
        for j in range(len(weight)):
            for v in range(begin, min(begin + _TOGETHER, len(of_table))):
                weight[j, v] += of_table[v, j]
    of_weight, of_bias = of_layers[-1]
    row = 0
    for weight, bias in heads:
        weight += of_weight[row : row + len(bias), : weight.shape[1]]
        bias += of_bias[row : row + len(bias)]
        row += len(bias)
