"""One adapter per layer type, found through the registry."""

from isaac_newton.layers import linear as linear
from isaac_newton.layers.registry import Adapter, find, register

__all__ = ["Adapter", "find", "register"]
