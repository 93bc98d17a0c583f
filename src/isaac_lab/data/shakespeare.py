"""Plays of Shakespeare, 1.1 MB of plain text that comes with the package, so nothing is downloaded.

The text is in the public domain. It is the selection that is known as "tiny Shakespeare", byte for byte.
"""

from functools import cache
from importlib import resources

from isaac_lab.data.files import File, check, unpack

FILE = File("shakespeare.txt", 1_115_394, "6fb458f1232090904fb40fe944165e91")


@cache
def load() -> str:
    """The whole text, checked."""
    name = f"{FILE.name}.gz"
    packed = resources.files("isaac_lab.data").joinpath(name).read_bytes()
    return check(unpack(packed, FILE, name), FILE, name).decode("ascii")
