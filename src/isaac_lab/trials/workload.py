"""What can be trained: the network, its data on the device, its loss, and what is measured."""

import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["HALF", "REGISTRY", "Workload", "make", "registered", "seeded"]

#: How a network runs on CUDA where it does not run in float32.
HALF = "bfloat16 autocast, float32 weights, TF32 in what stays float32"


class Workload(abc.ABC):
    """One problem on one device; loaded once, and used by many trials.

    Attributes:
        title: For tables and pictures.
        data: What the numbers are from, for people.
        checksum: Of the bytes of the data; "" where they are generated.
        batch: Examples of a step.
        quantity: What a race is about: "train_loss" or "test_loss".
        metrics: What is measured besides the losses, by name, with a title for people.
        flat: Whether every linear layer sees rows of one example each, which K-FAC by BackPACK and the printed formula need.
        averaged: Over what the loss is a mean: "batch" or "batch+sequence". SINGD scales its factors accordingly.
        loss_fn: What is between a flat network's outputs and its loss, which K-FAC by BackPACK looks into.
        last: Name of the last layer.
        steps: Training steps of an epoch.
        network: What `Trial.model` must say; "" where the workload alone decides what is trained.
        weights: SHA-256 of pre-trained weights; "" where all are random.
        tensor_cores: Whether products in float32 may be TF32, which most people allow who train in half precision.
        arithmetic: In what precision the network runs, for people.
    """

    title: str
    data: str
    checksum: str = ""
    batch: int
    quantity: str = "train_loss"
    metrics: ClassVar[Mapping[str, str]] = {}
    flat: bool = False
    averaged: str = "batch"
    loss_fn: nn.Module | None = None
    last: str
    steps: int
    network: str = ""
    weights: str = ""
    tensor_cores: bool = False
    arithmetic: str = "float32"

    @abc.abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The network that every run with this seed starts from, on the device and in training mode."""

    @abc.abstractmethod
    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """The batches of an epoch, on the device, in an order that seed and epoch decide."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The mean loss of a batch; nothing in it may look at values on the device."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The "train_loss", the "test_loss" and each of `metrics`, in evaluation mode; leaves the model in training mode."""

    def mask(self, *batch: Tensor) -> Tensor | None:
        """Which positions (samples, length) of a batch feed ISAAC's conditioners; None for all."""
        return None

    def hidden(self, model: nn.Module) -> list[Tensor]:
        """The matrices and kernels that Muon trains: not those of the first and the last layer, nor embeddings."""
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        return [layer.weight for layer in layers[1:-1]]


#: By name: `factory(small, device, folder)`.
REGISTRY: dict[str, Callable[[bool, str, Path | None], Workload]] = {}


def registered(name: str) -> Callable[[Callable[[bool, str, Path | None], Workload]], Callable[..., Workload]]:
    """Put a factory into the registry."""

    def register(factory: Callable[[bool, str, Path | None], Workload]) -> Callable[[bool, str, Path | None], Workload]:
        REGISTRY[name] = factory
        return factory

    return register


def make(name: str, *, small: bool, device: str, folder: Path | None = None) -> Workload:
    """A workload, loaded.

    Args:
        name: One of `REGISTRY`; import `isaac_lab.trials.workloads` to fill it.
        small: The form for smoke tests.
        device: "cpu" or "cuda".
        folder: Where data sets are looked for first.
    """
    if name not in REGISTRY:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(REGISTRY)}")
    return REGISTRY[name](small, device, folder)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `build` makes after torch's generator was seeded; the caller's random numbers go on as if nothing had happened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
