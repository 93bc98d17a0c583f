"""What a step is measured on: a network, a fixed random batch for it, and a loss.

Models as people train them are Hugging Face's with random weights. On a CPU small stand-ins take their places.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isaac_lab.workloads.mlp import AUTOENCODER, relu_layers
from isaac_lab.workloads.resnet import ResNet18

#: The paper's.
BATCH = 60
#: Networks of one panel of the paper's Figure 1: 13 values of λ_a times 13 of λ_g and ∞.
COPIES = 182


@dataclass(frozen=True)
class Problem:
    """One model of a benchmark; `batch` samples, a loss that is a mean over them.

    `sizes` are those of the layers, where the network is a chain of linear ones.
    """

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[Tensor], Tensor]  # of these inputs
    loss_fn: nn.Module
    sizes: tuple[int, ...] = ()

    def make(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """The network, inputs and targets on `device`; the same numbers every time."""
        # The random numbers of whoever calls this go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, x = self.build(), self.inputs()
            y = self.targets(x)
        return model.to(device), x.to(device), y.to(device)


def classes(
    name: str, title: str, batch: int, build: Callable[[], nn.Module], inputs: Callable[[], Tensor], outputs: int, **more: Any
) -> Problem:
    """Cross-entropy of so many outputs against random classes."""
    return Problem(name, title, batch, build, inputs, lambda _: torch.randint(outputs, (batch,)), nn.CrossEntropyLoss(), **more)


def chain(sizes: tuple[int, ...], batch: int, *, name: str, title: str, classified: bool = False) -> Problem:
    """Linear layers of these sizes with ReLU between them, on inputs in [0, 1].

    They are `classified`, as in `classes`; otherwise the loss is the mean squared error against numbers in [0, 1], which are
    the inputs themselves where the sizes allow it.
    """
    build, inputs = partial(relu_layers, sizes), partial(torch.rand, batch, sizes[0])
    if classified:
        return classes(name, title, batch, build, inputs, sizes[-1], sizes=sizes)
    targets = Tensor.clone if sizes[-1] == sizes[0] else lambda _: torch.rand(batch, sizes[-1])
    return Problem(name, title, batch, build, inputs, targets, nn.MSELoss(), sizes)


class _Function(nn.Module):
    """A function of an inner module, which may be none, and of tensors, as a network or a loss."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(self.inner, *tensors)


def bert_shaped(
    *, layers: int = 2, width: int = 768, heads: int = 12, vocabulary: int = 30522, classes: int = 2
) -> nn.Sequential:
    """The shape of BERT, which has 12 layers: token embedding, transformer encoder, and a classifier on the first position."""
    blocks = (nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True) for _ in range(layers))
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, _Function(lambda _, x: x[:, 0]), nn.Linear(width, classes))


def shapes(device: str) -> tuple[Problem, ...]:
    """Two layers in the shape of BERT-base, and ResNet-18 on images of 32 × 32."""
    batch, tokens = 32 if device == "cpu" else 100, partial(torch.randint, 30522, (8, 128))
    images, title = partial(torch.rand, batch, 3, 32, 32), f"ResNet-18 (CIFAR), batch {batch}"
    return (
        classes("encoder", "BERT-shaped, 2 layers, batch 8, length 128", 8, bert_shaped, tokens, 2),
        classes("resnet18", title, batch, ResNet18, images, 10),
    )


def panel(copies: int = COPIES) -> Problem:
    """So many networks with 400 neurons per layer at once; all see the same batch."""
    sizes = (784, 400, 400, 400, 400, 10)

    def build() -> nn.Module:
        return nn.ModuleList([relu_layers(sizes) for _ in range(copies)])

    title = f"{copies} networks 5 layers × 400 at once"
    return classes(f"grid{copies}", title, BATCH, build, lambda: torch.rand(BATCH, sizes[0]), sizes[-1])


