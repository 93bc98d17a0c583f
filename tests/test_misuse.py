"""Bad use raises at once, names the value, and says what would be right."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import isaac_newton as isaac

g, a = torch.ones(4, 3), torch.ones(4, 5)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def zeta_backward(loss_fn: Any, output: Any = None, **options: Any) -> None:
    model = net()
    handle = isaac.attach(model, **{"output_damping": 1.0, **options})
    prediction = model(a)
    handle.backward(prediction.sum(), prediction if output is None else output, loss_fn)


def attach_twice() -> None:
    model = net()
    isaac.attach(model)
    isaac.attach(model)


def detach_handle_twice() -> None:
    handle = isaac.attach(net())
    handle.detach()
    handle.detach()


def detach_after_model_was_detached() -> None:
    model = net()
    handle = isaac.attach(model)
    isaac.detach(model)
    handle.detach()


def change(name: str, value: Any, **options: Any) -> None:
    setattr(isaac.attach(net(), **options), name, value)


def plain_backward_with_sampled_zeta() -> None:
    model = net()
    isaac.attach(model, output_damping=1.0)
    model(a).sum().backward()


def schedule_returning(value: Any) -> None:
    model = net()
    isaac.attach(model, damping=lambda step: value)
    model(a).sum().backward()


class Own(nn.Module):
    """A norm of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Tables(nn.Module):
    """As vision transformers begin."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 9, 4))
        self.scale = Own()


MISUSE: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "zero damping": (lambda: isaac.attach(net(), damping=0.0), ValueError, ["damping must be > 0", "0.0", "math.inf"]),
    "negative damping": (lambda: isaac.attach(net(), damping=-1.0), ValueError, ["damping must be > 0", "-1.0"]),
    "NaN damping": (lambda: isaac.attach(net(), damping=math.nan), ValueError, ["damping must be > 0", "nan"]),
    "damping of another type": (lambda: isaac.attach(net(), damping="1"), TypeError, ["damping", "'1'"]),
    "boolean damping": (lambda: isaac.attach(net(), damping=True), TypeError, ["damping", "True"]),
    "negative output damping": (lambda: isaac.attach(net(), output_damping=-2.0), ValueError, ["output_damping", "-2.0"]),
    "negative ratio": (lambda: isaac.Relative(-0.5), ValueError, ["ratio must be > 0", "-0.5"]),
    "infinite ratio": (lambda: isaac.Relative(math.inf), ValueError, ["ratio must be finite", "inf"]),
    "damping changed to zero": (lambda: change("damping", 0), ValueError, ["damping must be > 0", "0"]),
    "ζ* changed to ζ": (lambda: change("output_damping", 1.0), ValueError, ["output_damping", "1.0", "attach again"]),
    "ζ changed to ζ*": (lambda: change("output_damping", math.inf, output_damping=1.0), ValueError, ["inf", "attach again"]),
    "negative step": (lambda: change("backward_passes", -1), ValueError, ["backward_passes", "-1"]),
    "schedule below zero": (lambda: schedule_returning(-3.0), ValueError, ["schedule", "-3.0", "step 0", "> 0"]),
    "schedule of another type": (lambda: schedule_returning("x"), TypeError, ["schedule", "'x'", "step 0"]),
    "schedule of schedules": (lambda: schedule_returning(abs), TypeError, ["schedule", "abs", "step 0"]),
    "unknown bias mode": (lambda: isaac.attach(net(), bias="both"), ValueError, ["bias", "'plain', 'joint'", "'both'"]),
    "unknown curvature": (
        lambda: isaac.attach(net(), output_curvature="guessed"),
        ValueError,
        ["output_curvature", "'sampled', 'exact', 'empirical'", "'guessed'"],
    ),
    "no samples": (lambda: isaac.attach(net(), samples=0), ValueError, ["samples", "0", ">= 1"]),
    "unknown option": (lambda: isaac.attach(net(), dampin=1.0), TypeError, ["dampin"]),
    "no model": (lambda: isaac.attach([1]), TypeError, ["nn.Module", "list"]),
    "model without parameters": (lambda: isaac.attach(nn.ReLU()), ValueError, ["ReLU", "no parameters"]),
    "model without a layer to condition": (lambda: isaac.attach(nn.LayerNorm(3)), ValueError, ["normalization"]),
    "pattern without a match": (lambda: isaac.attach(net(), layers="fc*"), ValueError, ["layers='fc*'", "'0', '2'"]),
    "second pattern without a match": (lambda: isaac.attach(net(), layers=["0", "x"]), ValueError, ["'x'", "'0', '2'"]),
    "exclusion without a match": (lambda: isaac.attach(net(), exclude="fc"), ValueError, ["exclude='fc'", "'0', '2'"]),
    "predicate without a match": (lambda: isaac.attach(net(), layers=lambda n, m: False), ValueError, ["layers=", "'0', '2'"]),
    "everything excluded": (lambda: isaac.attach(net(), exclude="*"), ValueError, ["no layer", "exclude='*'"]),
    "pattern of another type": (lambda: isaac.attach(net(), layers=3), TypeError, ["layers", "3"]),
    "patterns of another type": (lambda: isaac.attach(net(), layers=[3]), TypeError, ["layers", "3"]),
    "pattern of a part": (
        lambda: isaac.attach(nn.ModuleDict({"encoder": net()}), layers="encoder"),
        ValueError,
        ["layers='encoder'", "did you mean 'encoder.*'?"],
    ),
    "pattern for a model that is one layer": (
        lambda: isaac.attach(nn.Linear(3, 3), layers="fc"),
        ValueError,
        ["layers='fc'", "(the model itself)"],
    ),
    "an optimizer for a damping": (
        lambda: isaac.attach(net(), torch.optim.SGD(net().parameters())),
        TypeError,
        ["damping", "SGD", "handle.bind(optimizer)"],
    ),
    "own norms and tables of positions": (
        lambda: isaac.attach(Tables()),
        ValueError,
        ["scale: Own owns only vectors", "tables"],
    ),
    "a suggestion from a loader": (
        lambda: isaac.suggest_damping(net(), DataLoader(torch.ones(4, 5))),
        TypeError,
        ["DataLoader", "next(iter(loader))"],
    ),
    "a suggestion from a tuple": (lambda: isaac.suggest_damping(net(), (a, g)), TypeError, ["tuple", "(model, *inputs)"]),
    "a suggestion for a model without values": (
        lambda: isaac.suggest_damping(net().to("meta"), a.to("meta")),
        ValueError,
        ["'0.weight'", "meta device"],
    ),
    "attaching twice": (attach_twice, ValueError, ["'0'", "already attached", "detach"]),
    "detaching what is not attached": (lambda: isaac.detach(net()), ValueError, ["nothing is attached", "isaac_newton.attach"]),
    "detaching no model": (lambda: isaac.detach(None), TypeError, ["nn.Module", "NoneType"]),
    "detaching a handle twice": (detach_handle_twice, ValueError, ["already detached"]),
    "detaching a handle after the model": (detach_after_model_was_detached, ValueError, ["'0'", "no longer attached"]),
    "two names for one damping": (lambda: isaac.Linear(2, 2, 1.0, la=2.0), TypeError, ["damping=1.0", "la=2.0"]),
    "drop-in with a bad damping": (lambda: isaac.Linear(2, 2, la=-1), ValueError, ["damping must be > 0", "-1"]),
    "handle.backward without ζ": (
        lambda: zeta_backward(nn.MSELoss(), output_damping=math.inf),
        RuntimeError,
        ["output_damping=inf", "loss.backward()"],
    ),
    "loss.backward with sampled ζ": (plain_backward_with_sampled_zeta, RuntimeError, ["'2'", "handle.backward", "'empirical'"]),
    "unknown loss": (lambda: zeta_backward(nn.L1Loss()), TypeError, ["L1Loss", "isaac_newton.Likelihood"]),
    "loss class instead of a loss": (lambda: zeta_backward(nn.Module), TypeError, ["Module", "isaac_newton.Likelihood"]),
    "no loss": (lambda: zeta_backward(None), TypeError, ["None", "isaac_newton.Likelihood"]),
    "label smoothing": (
        lambda: zeta_backward(nn.CrossEntropyLoss(label_smoothing=0.1)),
        ValueError,
        ["label_smoothing=0.1", "label_smoothing=0"],
    ),
    "label smoothing in a partial": (
        lambda: zeta_backward(functools.partial(F.cross_entropy, label_smoothing=0.2)),
        ValueError,
        ["label_smoothing=0.2"],
    ),
    "class weights": (lambda: zeta_backward(nn.CrossEntropyLoss(weight=torch.ones(3))), ValueError, ["weight", "Likelihood"]),
    "no reduction": (lambda: zeta_backward(nn.MSELoss(reduction="none")), ValueError, ["reduction", "'none'"]),
    "output that is no tensor": (lambda: zeta_backward(nn.MSELoss(), output={}), TypeError, ["output", "dict"]),
    "output without a graph": (lambda: zeta_backward(nn.MSELoss(), output=torch.ones(4, 3)), ValueError, ["output", "graph"]),
    "equation with zero damping": (lambda: isaac.equations.zeta_star(g, a, 0.0), ValueError, ["damping must be > 0", "0.0"]),
    "equation with negative λ_g": (
        lambda: isaac.equations.zeta(g, g, a, -1.0, 1.0),
        ValueError,
        ["output_damping must be > 0", "-1.0"],
    ),
    "equation with many dampings": (lambda: isaac.equations.zeta_star(g, a, torch.ones(2)), ValueError, ["shape (2,)"]),
}


@pytest.mark.parametrize("case", MISUSE)
def test_bad_use_names_the_value_and_the_way_out(case: str) -> None:
    action, error, words = MISUSE[case]
    with pytest.raises(error) as raised:
        action()
    for word in words:
        assert word in str(raised.value)


def test_a_refused_attachment_leaves_the_model_alone() -> None:
    model = net()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match="matches no layer"):
        isaac.attach(model, layers=["0", "nowhere"])
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_model_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"torch\.jit\.script has compiled it"):
        isaac.attach(torch.jit.script(net()))


def test_a_suggestion_takes_inputs_by_name() -> None:
    model = net()
    assert isaac.suggest_damping(model, input=a).damping == isaac.suggest_damping(model, a).damping
