"""Pictures to be learned as functions of the place: two that come with scikit-learn, and one that is generated."""

import importlib
from pathlib import Path

import numpy
import torch
from jaxtyping import Float
from torch import Tensor

from isaac_lab.data.files import DataError, of_sklearn, places
from isaac_lab.records import installed
from isaac_lab.trial import TrialError

GENERATED = "waves"
#: Those of scikit-learn are 427 × 640.
NAMES, LARGEST = ("flower", "china", GENERATED), 426


def load(name: str, side: int, folder: Path | None = None) -> Float[Tensor, "side side 3"]:
    """A square from the middle of one of `NAMES`, between 0 and 1, with an even number of pixels on a side.

    A machine without scikit-learn needs the file pictures/NAME.png in the folder, or where other data are.
    """
    if name not in NAMES or not 2 <= side <= LARGEST or side % 2:
        raise TrialError(f"a picture is {', '.join(NAMES)} with an even side up to {LARGEST}, got {name!r} and {side}")
    if name == GENERATED:
        x = torch.arange(side) / side
        waves = [torch.sin(2 * torch.pi * (n * x[:, None] + (4 - n) * x.square())) for n in (1, 2, 3)]
        return (torch.stack(waves, -1) + 1) / 2
    files = [place.folder / "pictures" / f"{name}.png" for place in places(folder)]
    file = next((file for file in files if file.is_file()), None)
    if not (installed("PIL") and (file or installed("sklearn"))):
        raise DataError("the picture needs scikit-learn and Pillow: pip install 'isaac-newton[lab]'")
    if file:
        with importlib.import_module("PIL.Image").open(file) as picture:
            pixels = numpy.array(picture.convert("RGB"))
    else:
        pixels = of_sklearn("datasets", "the picture comes with").load_sample_image(f"{name}.jpg").copy()
    whole = torch.from_numpy(pixels)
    top, left = ((size - side) // 2 for size in whole.shape[:2])
    return whole[top : top + side, left : left + side].float() / 255
