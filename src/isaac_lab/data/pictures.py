"""Pictures to be learned as functions of the place: two that come with scikit-learn, and one that is generated."""

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_lab.data.files import DataError
from isaac_lab.records import installed
from isaac_lab.trial import TrialError

__all__ = ["NAMES", "DataError", "load"]

GENERATED = "waves"
#: Those of scikit-learn are 427 × 640.
NAMES, LARGEST = ("flower", "china", GENERATED), 426


def load(name: str, side: int) -> Float[Tensor, "side side 3"]:
    """A square from the middle of a picture, between 0 and 1.

    Args:
        name: One of `NAMES`.
        side: Its pixels, an even number.

    Raises:
        DataError: What is needed to read it is not installed.
    """
    if name not in NAMES or not 2 <= side <= LARGEST or side % 2:
        raise TrialError(f"a picture is {', '.join(NAMES)} with an even side up to {LARGEST}, got {name!r} and {side}")
    if name == GENERATED:
        x = torch.arange(side) / side
        waves = [torch.sin(2 * torch.pi * (n * x[:, None] + (4 - n) * x.square())) for n in (1, 2, 3)]
        return (torch.stack(waves, -1) + 1) / 2
    if not (installed("sklearn") and installed("PIL")):
        raise DataError("the picture needs scikit-learn and Pillow: pip install 'isaac-newton[lab]'")
    from sklearn.datasets import load_sample_image

    whole = torch.from_numpy(load_sample_image(f"{name}.jpg").copy())
    top, left = ((size - side) // 2 for size in whole.shape[:2])
    return whole[top : top + side, left : left + side].float() / 255
