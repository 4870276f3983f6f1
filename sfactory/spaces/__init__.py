"""Observation and action spaces as flat lists of arrays.

An observation space, however nested, becomes a tuple of :class:`Leaf`; an action space becomes an :class:`ActionSpec`:
K categorical components and D Gaussian dimensions, whatever the structure of the space. Arenas, models and environments
all speak of these.
"""

from sfactory.spaces.actions import ActionSpec, BoxScale
from sfactory.spaces.observations import AS_DECLARED, Leaf, ObservationSpec, Reading
from sfactory.spaces.structure import MASK_KEY, spaces

__all__ = ["AS_DECLARED", "MASK_KEY", "ActionSpec", "BoxScale", "Leaf", "ObservationSpec", "Reading", "spaces"]
