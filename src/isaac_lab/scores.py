"""What GLUE measures a model by, of scikit-learn and scipy; 0 where one of both sides does not vary, which they leave open."""

import math
from collections.abc import Callable

from jaxtyping import Num
from scipy import stats
from sklearn import metrics
from torch import Tensor


def accuracy(predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """The share of predictions that are right."""
    return float(metrics.accuracy_score(*_classes(predicted, labels)))


def f1(predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """Harmonic mean of precision and recall of class 1; 0 where it is neither predicted nor there."""
    return float(metrics.f1_score(*_classes(predicted, labels), zero_division=0.0))


def matthews(predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """Correlation of two classes, -1 to 1."""
    true, found = _classes(predicted, labels)
    return 0.0 if len(set(true)) == 1 or len(set(found)) == 1 else float(metrics.matthews_corrcoef(true, found))


def pearson(predicted: Num[Tensor, " n"], scores: Num[Tensor, " n"]) -> float:
    """Linear correlation, -1 to 1; NaN where one is not finite."""
    return _correlation(stats.pearsonr, predicted, scores)


def spearman(predicted: Num[Tensor, " n"], scores: Num[Tensor, " n"]) -> float:
    """Linear correlation of the ranks, the mean rank for equal values."""
    return _correlation(stats.spearmanr, predicted, scores)


def _correlation(correlation: Callable[..., tuple[float, float]], predicted: Tensor, scores: Tensor) -> float:
    _check(predicted, scores)
    x, y = predicted.double().cpu(), scores.double().cpu()
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.nan
    if x.amin() == x.amax() or y.amin() == y.amax():
        return 0.0
    return float(correlation(x.numpy(), y.numpy())[0])


def _classes(predicted: Tensor, labels: Tensor) -> tuple[list[int], list[int]]:
    """Labels and predictions."""
    _check(predicted, labels)
    true, found = labels.tolist(), predicted.tolist()
    if not {*true, *found} <= {0, 1}:
        raise ValueError("predictions and labels must be 0 or 1")
    return true, found


def _check(predicted: Tensor, labels: Tensor) -> None:
    if predicted.shape != labels.shape or predicted.dim() != 1 or not len(labels):
        raise ValueError(
            f"predictions {tuple(predicted.shape)} and labels {tuple(labels.shape)} must be two equal rows, not empty"
        )
