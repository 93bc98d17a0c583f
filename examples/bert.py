"""Fine-tuning BERT with and without ISAAC: python examples/bert.py --model FOLDER (or a tiny BERT with random weights)."""

import argparse
import os
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedTokenizerFast

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "100"))
SKY, EARTH = ["the sun rose", "the moon set", "the rain began"], ["a dog barked", "the train left", "she woke"]
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", type=Path, help="a local Hugging Face folder: config, weights and tokenizer of a BERT")
folder = parser.parse_args().model
if folder is not None and not (folder / "config.json").is_file():
    parser.error(f"--model must be a folder with config.json, weights and a tokenizer, got {str(folder)!r}")


def sentences(tokenizer: Any, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Two events in each, and the label: whether the earlier one happened in the sky."""
    chance = random.Random(seed)
    drawn = [(*chance.sample(SKY + EARTH, 2), chance.choice(["before", "after"])) for _ in range(count)]
    labels = [int((first if word == "before" else second) in SKY) for first, second, word in drawn]
    tokens = tokenizer([f"{first} {word} {second}" for first, second, word in drawn], padding=True, return_tensors="pt")
    return {**tokens, "labels": torch.tensor(labels)}


def pretrained_or_tiny() -> tuple[Any, Any]:
    torch.manual_seed(0)  # the same new weights for each
    if folder is not None:
        return AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    words = ["[PAD]", "[UNK]", *sorted({word for text in [*SKY, *EARTH, "before after"] for word in text.split()})]
    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    by_word.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="[PAD]")  # type: ignore[no-untyped-call]
    config = BertConfig(vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    return tokenizer, AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]


print(f"{folder or 'a tiny BERT with random weights'}, generated sentences, {STEPS} steps of AdamW, one seed and learning rate")
for name, damping in {"plain gradient": None, "ISAAC": isaac.Relative(10.0)}.items():
    tokenizer, model = pretrained_or_tiny()
    handle = None if damping is None else isaac.attach(model, damping=damping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if folder is None else 1e-4)
    for step in range(STEPS):
        batch = sentences(tokenizer, 32, seed=1 + step)
        if handle is not None:
            handle.mask = batch["attention_mask"]  # padding has no say in the conditioner
        optimizer.zero_grad()
        model.train()(**batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        result = model.eval()(**(batch := sentences(tokenizer, 500, seed=0)))
    right = (result.logits.argmax(1) == batch["labels"]).float().mean().item()
    print(f"{name:14}  loss {result.loss.item():.4f} and accuracy {right:.1%} on 500 new sentences")
