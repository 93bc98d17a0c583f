"""What GLUE measures a model by, of scikit-learn and scipy; 0 where one of both sides does not vary, which they leave open."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from jaxtyping import Num
from scipy import stats
from sklearn import metrics
from torch import Tensor


def _of_classes(score: Callable[..., float], predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """Of two classes, 0 and 1."""
    _check(predicted, labels)
    true, found = labels.tolist(), predicted.tolist()
    if not {*true, *found} <= {0, 1}:
        raise ValueError("predictions and labels must be 0 or 1")
    return float(score(true, found))


def _matthews(true: list[int], found: list[int]) -> float:
    return 0.0 if len(set(true)) == 1 or len(set(found)) == 1 else metrics.matthews_corrcoef(true, found)


def _correlation(score: Callable[..., tuple[float, float]], predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """From -1 to 1; NaN where a number is not finite."""
    _check(predicted, labels)
    x, y = predicted.double().cpu(), labels.double().cpu()
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.nan
    return 0.0 if x.amin() == x.amax() or y.amin() == y.amax() else float(score(x.numpy(), y.numpy())[0])


def _check(predicted: Tensor, labels: Tensor) -> None:
    if predicted.shape != labels.shape or predicted.dim() != 1 or not len(labels):
        raise ValueError(
            f"predictions {tuple(predicted.shape)} and labels {tuple(labels.shape)} must be two equal rows, not empty"
        )


#: Each takes predictions and labels.
SCORES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "matthews": partial(_of_classes, _matthews),
    "accuracy": partial(_of_classes, metrics.accuracy_score),
    "f1": partial(_of_classes, partial(metrics.f1_score, zero_division=0.0)),
    "pearson": partial(_correlation, stats.pearsonr),
    "spearman": partial(_correlation, stats.spearmanr),
}
