"""Sections E2 and E3: small batches, and ζ* in some layers only."""

from isaac_lab.claims import checks, curve_checks
from isaac_lab.claims.checks import WIDTHS, panels
from isaac_lab.claims.curve_checks import FIG5, curves
from isaac_lab.claims.evidence import Claim

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "E2.0",
        "The performance of our proposed method can be empirically maintained in the mini-batch regime (n≫b).",
        "fig1",
        "At 100, 400 and 1600 neurons the best ζ* is within 10 % of log-loss of the best ζ.",
        panels(WIDTHS, checks.star_keeps_up),
    ),
    Claim(
        "E2.1",
        "For (E2), in Figure 1, we can see that training performs well for n∈{100,400,1600} neurons per layer at a batch size "
        "of only 60.",
        "fig1",
        "At 100, 400 and 1600 neurons the best ζ* ends below ∇ in training loss, and its best test accuracy is not below that "
        "of ∇ by more than 0.1 points, ten test images.",
        panels(WIDTHS, checks.trains_well),
    ),
    Claim(
        "E3.0",
        "ζ* may be used for individual layers, while for other layers only the gradient ∇ is used. This still leads to "
        "improved performance.",
        "fig5",
        "The median final training loss of the six selections is below that of ∇.",
        curves(FIG5, curve_checks.individual_layers),
    ),
    Claim(
        "E3.1",
        "We observe that all settings with ζ* perform better than plain gradient descent, except for ‘ζ* for layers 3,4,5’",
        "fig5",
        "Final training loss, mean over seeds, below that of ∇: ζ* in all layers, in 1, in 5, in 1–3, in the odd, in the even "
        "ones.",
        curves(FIG5, curve_checks.selected_layers_beat),
    ),
    Claim(
        "E3.2",
        "except for ‘ζ* for layers 3,4,5’ which performs approximately equivalent to gradient descent.",
        "fig5",
        "Final training loss, mean over seeds, within 10 % of log-loss of that of ∇, on either side.",
        curves(FIG5, curve_checks.last_three),
    ),
)
