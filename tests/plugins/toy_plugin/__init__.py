"""A plugin as a user would write one: a model with keys of its own and a data set, in a package of their own."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import Dataset

from mindspeed_mm.fsdp.models.base_model import BaseModel
from mindspeed_mm.fsdp.utils.register import data_register, model_register


@model_register.register("toy_lm", keys={"toy_width": 8, "toy_vocabulary": 16})
class ToyLM(BaseModel):
    """Predicts the next token from the one before. Returns a mean loss of its own."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.toy_vocabulary, config.toy_width)
        self.head = nn.Linear(config.toy_width, config.toy_vocabulary)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


@data_register.register("toy_rows", keys={"toy_count": 32})
class ToyRows(Dataset):
    """Rows that count upwards: the next token is the last one plus one."""

    def __init__(self, basic_param, preprocess_param, dataset_param):
        self.count = dataset_param.toy_count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return (torch.arange(6) + index) % 16

    def collate_fn(self, rows):
        ids = torch.stack(rows)
        shift = torch.cat([ids[:, 1:], torch.full((len(rows), 1), -100)], dim=1)
        return {"input_ids": ids, "labels": ids, "shift_labels": shift, "sample_ids": [str(int(r[0])) for r in rows]}
