"""One adapter per layer type, found through the registry."""

from isaac_newton.layers import attention, conv, embedding, linear, recurrent
from isaac_newton.layers.registry import Adapter, Registration, find, register

__all__ = ["Adapter", "Registration", "attention", "conv", "embedding", "find", "linear", "recurrent", "register"]
