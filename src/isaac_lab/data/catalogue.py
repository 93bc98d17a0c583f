"""Every data set there is: the files of those that consist of files, the sizes of those that are generated.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal

from isaac_lab.data.files import File, md5

#: What a download is: one compressed file, one as it is, an archive, or the two texts that MRPC's files are made from.
Form = Literal["gzip", "plain", "tar", "zip", "mrpc"]


@dataclass(frozen=True)
class Parcel:
    """What one download brings.

    Attributes:
        form: What it is. A compressed file is stored as it comes, the files in all else one by one.
        parts: Addresses below a mirror; all are needed.
        files: What is in it.
    """

    form: Form
    parts: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def name(self) -> str:
        """For people."""
        return PurePosixPath(self.parts[0]).name

    @property
    def limit(self) -> int:
        """Bytes that no part exceeds: archives hold other files too, and compression may add a little."""
        return sum(file.size for file in self.files) + (1 << 10 if self.form == "gzip" else 1 << 20)


@dataclass(frozen=True)
class FileSet:
    """A data set that consists of files.

    Attributes:
        title: Its name for people.
        folder: Where its files are, below a place.
        examples: How many there are to train on and to test on.
        example: What one of them is, in a word.
        parcels: The downloads that bring all files: those to train on, then those to test on.
        mirrors: Addresses of folders with the parcels.
    """

    title: str
    folder: str
    examples: tuple[int, int]
    example: str
    parcels: tuple[Parcel, ...]
    mirrors: tuple[str, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All of them."""
        return tuple(file for parcel in self.parcels for file in parcel.files)

    @property
    def checksum(self) -> str:
        """MD5 that stands for all the bytes of the set."""
        return md5(b"".join(file.md5.encode() for file in self.files))


@dataclass(frozen=True)
class Generated:
    """A data set made by a few lines from a fixed seed, for tests and smoke runs: `examples` and `example` as above."""

    examples: tuple[int, int]
    example: str


def idx_set(
    title: str,
    *checksums: str,
    mirrors: tuple[str, ...],
    examples: tuple[int, int] = (60_000, 10_000),
    side: int = 28,
) -> FileSet:
    """Training images, training labels, test images, test labels: a short header, then a byte for each number."""
    files = []
    for name, count in zip(("train", "t10k"), examples, strict=True):
        files.append((f"{name}-images-idx3-ubyte", 16 + count * side * side))
        files.append((f"{name}-labels-idx1-ubyte", 8 + count))
    parcels = (
        Parcel("gzip", (f"{name}.gz",), (File(name, size, checksum),))
        for (name, size), checksum in zip(files, checksums, strict=True)
    )
    return FileSet(title, title.lower(), examples, f"{side} × {side}", tuple(parcels), mirrors)


def _cifar10(*checksums: str) -> FileSet:
    """The binary version: a byte of label and 3 × 32 × 32 of pixels for each image, 10,000 images in a file."""
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    files = tuple(File(name, 10_000 * (1 + 3 * 32 * 32), checksum) for name, checksum in zip(names, checksums, strict=True))
    parcel = Parcel("tar", ("cifar-10-binary.tar.gz",), files)
    return FileSet("CIFAR-10", "cifar-10", (50_000, 10_000), "3 × 32 × 32", (parcel,), ("https://www.cs.toronto.edu/~kriz",))


def _glue(title: str, train: tuple[int, int, str], dev: tuple[int, int, str], example: str, form: Form, *parts: str) -> FileSet:
    """A task of GLUE; rows, bytes and checksum of its two files."""
    files = (File("train.tsv", *train[1:]), File("dev.tsv", *dev[1:]))
    mirrors = ("https://dl.fbaipublicfiles.com",)
    return FileSet(title, f"glue/{title}", (train[0], dev[0]), example, (Parcel(form, parts, files),), mirrors)


#: The checksums of MNIST and Fashion-MNIST are taken from the compressed files whose published checksums begin, in this order,
#: f68b3c2d, d53e105e, 9fb629c4, ec29112d and 8d4fb7e6, 25c81989, bef4ecab, bb300cfd.
SETS: Mapping[str, FileSet] = MappingProxyType(
    {
        "mnist": idx_set(
            "MNIST",
            *("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
            *("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
            mirrors=(
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
        ),
        "fashion-mnist": idx_set(
            "Fashion-MNIST",
            *("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"),
            *("8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965"),
            mirrors=(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
            ),
        ),
        "cifar-10": _cifar10(
            *("5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692", "942cd6a4bcdd0dd3c604fbe906cb4421"),
            *("ae636b3ba5c66a11e91e8cb52e771fcb", "53f37980c15c3d472c316c40844f3f0d", "803d5f7f4d78ea53de84dbe85f74fb6d"),
        ),
        "cola": _glue(
            "CoLA",
            (8_551, 428_590, "c79d4693b8681800338aa044bf9e797b"),
            (1_043, 53_717, "c5475ccefc9e7ca0917294b8bbda783c"),
            *("sentence", "zip", "glue/data/CoLA.zip"),
        ),
        "mrpc": _glue(
            "MRPC",
            (3_668, 941_471, "dc2dac669a113866a6480a0b10cd50bf"),
            (408, 105_616, "185958e46ba556b38c6a7cc63f3a2135"),
            *("pair", "mrpc", "senteval/senteval_data/msr_paraphrase_train.txt", "glue/data/mrpc_dev_ids.tsv"),
        ),
        "stsb": _glue(
            "STS-B",
            (5_749, 984_099, "4f7a86dde15fe4832c18e5b970998672"),
            (1_500, 276_928, "5f4d6b0d2a5f268b1b56db773ab2f1fe"),
            *("pair", "zip", "glue/data/STS-B.zip"),
        ),
        "diamonds": FileSet(
            "Diamonds",
            "diamonds",
            (43_152, 10_788),
            "9 columns",
            (Parcel("plain", ("diamonds.csv",), (File("diamonds.csv", 2_772_143, "4d3d1d4bbad5e0806dbaec425cf90196"),)),),
            ("https://raw.githubusercontent.com/mwaskom/seaborn-data/master",),
        ),
    }
)

#: Sets of grey images, which `sets.load` reads.
IDX = ("mnist", "fashion-mnist")
#: Tasks on sentences, which `text.load` reads.
GLUE = ("cola", "mrpc", "stsb")

GENERATED: Mapping[str, Generated] = MappingProxyType(
    {
        "toy-images": Generated((2_000, 500), "3 × 32 × 32"),
        "toy-cola": Generated((400, 200), "sentence"),
        "toy-mrpc": Generated((400, 200), "pair"),
        "toy-stsb": Generated((400, 200), "pair"),
    }
)
