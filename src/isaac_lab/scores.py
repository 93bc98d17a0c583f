"""What GLUE measures a model by: Matthews correlation, accuracy, F1, Pearson and Spearman correlation, as pure functions."""

import math

import torch
from jaxtyping import Float, Num
from torch import Tensor

__all__ = ["accuracy", "f1", "matthews", "pearson", "ranks", "spearman"]


def accuracy(predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """The share of predictions that are right."""
    _check(predicted, labels)
    return (predicted == labels).double().mean().item()


def f1(predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """Harmonic mean of precision and recall of class 1; 0 where it is neither predicted nor there."""
    found, missed, false, _ = _counts(predicted, labels)
    return 2 * found / (2 * found + missed + false) if found or missed or false else 0.0


def matthews(predicted: Num[Tensor, " n"], labels: Num[Tensor, " n"]) -> float:
    """Correlation of two classes, -1 to 1; 0 where one of both sides is a single class."""
    found, missed, false, rejected = _counts(predicted, labels)
    # Whole numbers, so that the product of four counts loses nothing.
    scale = (found + missed) * (found + false) * (rejected + missed) * (rejected + false)
    return (found * rejected - missed * false) / math.sqrt(scale) if scale else 0.0


def pearson(predicted: Num[Tensor, " n"], scores: Num[Tensor, " n"]) -> float:
    """Linear correlation, -1 to 1; 0 where one of both sides is constant, NaN where one is not finite."""
    _check(predicted, scores)
    x, y = predicted.double(), scores.double()
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.nan
    # What rounding leaves of a constant less its mean is no variation.
    if x.amin() == x.amax() or y.amin() == y.amax():
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y / (x.norm() * y.norm())).clamp(-1, 1))


def spearman(predicted: Num[Tensor, " n"], scores: Num[Tensor, " n"]) -> float:
    """Linear correlation of the ranks, the mean rank for equal values."""
    if not (predicted.isfinite().all() and scores.isfinite().all()):
        return math.nan
    return pearson(ranks(predicted), ranks(scores))


def ranks(values: Num[Tensor, " n"]) -> Float[Tensor, " n"]:
    """1 for the smallest; equal values share the mean of the ranks that they take."""
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    mean: Tensor = count.cumsum(0).double() - (count - 1) / 2
    return mean[place]


def _counts(predicted: Tensor, labels: Tensor) -> tuple[int, int, int, int]:
    """Of class 1: found, missed, falsely found, rightly rejected."""
    _check(predicted, labels)
    if not torch.isin(torch.cat([predicted, labels]), torch.tensor([0, 1], device=labels.device)).all():
        raise ValueError("predictions and labels must be 0 or 1")
    yes, true = predicted == 1, labels == 1
    return tuple(int(both.sum()) for both in (yes & true, ~yes & true, yes & ~true, ~yes & ~true))  # type: ignore[return-value]


def _check(predicted: Tensor, labels: Tensor) -> None:
    if predicted.shape != labels.shape or predicted.dim() != 1 or not len(labels):
        raise ValueError(
            f"predictions {tuple(predicted.shape)} and labels {tuple(labels.shape)} must be two equal rows, not empty"
        )
