"""Features on disk: what a generator's encoders make of media and captions, once, so that training only reads.

A feature set is a folder: `features.json` says what made it, `shard-*.safetensors` hold the tensors, `index.jsonl` has
one line for each row of the data, `skipped.jsonl` the rows that could not be used, `null-text.safetensors` the features
of the empty caption. The index is written last: a folder without it is not finished.
"""

from mindspeed_mm.fsdp.data.feature_store.description import check_provenance as check_provenance
from mindspeed_mm.fsdp.data.feature_store.feature_file import FeatureRecord as FeatureRecord
from mindspeed_mm.fsdp.data.feature_store.feature_file import SkippedRow as SkippedRow
from mindspeed_mm.fsdp.data.feature_store.legacy import PrecomputedFeatures as PrecomputedFeatures
from mindspeed_mm.fsdp.data.feature_store.legacy import PrecomputedLayout as PrecomputedLayout
from mindspeed_mm.fsdp.data.feature_store.reader import FeatureStore as FeatureStore
from mindspeed_mm.fsdp.data.feature_store.reader import open_features as open_features
