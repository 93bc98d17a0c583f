"""Tables of numbers to predict one from: Diamonds from its file, and diabetes, which comes with scikit-learn."""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from isaac_lab.data.files import SETS, DataError, md5, of_sklearn, read

DIAMONDS, DIABETES = "diamonds", "diabetes"
NAMES = (DIAMONDS, DIABETES)
#: Columns of words in Diamonds.
WORDS = ("cut", "color", "clarity")


@dataclass(frozen=True)
class Columns:
    """Rows of a table: what is known of each, and the number to predict, neither scaled.

    A column of words is one of zeros and ones in `kinds` for each of its words.
    """

    title: str
    numbers: Float[Tensor, "rows numbers"]
    kinds: Float[Tensor, "rows kinds"]
    target: Float[Tensor, " rows"]
    checksum: str


def load(name: str, folder: Path | None = None) -> Columns:
    """One of `NAMES`, read as `files.read` does; diabetes needs no file."""
    if name == DIABETES:
        return _diabetes()
    if name != DIAMONDS:
        raise DataError(f"there is no table {name!r}; there are {', '.join(NAMES)}")
    (content,) = read(name, folder)
    names, *lines = list(csv.reader(io.StringIO(content.decode())))
    columns = dict(zip(names, zip(*lines, strict=True), strict=True))
    # The logarithm: prices span two powers of ten.
    target = torch.tensor([math.log(float(price)) for price in columns.pop("price")])
    kinds = [[float(value == word) for value in columns[name]] for name in WORDS for word in sorted(set(columns[name]))]
    numbers = [[float(value) for value in own] for name, own in columns.items() if name not in WORDS]
    return Columns("Diamonds, log price", torch.tensor(numbers).T, torch.tensor(kinds).T, target, SETS[name].checksum)


def _diabetes() -> Columns:
    numbers, target = of_sklearn("datasets", "diabetes comes with").load_diabetes(return_X_y=True, scaled=False)
    numbers, target = numbers.astype(np.float32), target.astype(np.float32)
    checksum = md5(numbers.tobytes() + target.tobytes())
    return Columns("diabetes", torch.from_numpy(numbers), torch.zeros(len(target), 0), torch.from_numpy(target), checksum)
