"""Every data set there is: the files of those that consist of files, the sizes of those that are generated.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal

from isaac_lab.data.files import File, IdxFile, idx_file, md5

__all__ = ["GENERATED", "GLUE", "IDX", "SETS", "FileSet", "Form", "Generated", "Parcel", "idx_set", "owner"]

#: What a download is: one compressed file, an archive, or the two texts that MRPC's files are made from.
Form = Literal["gzip", "tar", "zip", "mrpc"]


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
        files: Those to train on, then those to test on.
        examples: How many there are to train on and to test on.
        example: What one of them is, in a word.
        folders: Where its files may be below a place, the first first; `.` is the place itself. `fetch` fills the first.
        parcels: The downloads that bring all files.
        mirrors: Addresses of folders with the parcels.
        archive: Name of an archive that stands for the files where they are not there themselves.
    """

    title: str
    files: tuple[File, ...]
    examples: tuple[int, int]
    example: str
    folders: tuple[str, ...]
    parcels: tuple[Parcel, ...]
    mirrors: tuple[str, ...]
    archive: str | None = None

    @property
    def checksum(self) -> str:
        """MD5 that stands for all the bytes of the set."""
        return md5(b"".join(file.md5.encode() for file in self.files))


@dataclass(frozen=True)
class Generated:
    """A data set made by a few lines from a fixed seed, for tests and smoke runs: `examples` and `example` as above."""

    examples: tuple[int, int]
    example: str


def idx_set(title: str, folder: str, files: tuple[IdxFile, IdxFile, IdxFile, IdxFile], *, mirrors: tuple[str, ...]) -> FileSet:
    """Training images, training labels, test images, test labels."""
    train, _, test, _ = (file.shape for file in files)
    return FileSet(
        title=title,
        files=files,
        examples=(train[0], test[0]),
        example=" × ".join(map(str, train[1:])),
        folders=(folder, "."),
        parcels=tuple(Parcel("gzip", (f"{file.name}.gz",), (file,)) for file in files),
        mirrors=mirrors,
    )


def _like_mnist(title: str, folder: str, *checksums: str, mirrors: tuple[str, ...]) -> FileSet:
    """Both sets have the same names and shapes; checksums in the order of the files."""
    train_images, train_labels, test_images, test_labels = checksums
    files = (
        idx_file("train-images-idx3-ubyte", (60_000, 28, 28), train_images),
        idx_file("train-labels-idx1-ubyte", (60_000,), train_labels),
        idx_file("t10k-images-idx3-ubyte", (10_000, 28, 28), test_images),
        idx_file("t10k-labels-idx1-ubyte", (10_000,), test_labels),
    )
    return idx_set(title, folder, files, mirrors=mirrors)


def _cifar10(*checksums: str) -> FileSet:
    """The binary version: a byte of label and 3 × 32 × 32 of pixels for each image, 10,000 images in a file."""
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    files = tuple(File(name, 10_000 * (1 + 3 * 32 * 32), checksum) for name, checksum in zip(names, checksums, strict=True))
    archive = "cifar-10-binary.tar.gz"
    return FileSet(
        title="CIFAR-10",
        files=files,
        examples=(50_000, 10_000),
        example="3 × 32 × 32",
        folders=("cifar-10", "cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin", "."),
        parcels=(Parcel("tar", (archive,), files),),
        mirrors=("https://www.cs.toronto.edu/~kriz",),
        archive=archive,
    )


def _glue(
    title: str, train: tuple[int, int, str], dev: tuple[int, int, str], *, example: str, form: Form, parts: tuple[str, ...]
) -> FileSet:
    """A task of GLUE; rows, bytes and checksum of its two files."""
    files = tuple(File(f"{split}.tsv", size, checksum) for split, (_, size, checksum) in (("train", train), ("dev", dev)))
    return FileSet(
        title=title,
        files=files,
        examples=(train[0], dev[0]),
        example=example,
        # Not the place itself: a file called train.tsv may be anyone's.
        folders=(f"glue/{title}", title),
        parcels=(Parcel(form, parts, files),),
        mirrors=("https://dl.fbaipublicfiles.com",),
    )


#: The checksums of MNIST and Fashion-MNIST are taken from the compressed files whose published checksums begin, in this order,
#: f68b3c2d, d53e105e, 9fb629c4, ec29112d and 8d4fb7e6, 25c81989, bef4ecab, bb300cfd.
SETS: Mapping[str, FileSet] = MappingProxyType(
    {
        "mnist": _like_mnist(
            "MNIST",
            "mnist",
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
            mirrors=(
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
        ),
        "fashion-mnist": _like_mnist(
            "Fashion-MNIST",
            "fashion-mnist",
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
            mirrors=(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
            ),
        ),
        "cifar-10": _cifar10(
            "5dd7e06a14cb22eb9f671a540d1b7c25",
            "5ea93a67294ea407fff1d09f752e9692",
            "942cd6a4bcdd0dd3c604fbe906cb4421",
            "ae636b3ba5c66a11e91e8cb52e771fcb",
            "53f37980c15c3d472c316c40844f3f0d",
            "803d5f7f4d78ea53de84dbe85f74fb6d",
        ),
        "cola": _glue(
            "CoLA",
            (8_551, 428_590, "c79d4693b8681800338aa044bf9e797b"),
            (1_043, 53_717, "c5475ccefc9e7ca0917294b8bbda783c"),
            example="sentence",
            form="zip",
            parts=("glue/data/CoLA.zip",),
        ),
        "mrpc": _glue(
            "MRPC",
            (3_668, 941_471, "dc2dac669a113866a6480a0b10cd50bf"),
            (408, 105_616, "185958e46ba556b38c6a7cc63f3a2135"),
            example="pair",
            form="mrpc",
            parts=("senteval/senteval_data/msr_paraphrase_train.txt", "glue/data/mrpc_dev_ids.tsv"),
        ),
        "stsb": _glue(
            "STS-B",
            (5_749, 984_099, "4f7a86dde15fe4832c18e5b970998672"),
            (1_500, 276_928, "5f4d6b0d2a5f268b1b56db773ab2f1fe"),
            example="pair",
            form="zip",
            parts=("glue/data/STS-B.zip",),
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


def owner(content: bytes) -> str | None:
    """The data set that has a file with these bytes."""
    found = md5(content)
    return next((name for name, files in SETS.items() if found in [file.md5 for file in files.files]), None)
