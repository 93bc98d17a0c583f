"""What a user's own training costs: models as people train them, with fused AdamW and bfloat16 autocast on a GPU.

The models are Hugging Face's with random weights. On a CPU small stand-ins of the same kinds take their places.
"""

import gc
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


def _trained(model: nn.Module, loss_fn: nn.Module) -> Step:
    """A step as in real training."""
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


def _attached(**options: Any) -> Method:
    def method(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
        if options:
            isaac.attach(model, **{"damping": isaac.Relative(0.1), **options})
        return _trained(model, loss_fn)

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


@dataclass(frozen=True)
class _Sizes:
    """How large the models are, and their batches."""

    width: int
    layers: int
    heads: int
    batch: int
    length: int
    image: int


_GPU, _CPU = _Sizes(768, 12, 12, 32, 128, 224), _Sizes(48, 2, 2, 4, 16, 32)


def models(device: str) -> dict[str, Problem]:
    """All models of a device, by name."""
    tf: Any = importlib.import_module("transformers")  # importing it takes seconds
    size, on_gpu = (_GPU, True) if device == "cuda" else (_CPU, False)
    common = _bert_sizes(size.width, size.layers, size.heads)
    gpt: dict[str, Any] = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads}
    vit: dict[str, Any] = {**common, "image_size": size.image, "patch_size": size.image // 14, "num_labels": 1000}
    resnet: dict[str, Any] = {"num_labels": 1000}
    if not on_gpu:
        resnet |= {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}

    def bert(**sizes: Any) -> nn.Module:
        model: nn.Module = tf.BertForSequenceClassification(tf.BertConfig(**sizes))
        return model

    found = [_tokens("bert", "BERT-base" if on_gpu else "BERT", lambda: bert(**common), size.batch, size.length)]
    if on_gpu:
        found.append(_tokens("bert-large", "BERT-large", lambda: bert(**_bert_sizes(1024, 24, 16)), 32, 256))
    batch, length = (8, 1024) if on_gpu else (2, 16)
    found += [
        _language("gpt2", lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**gpt)), batch, length),
        _images("vit", "ViT", lambda: tf.ViTForImageClassification(tf.ViTConfig(**vit)), 2 * size.batch, size.image),
        _images(
            "resnet50",
            "ResNet-50" if on_gpu else "ResNet",
            lambda: tf.ResNetForImageClassification(tf.ResNetConfig(**resnet)),
            4 * size.batch,
            size.image,
        ),
        *(_mlp(1024 if on_gpu else 64, rows) for rows in ((256, 1024) if on_gpu else (32,))),
        chain((2, 256, 256, 256, 3), 4096, name="field", title="Neural field 2-256³-3, batch 4,096"),
    ]
    if not on_gpu:
        found = [problem if problem.sizes else replace(problem, title=f"small {problem.title}") for problem in found]
    return {problem.name: problem for problem in found}


def _bert_sizes(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def device_work(step: Callable[[], object], copies: int) -> dict[str, float]:
    """What one step leaves to a GPU: seconds that it is busy, kernels that are launched, the peak of its memory.

    So many copies of the model, with their optimizers, are there at once; the peak is that of one.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - resident + resident // copies
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    return {
        "device_seconds": sum(event.self_device_time_total for event in events) / 1e6,
        "launches": sum(event.count for event in events),
        "allocated_bytes": peak,
    }


def _title(title: str, batch: int, size: object) -> str:
    return f"{title}, batch {batch} × {size}"


def _tokens(name: str, title: str, build: Callable[[], nn.Module], batch: int, length: int) -> Problem:
    whole = _title(title, batch, length)
    return classes(
        name, whole, batch, lambda: _Logits(build(), "input_ids"), lambda: torch.randint(5, 30000, (batch, length)), 2
    )


def _language(name: str, build: Callable[[], nn.Module], batch: int, length: int) -> Problem:
    def draw() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(5, 50000, (batch, length))
        return tokens, tokens.clone()

    return Problem(name, _title("GPT-2", batch, length), batch, lambda: _Logits(build(), "input_ids"), draw, _TokenLoss())


def _images(name: str, title: str, build: Callable[[], nn.Module], batch: int, size: int) -> Problem:
    last = torch.channels_last if name == "resnet50" else torch.contiguous_format
    whole = _title(title, batch, f"{size}²")

    def inputs() -> Tensor:
        return torch.rand(batch, 3, size, size).to(memory_format=last)

    # Torch's annotations of `Module.to` leave the memory format out.
    return classes(name, whole, batch, lambda: _Logits(build(), "pixel_values").to(memory_format=last), inputs, 1000)  # type: ignore[call-overload]


def _mlp(width: int, batch: int) -> Problem:
    title = f"MLP 784-{width}⁴-10, batch {batch}"
    return chain((784, *[width] * 4, 10), batch, name=f"mlp-{batch}", title=title, classified=True)
