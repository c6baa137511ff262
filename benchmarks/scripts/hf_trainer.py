"""Hugging Face Trainer: a Dataset whose set_transform tokenises; no workers, as is the default; 5 epochs."""

import random
import re
import unicodedata

from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SYLLABLES = [a + b for a in "bcdfghklmnprstvwz" for b in "aeiou"]
VOCABULARY = {x: i + 5 for i, x in enumerate([*SYLLABLES, *("##" + x for x in SYLLABLES)])}


def texts(n=4000):
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(2, 6))).capitalize() for _ in range(3000)]
    return [" ".join(rng.choices(words, k=rng.randint(80, 280))) for _ in range(n)]


def clean(text):
    text = unicodedata.normalize("NFD", text.lower())
    return "".join(c for c in text if unicodedata.category(c) != "Mn")


def pieces(word):
    """The longest known piece first, as WordPiece has it."""
    out, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = word[start:end] if start == 0 else "##" + word[start:end]
            if piece in VOCABULARY:
                out.append(VOCABULARY[piece])
                start = end
                break
        else:
            return [1]
    return out


def encode(text, length=64):
    ids = [i for word in re.findall(r"\w+", clean(text)) for i in pieces(word)][:length]
    return ids + [0] * (length - len(ids))


def tokenize(batch):
    ids = [encode(x) for x in batch["text"]]
    return {"input_ids": ids, "attention_mask": [[int(k > 0) for k in x] for x in ids], "labels": batch["label"]}


class Progress(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        print("begin", flush=True)

    def on_epoch_end(self, args, state, control, **kwargs):
        print(f"epoch {round(state.epoch)}: step {state.global_step}", flush=True)


def train(dataset, workers=0, epochs=5):
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(VOCABULARY) + 5, **size))
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=64, num_train_epochs=epochs, dataloader_num_workers=workers,
        report_to=[], save_strategy="no", logging_strategy="no", remove_unused_columns=False, use_cpu=True,
        disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[Progress()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    lines = texts()
    data = Dataset.from_dict({"text": lines, "label": [i % 2 for i in range(len(lines))]})
    data.set_transform(tokenize)
    train(data)
