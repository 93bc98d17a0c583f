"""In a captured step conditioners begin in the forward pass, beside the main chain."""

from isaac_newton.core.use import Use, conditioners
from isaac_newton.kernels import streams

__all__ = ["begin", "begin_all"]

#: So many uses start together: each branch that leaves the main chain takes time there.
_TOGETHER = 8


def begin(use: Use) -> None:
    """Its inputs are all that a conditioner waits for."""
    run = use.layer.run
    assert run.capture is not None
    if use.own:
        reference = run.capture.first.get(use.key)
        first = None if reference is None else reference()
        if first is not None:
            use.made, use.branch = first.made, first.branch
            return
        with streams.beside(use.layer, use.input):
            (use.made,) = conditioners([use], early=True)
        use.branch = use.layer
        run.capture.remember(use.key, use)
        return
    use.branch = run
    use.wait()
    if len(run.waiting) >= _TOGETHER:
        begin_all(use)


def begin_all(use: Use) -> None:
    """The conditioners of all waiting uses, on one branch."""
    run = use.layer.run
    together = [each for reference in run.waiting if (each := reference()) is not None]
    together = together if use in together else [use, *together]
    run.waiting.clear()
    with streams.beside(run, *(each.input for each in together)):
        for each, made in zip(together, conditioners(together, early=True), strict=True):
            each.made = made
