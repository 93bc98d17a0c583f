"""A stock script for the Hugging Face `Trainer`, plus two lines: a small BERT learns to tell which of two words comes first."""

import os
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from isaac_newton.integrations.transformers import IsaacCallback  # line 1

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "150"))
WORDS = ["[PAD]", "[CLS]", "day", "night", "the", "sun", "moon", "rose", "set", "before", "after", "over", "hill", "sea"]


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words, among them "day" and "night" once each; label 1 if "day" comes first."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(4, len(WORDS), (count, 12), generator=random)
        self.tokens[:, 0] = WORDS.index("[CLS]")
        places = torch.stack([1 + torch.randperm(11, generator=random)[:2] for _ in range(count)])
        self.tokens.scatter_(1, places, torch.tensor([WORDS.index("day"), WORDS.index("night")]).expand(count, 2))
        self.labels = (places[:, 0] < places[:, 1]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


set_seed(0)
config = BertConfig(vocab_size=len(WORDS), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
model = BertForSequenceClassification(config)  # type: ignore[no-untyped-call]
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=32,
    max_steps=STEPS,
    learning_rate=3e-3,
    logging_steps=max(STEPS // 5, 1),
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(
    model,
    args,
    train_dataset=Sentences(4000, seed=1),
    eval_dataset=Sentences(500, seed=2),
    callbacks=[IsaacCallback(damping=1.0)],  # line 2
)
trainer.train()
print(f"test loss {trainer.evaluate()['eval_loss']:.4f} after {STEPS} steps")
