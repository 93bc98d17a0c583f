"""How far it is from a layer's input to its gradient: calls of the library's functions in one training step."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import isaac_newton as isaac

LIBRARY = str(Path(isaac.__file__).parent)


def walk(layers: int, shape: tuple[int, ...], options: dict[str, Any]) -> list[tuple[str, str]]:
    """File and function of each call in a step like most others: nothing is new, and nobody looks for what has changed."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    isaac.attach(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(shape)
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # A comprehension is a call in some versions of Python and none in others.
        if event == "call" and code.co_filename.startswith(LIBRARY) and not code.co_name.startswith("<"):
            calls.append((code.co_filename.removeprefix(LIBRARY), code.co_qualname))

    def passes() -> None:
        model(x).square().sum().backward()

    for _ in range(9):
        passes()
        optimizer.step()  # outside of what is counted: handles of other tests may look at every optimizer's steps
        optimizer.zero_grad()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        passes()
    finally:
        sys.setprofile(before)
    return calls


#: Shape of the input, options, calls and files of one layer, and calls of each further one. Rows are drawn from 64, where each
#: number of the permutation is found at once.
WALKS = {
    "every row": ((20, 8), {"damping": 1.0}, 62, 13, 45),
    "fewer rows than features": ((5, 8), {"damping": 1.0}, 62, 13, 45),
    "reduce": ((20, 3, 8), {"damping": 1.0, "sharing": "reduce"}, 65, 14, 30),
    "max_rows": ((16, 4, 8), {"damping": 1.0, "max_rows": 4}, 104, 15, 39),
}


@pytest.mark.parametrize("name", WALKS)
def test_the_way_from_input_to_gradient_is_short(name: str) -> None:
    shape, options, calls, files, _ = WALKS[name]
    seen = walk(1, shape, options)
    assert seen[0][1] == "ConditionedLayer.__call__"
    assert len(seen) <= calls, "\n".join(map(" ".join, seen))
    assert len({file for file, _ in seen}) <= files


@pytest.mark.parametrize("name", WALKS)
def test_a_further_layer_takes_few_calls(name: str) -> None:
    """Layers are done together: what is asked once for a list is not asked for each."""
    shape, options, _, _, further = WALKS[name]
    few, many = (len(walk(layers, shape, options)) for layers in (4, 12))
    assert many - few <= 8 * further
