"""Samples encoded once, up front, and read again: `preprocess_on_fly: false`.

A cache is a folder for each set of settings: `settings.txt` says which, `segment-*.mmc` hold the records of samples,
each named by its row's content and its media files' marks. So rows that were added cost only themselves, and settings
that were changed find a folder of their own. What is written is never changed; a kill loses what a worker had not yet
written, a few seconds.
"""

from mindspeed_mm.fsdp.data.sample_cache.cached_samples import CachedSamples as CachedSamples
from mindspeed_mm.fsdp.data.sample_cache.cached_samples import can_keep_samples as can_keep_samples
from mindspeed_mm.fsdp.data.sample_cache.cached_samples import (
    check_can_be_encoded_up_front as check_can_be_encoded_up_front,
)
from mindspeed_mm.fsdp.data.sample_cache.cached_samples import encoded_up_front as encoded_up_front
from mindspeed_mm.fsdp.data.sample_cache.cached_samples import measured_rows as measured_rows
