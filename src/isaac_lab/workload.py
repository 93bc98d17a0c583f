"""What can be trained: the network, its data on the device, its loss, and what is measured. It knows no method."""

import abc
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from isaac_lab.trial import Settings, Trial, TrialError

if TYPE_CHECKING:
    from torch import Tensor, nn

    import isaac_newton as isaac

#: How a network runs on CUDA where it does not run in float32.
HALF = "bfloat16 autocast, float32 weights, TF32 in what stays float32"
#: By file of `workloads/`, what it makes.
_FILES = {
    "mlp": "mnist-mlp digits-mlp digits-autoencoder digits-convolutions mnist-autoencoder fashion-autoencoder",
    "resnet": "cifar-resnet18 cifar-vit super-resolution",
    "characters": "char-gpt nano-gpt char-lstm",
    "glue": "cola mrpc stsb cola-64",
    "grey": "mnist-cnn mnist-vae deep-autoencoder",
    "field": "fourier-field muon-inrs relu-field siren photograph",
    "tabular": "tabular",
    "generated": "antiderivative real-nvp adding-tcn",
    "ppo": "cartpole",
}
#: By name, the file that makes it.
WORKLOADS: Mapping[str, str] = {name: file for file, names in _FILES.items() for name in names.split()}


@dataclass(frozen=True)
class Form:
    """In which form a workload is wanted."""

    small: bool = False
    device: str = "cpu"  # or "cuda"
    folder: Path | None = None  # where data are looked for first
    split: str = "test"  # with "validation" a part of the training examples stands in place of those for tests
    batch: int | None = None  # examples of a step; None for the usual number
    examples: int = 0  # at most so many to train on; 0 for all
    tested: int = 0  # at most so many are measured, of those to train on and those for tests; 0 for the usual number


class Workload(abc.ABC):
    """One problem on one device; loaded once, and used by many runs."""

    title: str  # for tables and pictures
    data: str  # what the numbers are from, for people
    checksum: str = ""  # of the bytes of the data
    batch: int  # examples of a step
    steps: int  # of an epoch
    #: What is measured besides the losses, by name, with a title for people.
    metrics: Mapping[str, str] = MappingProxyType({})
    #: Whether it is a chain of linear layers that see rows of one example each, which ζ, K-FAC and the ensemble need: a
    #: `workloads.mlp.Network`.
    flat: bool = False
    #: From what K-FAC draws labels where the workload is no such chain, but all of its layers are linear and see rows.
    drawn: "isaac.Likelihood | None" = None
    #: What the variant `model` must say, and the SHA-256 of pre-trained weights; "" where the workload alone decides.
    network: str = ""
    weights: str = ""
    #: Whether products in float32 may be TF32, which most people allow who train in half precision.
    tensor_cores: bool = False
    arithmetic: str = "float32"  # the network's precision, for people
    original: str = ""  # what `picture` should become
    build: "Callable[[], nn.Module]"  # makes the network, with initial weights from torch's generator
    _device: str

    @abc.abstractmethod
    def batches(self, seed: int, epoch: int) -> "Iterator[tuple[Tensor, ...]]":
        """The batches of an epoch, on the device, in an order that seed and epoch decide."""

    @abc.abstractmethod
    def loss(self, model: "nn.Module", *batch: "Tensor") -> "Tensor":
        """The mean loss of a batch; nothing in it may look at values on the device."""

    @abc.abstractmethod
    def evaluate(self, model: "nn.Module") -> dict[str, float]:
        """The "train_loss", the "test_loss" and each of `metrics`, in evaluation mode; leaves the model in training mode."""

    def model(self, seed: int) -> "nn.Module":
        """The network that every run with this seed starts from, on the device and in training mode."""
        return seeded(self.build, seed).to(self._device)

    def mask(self, *batch: "Tensor") -> "Tensor | None":
        """Which positions (samples, length) of a batch feed ISAAC's conditioners; None for all."""
        return None

    def picture(self, model: "nn.Module") -> str:
        """What the network makes now, as a JPEG in base64; of neural fields only."""
        raise TrialError(f"{self.title} makes no picture, so there are no frames to keep")

    def hidden(self, model: "nn.Module") -> "list[Tensor]":
        """The matrices and kernels that Muon trains: not those of the first and the last layer, nor embeddings."""
        from torch import nn

        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        return [layer.weight for layer in layers[1:-1]]

    def draws(self, seed: int, epoch: int) -> "Iterator[Tensor]":
        """Random numbers for each step of an epoch, from which `likelihood` draws labels; of flat workloads only."""
        raise NotImplementedError

    def likelihood(self, numbers: "Tensor") -> "isaac.Likelihood":
        """The likelihood of the loss, with labels drawn by these numbers; of flat workloads only."""
        raise NotImplementedError


#: `factory(form, **variant)`, and what may be in the variant: names of fields of the form too, with "split" where examples can
#: be cut for searches.
_SIZES = {"batch", "examples", "tested"}
_Factory = TypeVar("_Factory", bound=Callable[..., Workload])
_FACTORIES: dict[str, tuple[Callable[..., Workload], tuple[str, ...]]] = {}


def registered(name: str, *variant: str) -> Callable[[_Factory], _Factory]:
    """Make a factory or a class known, with what may be in its variant."""

    def register(factory: _Factory) -> _Factory:
        _FACTORIES[name] = factory, variant
        return factory

    return register


def load(trial: Trial, *, device: str, folder: Path | None = None) -> Workload:
    """The workload of a run on "cpu" or "cuda", loaded once in each process; data sets are looked for in the folder first."""
    made = _load(trial.workload, trial.small, trial.variant, trial.split, device, folder)
    if trial.get("model", made.network) != made.network:
        raise TrialError(f"the run is of {trial.get('model')!r}, the workload has {made.network!r}")
    return made


@lru_cache(maxsize=4)
def _load(name: str, small: bool, variant: Settings, split: str, device: str, folder: Path | None) -> Workload:
    if name not in WORKLOADS:
        raise TrialError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    importlib.import_module(f"isaac_lab.workloads.{WORKLOADS[name]}")
    factory, allowed = _FACTORIES[name]
    for key, _ in variant:
        if key not in (*allowed, "model") or key == "split":
            known = ", ".join(own for own in allowed if own != "split") or "none"
            raise TrialError(f"{name} has no variant {key!r}; it has {known}")
    if split != "test" and "split" not in allowed:
        raise TrialError(f"{name} has no examples for searches")
    options = {key: value for key, value in variant if key in allowed}
    sizes: dict[str, Any] = {key: options.pop(key) for key in _SIZES & options.keys()}
    form = Form(small, device, folder, split, **sizes)
    return factory(form, **options)


def seeded(build: "Callable[[], nn.Module]", seed: int) -> "nn.Module":
    """What `build` makes after torch's generator was seeded; the caller's random numbers go on as if nothing had happened."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
