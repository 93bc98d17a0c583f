"""Section E5: what a step costs in time and memory."""

from isaac_lab.claims import costs
from isaac_lab.claims.costs import of_both, ratio_below
from isaac_lab.claims.evidence import Claim

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "E5.0",
        "The runtime and memory requirements of ζ* are comparable to those of gradient descent.",
        "tab2",
        "All models of Table 2 on one CPU thread, which the paper calls more representative: less than twice the time and less "
        "than twice the memory.",
        costs.comparable,
    ),
    Claim(
        "E5.1",
        "Note that the CPU runtime is more representative of the pure computational cost, as for the first rows of the GPU "
        "runtime the overhead of calling the GPU is dominant.",
        "tab2",
        "GPU, operation by operation: the plain steps of the first three models, whose work differs fiftyfold, differ by less "
        "than half in time.",
        costs.gpu_calls_dominate,
    ),
    *of_both(
        "E5.2",
        "When comparing runtimes between the gradient and ζ* on the GPU, we can observe that we have an overhead of around 2.5 "
        "s independent of the model size.",
        "tab2",
        "GPU, operation by operation, 1,000 steps: 1.25 to 5 s on every model (a factor of 2 for another GPU), and "
        "the largest at most twice the smallest.",
        costs.gpu_overhead,
    ),
    *of_both(
        "E5.3",
        "The overhead for CPU time is also very small at less than 1% for the largest model",
        "tab2",
        "5 × 6400 on one CPU thread: less than 1.01 times the plain step, the paper's own bound.",
        ratio_below(1.01, "6400", "5 × 6400"),
    ),
    *of_both(
        "E5.4",
        "and only 1.3 s for the smallest model.",
        "tab2",
        "5 × 100 on one CPU thread, 1,000 steps: less than 1.35 s on top, which rounds to 1.3 or less.",
        costs.smallest_model,
    ),
    Claim(
        "E5.5",
        "In contrast, the runtime of ζ* is around 4 times the runtime of the gradient",
        "tab2",
        "The sentence says ζ* and its table says it of ζ: checked for ζ. The mean over all models, CPU and GPU, is 3 to 5 "
        "times.",
        costs.around_four_times,
    ),
    Claim(
        "E5.6",
        "and K-FAC has an even substantially larger runtime.",
        "tab2",
        "One CPU thread: at least 1.5 times the time of ζ on every model that the paper has K-FAC for.",
        costs.kfac_costs_more,
    ),
    *of_both(
        "E5.7",
        "Regarding memory, ζ* (contrasting the other approaches) also requires only a small additional footprint.",
        "tab2",
        "CPU: less than a tenth above the plain gradient's peak on every model (the paper's table, rounded to 0.1 "
        "MB of 1 MB, tells no less), and ζ and K-FAC need more on each.",
        costs.small_footprint,
    ),
)
