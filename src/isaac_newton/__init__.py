"""ISAAC Newton: condition each layer's weight gradient by the layer's own inputs, with one line and any optimizer."""

from isaac_newton.api.attach import attach, detach
from isaac_newton.api.handle import Handle
from isaac_newton.api.suggest import suggest_damping
from isaac_newton.capture import capture
from isaac_newton.core.gradient import condition
from isaac_newton.core.layer import ConditionedLayer as Site
from isaac_newton.ensemble import Ensemble
from isaac_newton.layers import register
from isaac_newton.layers.linear import Linear
from isaac_newton.math import equations
from isaac_newton.math.damping import Relative
from isaac_newton.math.likelihood import Likelihood

__all__ = [
    "Ensemble",
    "Handle",
    "Likelihood",
    "Linear",
    "Relative",
    "Site",
    "attach",
    "capture",
    "condition",
    "detach",
    "equations",
    "register",
    "suggest_damping",
]
__version__ = "0.2.0.dev0"
