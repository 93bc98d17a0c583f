"""Section E1: ζ* against ζ, K-FAC and the gradient, on classifiers and auto-encoders."""

from isaac_lab.claims import checks, costs, curve_checks
from isaac_lab.claims.checks import AUTOENCODERS, FIG1, panels
from isaac_lab.claims.costs import of_both, ratio_below
from isaac_lab.claims.curve_checks import FIG2, FIG2_SMALL, curves
from isaac_lab.claims.evidence import Claim

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "E1.0",
        "ζ* achieves similar performance to K-FAC, while being substantially cheaper to compute.",
        "fig2",
        "λ = 0.1: final training loss within 10 % of log-loss; a step of K-FAC takes at least twice as long on one CPU thread.",
        curve_checks.similar_and_cheaper,
    ),
    Claim(
        "E1.1",
        "The plots in Figure 1 demonstrate that the advantage of training by conditioning with curvature information can be "
        "achieved by considering both layer inputs a and gradients with respect to random samples ḡ, but also using only layer "
        "inputs a.",
        "fig1",
        "In all four panels the best ζ and the best ζ* end below ∇.",
        panels(FIG1, checks.both_beat_the_gradient),
    ),
    Claim(
        "E1.2",
        "The interesting finding here is that the performance does not suffer by increasing λ_g toward ∞, i.e., from left to "
        "right in the plot.",
        "fig1",
        "In all four panels the best of the last column (ζ*) is within 10 % of log-loss of the best of all other columns.",
        panels(FIG1, checks.star_keeps_up),
    ),
    Claim(
        "E1.3",
        "Here, we follow the same principle as above and also find that ζ* performs well.",
        "fig3",
        "Auto-encoder, both data sets: the best ζ* ends below ∇ and within 10 % of log-loss of the best ζ.",
        panels(AUTOENCODERS, checks.star_keeps_up_and_wins),
    ),
    Claim(
        "E1.4",
        "We can observe that, for λ=0.1, K-FAC, ζ, and ζ* are almost identical per update step (right)",
        "fig2",
        "Relative difference of the three training losses at equal steps below 10 %, at the end and in the median over epochs: "
        "about the thickness of a line.",
        curves(FIG2, curve_checks.almost_identical, curve_checks.DRAWN),
    ),
    Claim(
        "E1.5",
        "while ζ* is by a large margin the fastest, followed by ζ, and the conventional K-FAC implementation is the slowest "
        "(left).",
        "fig2",
        "Time of a step on one CPU thread: ζ at least 1.5 times ζ* (a large margin), K-FAC above ζ.",
        costs.fastest,
    ),
    Claim(
        "E1.6",
        "On the other hand, for λ=0.01 we can achieve a faster convergence than with λ=0.1",
        "fig2",
        "At equal steps the final training loss is lower with λ = 0.01 than with λ = 0.1, for one of the three methods at "
        "least.",
        curves(FIG2, curve_checks.faster_convergence, curve_checks.DRAWN),
    ),
    Claim(
        "E1.7",
        "but here only the K-FAC and ζ methods are numerically stable, while ζ* is unstable in this case.",
        "fig2",
        "λ = 0.01, each at the learning rate chosen for it. Unstable: diverged, or a training loss twice the lowest before it.",
        curves(FIG2, curve_checks.only_star_is_unstable, curve_checks.DRAWN),
    ),
    Claim(
        "E1.8",
        "This means in the regime of very small λ, ζ* is not as robust as K-FAC and ζ, however, it achieves good performance "
        "with small but moderate λ like λ=0.1.",
        "fig2",
        "The second half (E1.7 checks the first): at λ = 0.1 ζ* is stable and ends below ∇.",
        curves(FIG2, curve_checks.good_at_moderate_damping, ("zeta_star 0.1", "gradient")),
    ),
    Claim(
        "E1.9",
        "For λ<0.01, also K-FAC and ζ become numerically unstable in this setting",
        "fig2",
        "K-FAC and ζ with λ = 0.001 and 0.0001 (panel b, not drawn, a quarter of the epochs): all four unstable, as in E1.7.",
        curves(FIG2_SMALL, curve_checks.unstable_below, curve_checks.SMALLER),
    ),
    Claim(
        "E1.10",
        "in general, we observed that the smallest valid λ for K-FAC is 0.01 or 0.001 depending on model and task.",
        "fig2",
        "On the auto-encoder: of λ = 0.1, 0.01, 0.001, 0.0001 the smallest at which K-FAC is stable is 0.01 or 0.001.",
        curve_checks.smallest_valid,
    ),
    Claim(
        "E1.11",
        "Under consideration of the runtime, ζ* performs best as it is almost as fast as gradient descent while performing "
        "equivalent to K-FAC and ζ.",
        "fig2",
        "At the time on one CPU thread at which ∇ has done all its steps, a ζ* curve has the lowest training loss of all.",
        curve_checks.best_per_time,
    ),
    *of_both(
        "E1.12",
        "Specifically, a gradient descent step is only about 10% faster than ζ*.",
        "fig2",
        "Auto-encoder, one CPU thread: ζ* takes less than 1.15 times as long, which rounds to 10 % or less.",
        ratio_below(1.15, "autoencoder", "auto-encoder"),
    ),
)
