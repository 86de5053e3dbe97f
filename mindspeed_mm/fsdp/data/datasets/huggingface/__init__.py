"""Conversations and text in JSON, JSONL, parquet and CSV files: `dataset_type: huggingface`."""

from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset

__all__ = ["Qwen2VLDataset"]
