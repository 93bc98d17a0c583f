"""ISAAC Newton: condition each layer's weight gradient by the layer's own inputs, with one line and any optimizer."""

from isaac_newton import equations
from isaac_newton.attach import attach, detach
from isaac_newton.capture import capture
from isaac_newton.damping import Relative
from isaac_newton.ensemble import Ensemble
from isaac_newton.handle import Handle
from isaac_newton.layers import register
from isaac_newton.layers.linear import Linear
from isaac_newton.likelihood import Likelihood
from isaac_newton.site import Site
from isaac_newton.suggest import suggest_damping
from isaac_newton.weights import condition

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
