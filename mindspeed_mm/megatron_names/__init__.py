"""The names of Megatron-LM and MindSpeed that entries import, for scripts that run without those libraries.

Opt in for one script: `torchrun … -m mindspeed_mm.megatron_names my_entry.py --flags`; or call `install()` before the
script's own imports; or install `megatron_shim/` of the repository, which calls it when a script imports one of them.
Nothing is replaced where the libraries are installed.
"""

from mindspeed_mm.megatron_names.install import NAMES, install

__all__ = ["NAMES", "install"]