#: The models of the paper's Table 2.
TABLE2: Mapping[str, Problem] = {
    str(width): chain((784, *[width] * 4, 10), BATCH, name=str(width), title=f"5 layers × {width}", classified=True)
    for width in (100, 400, 1600, 6400)
} | {"autoencoder": chain(AUTOENCODER, BATCH, name="autoencoder", title="auto-encoder")}


def models(device: str) -> dict[str, Problem]:
    """All models of a device, by name."""
    found, (width, *batches) = (_on_gpu(), (1024, 256, 1024)) if device == "cuda" else (_on_cpu(), (64, 32))
    mlps = (
        chain((784, *[width] * 4, 10), rows, name=f"mlp-{rows}", title=f"MLP 784-{width}⁴-10, batch {rows}", classified=True)
        for rows in batches
    )
    field = chain((2, 256, 256, 256, 3), 4096, name="field", title="Neural field 2-256³-3, batch 4,096")
    return {problem.name: problem for problem in (*found, *mlps, field)}


def _on_gpu() -> Iterator[Problem]:
    base = _bert_sizes(768, 12, 12)
    yield _tokens("bert", "BERT-base", base, 32, 128)
    yield _tokens("bert-large", "BERT-large", _bert_sizes(1024, 24, 16), 32, 256)
    yield _language({"n_embd": 768, "n_layer": 12, "n_head": 12}, 8, 1024)
    yield _images("vit", "ViT", "ViT", {**base, "image_size": 224, "patch_size": 16}, 64, 224)
    yield _images("resnet50", "ResNet-50", "ResNet", {}, 128, 224)


def _on_cpu() -> Iterator[Problem]:
    base = _bert_sizes(48, 2, 2)
    small = (
        _tokens("bert", "BERT", base, 4, 16),
        _language({"n_embd": 48, "n_layer": 2, "n_head": 2}, 2, 16),
        _images("vit", "ViT", "ViT", {**base, "image_size": 32, "patch_size": 2}, 8, 32),
        _images("resnet50", "ResNet", "ResNet", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, 16, 32),
    )
    yield from (replace(problem, title=f"small {problem.title}") for problem in small)


def _bert_sizes(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width}


def _hub(model: str, config: str, inputs: str, sizes: Mapping[str, Any]) -> Callable[[], nn.Module]:
    tf: Any = importlib.import_module("transformers")  # importing it takes seconds

    def logits(whole: Any, x: Tensor) -> Any:
        return whole(**{inputs: x}).logits

    return lambda: _Function(logits, getattr(tf, model)(getattr(tf, config)(**sizes)))


def _tokens(name: str, title: str, sizes: Mapping[str, Any], batch: int, length: int) -> Problem:
    build = _hub("BertForSequenceClassification", "BertConfig", "input_ids", sizes)
    title = f"{title}, batch {batch} × {length}"
    return classes(name, title, batch, build, lambda: torch.randint(5, 30000, (batch, length)), 2)


def _language(sizes: Mapping[str, Any], batch: int, length: int) -> Problem:
    loss_fn = _Function(lambda _, output, y: nn.functional.cross_entropy(output.flatten(0, 1), y.flatten()))
    build = _hub("GPT2LMHeadModel", "GPT2Config", "input_ids", sizes)
    inputs = partial(torch.randint, 5, 50000, (batch, length))
    return Problem("gpt2", f"GPT-2, batch {batch} × {length}", batch, build, inputs, Tensor.clone, loss_fn)


def _images(name: str, title: str, kind: str, sizes: Mapping[str, Any], batch: int, size: int) -> Problem:
    last = torch.channels_last if kind == "ResNet" else torch.contiguous_format
    build = _hub(f"{kind}ForImageClassification", f"{kind}Config", "pixel_values", {**sizes, "num_labels": 1000})
    return classes(
        name,
        f"{title}, batch {batch} × {size}²",
        batch,
        # Torch's annotations of `Module.to` leave the memory format out.
        lambda: build().to(memory_format=last),  # type: ignore[call-overload]
        lambda: torch.rand(batch, 3, size, size).to(memory_format=last),
        1000,
    )
