"""The order in which attention kernels are chosen, as a table over devices, installed packages and needs; and what is
put into force for a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import attention as of_torch
from torch.nn.attention import SDPBackend

from mindspeed_mm.fsdp.ops.attention_kernels import KERNELS, WORDS, Device, Need, choose_kernel
from mindspeed_mm.fsdp.ops.kernels_in_force import IN_FORCE, device_facts
from tests.helpers.fake_kernels import fresh_process, pretend_device, pretend_installed, registered, wrong_numbers

FA3, FA4, OLD_FA4 = {"flash-attn-3": "3.0.0"}, {"flash-attn-4": "4.0.0b36"}, {"flash-attn-4": "4.0.0b20"}
DEVICES = {
    "cpu": Device("cpu", installed=FA3 | FA4),
    "npu": Device("npu"),
    "xpu": Device("xpu"),
    "rocm": Device("cuda", installed=FA3),
    "turing": Device("cuda", (7, 5)),
    "ampere": Device("cuda", (8, 0), 91501, FA3 | FA4),
    "hopper": Device("cuda", (9, 0), 91501),
    "hopper, old cuDNN": Device("cuda", (9, 0), 91002),
    "hopper, FA3": Device("cuda", (9, 0), 91501, FA3),
    "hopper, FA4": Device("cuda", (9, 0), 91501, FA4),
    "hopper, both": Device("cuda", (9, 0), 91501, FA3 | FA4),
    "blackwell": Device("cuda", (10, 0), 91501),
    "blackwell, both": Device("cuda", (10, 0), 91501, FA3 | FA4),
    "blackwell, old FA4": Device("cuda", (10, 0), 91501, OLD_FA4),
    "rtx 5090": Device("cuda", (12, 0), 91501, FA3 | FA4),
}
ORDER = """
device             | plain       | packed window | sinks       | mask  | dropout | softcap        | fp32
cpu                | sdpa        | sdpa          | sdpa        | sdpa  | sdpa    | eager          | sdpa
npu                | npu         | npu           | sdpa        | npu   | npu     | eager          | sdpa
xpu                | sdpa        | sdpa          | sdpa        | sdpa  | sdpa    | eager          | sdpa
rocm               | torch_flash | torch_flash   | torch_flash | sdpa  | sdpa    | flex_attention | sdpa
turing             | sdpa        | sdpa          | sdpa        | sdpa  | sdpa    | flex_attention | sdpa
ampere             | torch_flash | torch_flash   | torch_flash | sdpa  | sdpa    | flex_attention | sdpa
hopper             | cudnn       | torch_flash   | torch_flash | cudnn | cudnn   | flex_attention | sdpa
hopper, old cuDNN  | torch_flash | torch_flash   | torch_flash | sdpa  | sdpa    | flex_attention | sdpa
hopper, FA3        | FA3         | FA3           | FA3         | cudnn | cudnn   | flex_attention | sdpa
hopper, FA4        | FA4         | FA4           | FA4         | cudnn | cudnn   | flex_attention | sdpa
hopper, both       | FA3         | FA3           | FA3         | cudnn | cudnn   | flex_attention | sdpa
blackwell          | cudnn       | torch_flash   | torch_flash | cudnn | cudnn   | flex_attention | sdpa
blackwell, both    | FA4         | FA4           | FA4         | cudnn | cudnn   | flex_attention | sdpa
blackwell, old FA4 | cudnn       | torch_flash   | torch_flash | cudnn | cudnn   | flex_attention | sdpa
rtx 5090           | torch_flash | torch_flash   | torch_flash | sdpa  | sdpa    | flex_attention | sdpa
"""
SHORT = {"FA3": "flash_attention_3", "FA4": "flash_attention_4", "npu": "npu_fusion_attention"}
HEADER, *ROWS = [[cell.strip() for cell in line.split("|")] for line in ORDER.strip().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_order(row: list[str]) -> None:
    for ask, expected in zip(HEADER[1:], row[1:], strict=True):
        asks = tuple(ask.split()) if ask != "plain" else ()
        assert choose_kernel(Need(asks, 128), DEVICES[row[0]]).kernel.name == SHORT.get(expected, expected), ask


def test_every_device_is_in_the_table() -> None:
    assert [row[0] for row in ROWS] == list(DEVICES)
    assert {ask for kernel in KERNELS for ask in kernel.takes} == WORDS.keys()


@pytest.mark.parametrize(
    ("device", "width", "expected"),
    [
        ("hopper, FA3", 256, "flash_attention_3"),
        ("hopper, FA3", 512, "sdpa"),
        ("hopper, FA4", 256, "torch_flash"),
        ("hopper, FA4", 0, "flash_attention_4"),
        ("blackwell, both", 72, "flash_attention_4"),
        ("blackwell, both", 76, "torch_flash"),
        ("hopper", 192, "torch_flash"),
    ],
)
def test_widths_of_heads(device: str, width: int, expected: str) -> None:
    assert choose_kernel(Need((), width), DEVICES[device]).kernel.name == expected


@pytest.mark.parametrize(
    ("device", "asks", "expected"),
    [
        ("cpu", (), "cpu_parts"),
        ("cpu", ("key mask", "fp32"), "cpu_parts"),
        ("cpu", ("two widths",), "eager"),
        ("npu", (), "npu_parts"),
        ("npu", ("key mask",), "eager"),
        ("hopper", (), "torch_flash"),
        ("hopper", ("fp32",), "eager"),
        ("hopper, FA3", (), "flash_attention_3"),
        ("hopper, FA3", ("key mask",), "eager"),
    ],
)
def test_parts_of_a_spread_sequence(device: str, asks: tuple[str, ...], expected: str) -> None:
    assert choose_kernel(Need(("lse", *asks), 64), DEVICES[device]).kernel.name == expected


def test_reasons_and_what_to_install() -> None:
    found = choose_kernel(Need(), DEVICES["blackwell"])
    assert found[1:] == ("flash-attn-4 is not installed", "pip install flash-attn-4: faster here than cudnn")
    assert choose_kernel(Need(), DEVICES["hopper, FA3"])[1:] == ("flash-attn-3 3.0.0 is installed", "")
    assert choose_kernel(Need(), DEVICES["cpu"])[1:] == choose_kernel(Need(), DEVICES["ampere"])[1:] == ("", "")
    _, reason, install = choose_kernel(Need(("dropout",)), DEVICES["hopper, FA3"])
    assert (reason, install) == ("flash_attention_3 takes no dropout", "")  # FA4 drops nothing out either
    assert "4.0.0b20 is older than 4.0.0b30" in choose_kernel(Need(), DEVICES["blackwell, old FA4"]).reason


# --- a process --------------------------------------------------------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    with fresh_process():
        yield


def order() -> list[SDPBackend]:
    found: list[SDPBackend] = of_torch._cur_sdpa_kernel_backends(with_priority=True)
    return found[:2]


FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
CUDNN_FIRST = FLASH_FIRST[::-1]


@pytest.mark.usefixtures("restored")
def test_torchs_function_tries_the_chosen_kernel_first() -> None:
    before = order()
    IN_FORCE.serve(Need(), DEVICES["cpu"])
    IN_FORCE.serve(Need(), DEVICES["ampere"])
    assert order() == before
    IN_FORCE.serve(Need(), DEVICES["hopper"])
    assert order() == CUDNN_FIRST
    with registered("FA3", wrong_numbers):
        IN_FORCE.serve(Need(), DEVICES["hopper, FA3"])
        assert (order(), of_torch.current_flash_attention_impl()) == (FLASH_FIRST, "FA3")
        assert IN_FORCE.choose(Need(("packed",), 64), "cuda").name == "flash_attention_3"
        IN_FORCE.serve(Need(("fp32", "dropout")), DEVICES["hopper, FA3"])  # whose calls never come to it
        assert of_torch.current_flash_attention_impl() == "FA3"
        IN_FORCE.serve(Need(("dropout",)), DEVICES["hopper, FA3"])
        IN_FORCE.serve(Need(), DEVICES["hopper, FA3"])  # dropout that it has met would raise, whoever asks now
        assert (order(), of_torch.current_flash_attention_impl()) == (CUDNN_FIRST, None)
        assert IN_FORCE.choose(Need(("packed",), 64), "cuda").name == "torch_flash"


@pytest.mark.usefixtures("restored")
def test_an_old_cudnn_is_never_tried() -> None:
    with registered("FA3", wrong_numbers):
        IN_FORCE.serve(Need(), Device("cuda", (9, 0), 91002, FA3))
        assert SDPBackend.CUDNN_ATTENTION not in of_torch._cur_sdpa_kernel_backends()
    assert of_torch.current_flash_attention_impl() == "FA3"


@pytest.mark.usefixtures("restored")
def test_a_narrow_kernel_is_not_come_to_by_wide_heads() -> None:
    with registered("FA4", wrong_numbers):
        IN_FORCE.serve(Need((), 128), DEVICES["blackwell, both"])
        assert IN_FORCE.choose(Need(("packed",), 192), "cuda").name == "sdpa"
        assert IN_FORCE.choose(Need(("lse",), 192), "cuda").name == "eager"
        IN_FORCE.serve(Need((), 192), DEVICES["blackwell, both"])
        assert IN_FORCE.choose(Need(("packed",), 192), "cuda").name == "torch_flash"


@pytest.mark.usefixtures("restored")
def test_a_device_without_flash_attention() -> None:
    IN_FORCE.serve(Need(), DEVICES["turing"])
    assert IN_FORCE.choose(Need(("packed",)), "cuda").name == "sdpa"


@pytest.mark.usefixtures("restored")
def test_a_torch_that_knows_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(of_torch, "list_flash_attention_impls")
    found = IN_FORCE.serve(Need(), DEVICES["hopper, FA3"])
    assert "knows no FA3" in choose_kernel(Need(), found).reason
    assert IN_FORCE.choose(Need(("packed",)), "cuda").name == "torch_flash"


def test_packages_are_found_by_their_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_facts() == Device("cpu")
    pretend_device(monkeypatch, "cuda", (9, 0))
    pretend_installed(monkeypatch, tmp_path, "flash-attn-4", "4.0.0b36")
    assert device_facts().installed == FA4
    monkeypatch.setattr(torch.version, "hip", "6.4")  # AMD counts otherwise: 9.4 is no Hopper
    assert device_facts() == Device("cuda", (0, 0), 0, FA4)
