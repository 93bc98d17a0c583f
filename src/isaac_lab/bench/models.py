"""What a user's own training costs: models as people train them, with fused AdamW and bfloat16 autocast on a GPU.

The models are Hugging Face's with random weights. On a CPU small stand-ins of the same kinds take their places.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.bench.problems import Problem, chain, classes
from isaac_lab.bench.steps import BASELINE, Method, Step

#: Small, so that the numbers stay about as they are.
_RATE = 1e-5


class _Logits(nn.Module):
    """A model of Hugging Face as one of a tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(**{self.name: x}).logits
        return output


class _TokenLoss(nn.Module):
    """The cross-entropy of every token."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def _attached(**options: Any) -> Method:
    """A step as in real training, attached with these options unless there are none."""

    def method(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
        if options:
            isaac.attach(model, **{"damping": isaac.Relative(0.1), **options})
        on_gpu = next(model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=on_gpu)
        half = on_gpu and not isinstance(model, nn.Sequential)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
                loss: Tensor = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return step

    return method


#: Options as a user would set them; λ is a tenth of the mean eigenvalue, but for what `attach(model)` does by itself.
MODEL_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        BASELINE: _attached(),
        "auto": _attached(damping="auto"),
        "expand": _attached(sharing="expand"),
        "reduce": _attached(sharing="reduce"),
        "max_rows=64": _attached(max_rows=64),
        "max_rows=256": _attached(max_rows=256),
    }
)


def models(device: str) -> dict[str, Problem]:
    """All models of a device, by name."""
    found = _on_gpu() if device == "cuda" else _on_cpu()
    return {problem.name: problem for problem in found}


def _on_gpu() -> Iterator[Problem]:
    base = _bert_sizes(768, 12, 12)
    yield _tokens("bert", "BERT-base", base, 32, 128)
    yield _tokens("bert-large", "BERT-large", _bert_sizes(1024, 24, 16), 32, 256)
    yield _language({"n_embd": 768, "n_layer": 12, "n_head": 12}, 8, 1024)
    yield _images("vit", "ViT", "ViT", {**base, "image_size": 224, "patch_size": 16}, 64, 224)
    yield _images("resnet50", "ResNet-50", "ResNet", {}, 128, 224)
    yield from (_mlp(1024, rows) for rows in (256, 1024))
    yield _field()


def _on_cpu() -> Iterator[Problem]:
    base = _bert_sizes(48, 2, 2)
    small = (
        _tokens("bert", "BERT", base, 4, 16),
        _language({"n_embd": 48, "n_layer": 2, "n_head": 2}, 2, 16),
        _images("vit", "ViT", "ViT", {**base, "image_size": 32, "patch_size": 2}, 8, 32),
        _images("resnet50", "ResNet", "ResNet", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, 16, 32),
    )
    yield from (replace(problem, title=f"small {problem.title}") for problem in small)
    yield _mlp(64, 32)
    yield _field()


def _bert_sizes(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width}


def _hub(model: str, config: str, inputs: str, sizes: Mapping[str, Any]) -> Callable[[], nn.Module]:
    tf: Any = importlib.import_module("transformers")  # importing it takes seconds
    return lambda: _Logits(getattr(tf, model)(getattr(tf, config)(**sizes)), inputs)


def _tokens(name: str, title: str, sizes: Mapping[str, Any], batch: int, length: int) -> Problem:
    build = _hub("BertForSequenceClassification", "BertConfig", "input_ids", sizes)
    title = f"{title}, batch {batch} × {length}"
    return classes(name, title, batch, build, lambda: torch.randint(5, 30000, (batch, length)), 2)


def _language(sizes: Mapping[str, Any], batch: int, length: int) -> Problem:
    build = _hub("GPT2LMHeadModel", "GPT2Config", "input_ids", sizes)
    inputs = partial(torch.randint, 5, 50000, (batch, length))
    return Problem("gpt2", f"GPT-2, batch {batch} × {length}", batch, build, inputs, Tensor.clone, _TokenLoss())


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


def _mlp(width: int, batch: int) -> Problem:
    title = f"MLP 784-{width}⁴-10, batch {batch}"
    return chain((784, *[width] * 4, 10), batch, name=f"mlp-{batch}", title=title, classified=True)


def _field() -> Problem:
    return chain((2, 256, 256, 256, 3), 4096, name="field", title="Neural field 2-256³-3, batch 4,096")
