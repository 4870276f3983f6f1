"""Recurrent cores: what a policy remembers between steps.

The state of a core is one flat float32 vector per row. ``forward`` does one step; ``unroll`` does T steps over segments
in which episodes may begin anywhere, and gives the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfactory.model.initialization import orthogonal_
from sfactory.model.precision import full_precision

KEEPING_GATE = 1
"""Which of a unit's gates keeps its memory: the LSTM's forget gate, the GRU's update gate."""
KEEPING_BIAS = 1.0
"""Its initial bias (Jozefowicz et al. 2015, section 2.2): at 0 half of the memory and of its gradient is lost at every
step."""


class Core(nn.Module):
    """Base of recurrent cores. A subclass sets the attributes and writes `forward`.

    Attributes:
        out_features: Width H of the output.
        state_size: Floats S of the state of one row.
    """

    out_features: int
    state_size: int

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            x: ``[N, F]``.
            state: float32 ``[N, S]``, already zero in rows whose episode begins.

        Returns:
            Output ``[N, H]`` and the next state, float32 ``[N, S]``.
        """
        raise NotImplementedError

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        """T steps; the state is zeroed before step t in the rows where ``first[t]``.

        Args:
            x: ``[T, B, F]``.
            first: bool ``[T, B]``.
            state: float32 ``[B, S]``, before step 0.

        Returns:
            ``[T, B, H]``.
        """
        outputs = []
        for inputs, begins in zip(x.unbind(), first.unbind(), strict=True):
            output, state = self(inputs, state.masked_fill(begins.unsqueeze(-1), 0.0))
            outputs.append(output)
        return torch.stack(outputs)


def lstm_step(gates: Tensor, state: Tensor) -> Tensor:
    """The state ``[N, 2 H]``, hidden and cell, after pre-activations ``[N, 4 H]`` and the state before."""
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * state.chunk(2, -1)[1] + i.sigmoid() * g.tanh()
    return torch.cat((o.sigmoid() * cell.tanh(), cell), -1)


def gru_step(projected: Tensor, recurred: Tensor, state: Tensor) -> Tensor:
    """The state ``[N, H]`` after the input's and the state's shares ``[N, 3 H]`` of the pre-activations and the state
    before."""
    size = state.shape[1]
    r, z = (projected[:, : 2 * size] + recurred[:, : 2 * size]).sigmoid().chunk(2, -1)
    n = torch.addcmul(projected[:, 2 * size :], r, recurred[:, 2 * size :]).tanh()
    return torch.lerp(n, state, z)


class GatedCore(Core):
    """Layers of gated units with parameters named and laid out as in ``torch.nn.LSTM`` and ``torch.nn.GRU``.

    The input products run in autocast's dtype; the recurrence and the state stay in float32.
    """

    gates: int
    """Gates of a unit."""
    parts: int
    """State vectors of a layer."""

    def __init__(self, in_features: int, size: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.size, self.layers = size, layers
        self.out_features, self.state_size = size, self.parts * size * layers
        for layer in range(layers):
            width = in_features if layer == 0 else size
            for name, columns in (("weight_ih", width), ("weight_hh", size)):
                weight = nn.Parameter(torch.empty(self.gates * size, columns))
                for gate in weight.data.chunk(self.gates):
                    orthogonal_(gate)
                self.register_parameter(f"{name}_l{layer}", weight)
            for name in ("bias_ih", "bias_hh"):
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(torch.zeros(self.gates * size)))
            self._parameter("bias_ih", layer).data[KEEPING_GATE * size : (KEEPING_GATE + 1) * size] = KEEPING_BIAS

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        states = []
        for layer, own in enumerate(state.chunk(self.layers, -1)):
            projected = self._project(x, layer)
            with full_precision(x.device):
                states.append(self._step(projected, self._parameter("weight_hh", layer), layer, own))
            x = states[-1][:, : self.size]
        return x, states[0] if self.layers == 1 else torch.cat(states, -1)

    def _parameter(self, name: str, layer: int) -> Tensor:
        return getattr(self, f"{name}_l{layer}")

    def _project(self, x: Tensor, layer: int) -> Tensor:
        """The input's share of the pre-activations, in the recurrence's dtype."""
        weight = self._parameter("weight_ih", layer)
        return F.linear(x, weight, self._input_bias(layer)).to(weight.dtype)

    def _input_bias(self, layer: int) -> Tensor:
        raise NotImplementedError

    def _step(self, projected: Tensor, weight: Tensor, layer: int, state: Tensor) -> Tensor:
        """The state of a layer after a step."""
        raise NotImplementedError


class LSTMCore(GatedCore):
    """LSTM (Hochreiter and Schmidhuber 1997). The state of a layer is its hidden, then its cell vector."""

    gates = 4
    parts = 2

    def _input_bias(self, layer: int) -> Tensor:
        return self._parameter("bias_ih", layer) + self._parameter("bias_hh", layer)

    def _step(self, projected: Tensor, weight: Tensor, layer: int, state: Tensor) -> Tensor:
        return lstm_step(torch.addmm(projected, state[:, : self.size], weight.t()), state)


class GRUCore(GatedCore):
    """GRU (Cho et al. 2014), in cuDNN's variant, as in ``torch.nn.GRU``."""

    gates = 3
    parts = 1

    def _input_bias(self, layer: int) -> Tensor:
        return self._parameter("bias_ih", layer)

    def _step(self, projected: Tensor, weight: Tensor, layer: int, state: Tensor) -> Tensor:
        recurred = torch.addmm(self._parameter("bias_hh", layer), state, weight.t())
        return gru_step(projected, recurred, state)
