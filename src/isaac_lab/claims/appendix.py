"""The captions of Figures 1 and A3, and appendix B."""

from isaac_lab.claims import checks, costs
from isaac_lab.claims.checks import FIG1, FISHER, panels
from isaac_lab.claims.evidence import Claim

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "F1.1",
        "We can observe that in the limit of λ_g→∞ (i.e., in the limit to the right) the performance remains good, showing the "
        "utility of ζ*.",
        "fig1",
        "In all four panels the best ζ* is within 10 % of log-loss of the best ζ, and its best test accuracy within 0.2 "
        "points.",
        panels(FIG1, checks.remains_good),
    ),
    Claim(
        "FA3.1",
        "We observe that, for large λ_g, the behavior is similar to Figure 1, which is expected as they are the same in the "
        "limit of λ_g→∞.",
        "figA3",
        "In each panel, over the cells with λ_g ≥ 10^4: the median difference to the same cell of Figure 1 is at most 10 % of "
        "log-loss.",
        checks.similar_for_large_output_damping,
    ),
    Claim(
        "FA3.2",
        "Further, we observe that (in this case of the Fisher-based ζ) not only in the limit of λ_g→∞ but also in the limit of "
        "λ_a→∞ good performance can be achieved.",
        "figA3",
        "In all four panels the best cell at the largest λ_a ends below ∇.",
        panels(FISHER, checks.row_is_good),
    ),
    Claim(
        "FA3.3",
        "Moreover, in this specific experiment, λ_a→∞ has slightly better optimal performance compared to λ_g→∞",
        "figA3",
        "In more than half of the panels the best cell at the largest λ_a ends below the best ζ*.",
        panels(FISHER, checks.row_is_better, need="most"),
    ),
    Claim(
        "FA3.4",
        "but λ_a→∞ is more sensitive to changes in λ_g compared to the sensitivity of the case of λ_g→∞ wrt. changes in λ_a.",
        "figA3",
        "Counted: the cells within 10 % of log-loss of the best one of their line. In more than half of the panels the row at "
        "the largest λ_a has fewer than the ζ* column.",
        panels(FISHER, checks.row_is_more_sensitive, need="most"),
    ),
    Claim(
        "FA3.5",
        "This phenomenon was also (to a lesser extent) visible in the experiments of Figure 1.",
        "figA3",
        "In more than half of the panels λ_a → ∞ ends below ζ* in Figure 1 too, and by less than in Figure A3.",
        checks.lesser_extent,
    ),
    Claim(
        "FA3.6",
        "We would like to remark that the case of λ_g→∞ (i.e., ζ*) is computationally more efficient compared to λ_a→∞.",
        "figA3",
        "Auto-encoder, one CPU thread: a step with λ_a = ∞ and finite λ_g takes longer than one of ζ*.",
        costs.output_side_costs_more,
    ),
    Claim(
        "B.1",
        "We verified this range to cover the full reasonable range of learning rates. Specifically, for every single "
        "experiment, we made sure that there is no learning rate outside this range which performs better.",
        "fig1",
        "Appendix B. No chosen learning rate is the largest or smallest of the list; where one is, a better one may lie "
        "outside, and the records cannot tell. For auto-encoders rates up to 100 were tried beside the paper's: a mean over "
        "784 pixels has small gradients.",
        checks.rates_inside,
    ),
)
