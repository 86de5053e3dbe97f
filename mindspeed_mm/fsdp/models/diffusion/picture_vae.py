"""The frozen VAE that lies in the folder of a model which answers and draws: pictures of any size to latents and back.

It is `ae.safetensors` in FLUX's layout, as BAGEL was released, or a folder `vae` in diffusers' layout: FLUX's VAE, or
Qwen-Image's, whose latents are brought to mean 0 and variance 1 channel by channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.checkpoint.safetensors_folder import VAE_FILE
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.models.diffusion.latents import scaled, unscaled

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

DIFFUSERS_FOLDER = "vae"
FLUX_LATENTS = {"z_channels": 16, "downsample": 8}
"""Numbers of a latent, and pixels along its side, as models take them that say nothing else."""
_SCALE, _SHIFT = 0.3611, 0.1159
"""Of FLUX's latents."""


class PictureVAE:
    """Encodes pictures one by one, so that latents do not depend on what else a batch holds.

    Args:
        folder: Of the whole model.
        channels: Of a latent, as the model takes them.
        downsample: Pixels along a side of a latent, as the model counts them.
        device: Where it runs.
        dtype: What it computes in.

    Raises:
        ModelFolderError: There is no VAE, or one of other latents.
    """

    def __init__(self, folder: Path, channels: int, downsample: int, device: torch.device, dtype: torch.dtype) -> None:
        self._vae: Any = load_vae(folder).to(device, dtype).eval().requires_grad_(False)
        self._device, self._dtype = device, dtype
        config = self._vae.config
        own = (config.latent_channels, 2 ** (len(config.block_out_channels) - 1))
        if own != (channels, downsample):
            raise ModelFolderError(
                f"its VAE makes latents of {own[0]} channels and {own[1]} pixels, and vae_config says {channels} and "
                f"{downsample}",
                where=str(folder),
                key="vae_config",
                way_out="Take the VAE that the model was trained with.",
            )

    @torch.no_grad()
    def posterior(self, pixels: torch.Tensor) -> torch.Tensor:
        """(2, C, h, w) on the host: mean and standard deviation of a picture's normalised latents.

        Args:
            pixels: (3, H, W) uint8.
        """
        return posterior_of(self._vae, pixels.to(self._device, self._dtype)).cpu()

    def encode(self, pixels: torch.Tensor, seed: int | None) -> torch.Tensor:
        """Normalised latents (C, h, w) on the host, drawn from the posterior as the published training does.

        Args:
            pixels: (3, H, W) uint8.
            seed: Of the draw; None: the likeliest.
        """
        return drawn_from(self.posterior(pixels), seed)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels (3, H, W) uint8 on the host, of latents (C, h, w)."""
        raw_latents = unscaled(self._vae, latents.to(self._device, self._dtype)[None])
        pixels: torch.Tensor = self._vae.decode(raw_latents).sample[0]
        return ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).to(torch.uint8).cpu()


def posterior_of(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """(2, C, h, w) of pixels (3, H, W) from 0 to 255, where the VAE is and in its type."""
    found = vae.encode(pixels[None] / 127.5 - 1).latent_dist
    return torch.cat([scaled(vae, found.mode()), found.std * vae.config.scaling_factor])


def drawn_from(posterior: torch.Tensor, seed: int | None) -> torch.Tensor:
    """Latents (C, h, w) drawn from (2, C, h, w), see `PictureVAE.posterior`; in its type, fp32 at least. Without a seed
    the likeliest."""
    mean, deviation = posterior.to(torch.promote_types(posterior.dtype, torch.float32))
    if seed is None:
        return mean
    draw = torch.Generator().manual_seed(seed % 2**63)
    return mean + deviation * torch.randn(1, *mean.shape, generator=draw, dtype=mean.dtype)[0]


def vae_files(folder: Path) -> list[Path]:
    """The files of a model's folder that decide what its VAE gives; none where it has no VAE."""
    inside = folder / DIFFUSERS_FOLDER
    if (inside / "config.json").is_file():
        return sorted([inside / "config.json", *inside.glob("*.safetensors"), *inside.glob("*.bin")])
    if (folder / VAE_FILE).is_file():
        return [folder / VAE_FILE]
    return []


def write_small_vae(folder: Path, channels: int, downsample: int) -> None:
    """Write a VAE with random weights and few features into a model's folder: for runs that are compared with one
    another, where pictures are as large as ever.

    Args:
        folder: Of the model.
        channels: Of a latent.
        downsample: Pixels along a side of a latent, a power of two.
    """
    from diffusers import AutoencoderKL

    levels = downsample.bit_length()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=(4,) * levels,
            norm_num_groups=2,
            latent_channels=channels,
            mid_block_add_attention=False,
        )
    vae.save_pretrained(folder / DIFFUSERS_FOLDER)


def load_vae(folder: Path) -> Any:
    """The VAE of a model's folder.

    Raises:
        ModelFolderError: There is none, or it cannot be read.
    """
    inside = folder / DIFFUSERS_FOLDER
    if (inside / "config.json").is_file():
        return _class_of(inside).from_pretrained(inside, local_files_only=True)
    file = folder / VAE_FILE
    if not file.is_file():
        raise without_vae(folder)
    return _from_flux(file)


def outline_vae(folder: Path) -> Any:
    """The same on the meta device, without its weights. Raises `ModelFolderError` as `load_vae`."""
    inside, file = folder / DIFFUSERS_FOLDER, folder / VAE_FILE
    if (inside / "config.json").is_file():
        kind = _class_of(inside)
        config = kind.load_config(inside)
        with torch.device("meta"):
            return kind.from_config(config)
    if not file.is_file():
        raise without_vae(folder)
    return _with_sizes({name: entry.shape for name, entry in read_header(file).items()}, file, "meta")


def _class_of(inside: Path) -> Any:
    """The class that a folder in diffusers' layout names."""
    from diffusers import AutoencoderKL

    from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE
    from mindspeed_mm.fsdp.models.diffusion.one_frame_vae import OneFrameVAE

    name = read_json_object(inside / "config.json", ModelFolderError).get("_class_name")
    if name == OneFrameVAE.wraps:
        return OneFrameVAE
    if name == IdentityVAE.__name__:
        return IdentityVAE
    return AutoencoderKL


def without_vae(folder: Path) -> ModelFolderError:
    """What is said of a model's folder that has no VAE."""
    return ModelFolderError(
        f"has no VAE: neither {VAE_FILE} nor {DIFFUSERS_FOLDER}/config.json",
        where=str(folder),
        way_out=f"Copy {VAE_FILE} of the released model there.",
    )


def _from_flux(file: Path) -> AutoencoderKL:
    """A VAE of stored tensors."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    stored = load_file(file)
    vae = _with_sizes({name: tensor.shape for name, tensor in stored.items()}, file)
    with _told_of_layout(file):
        vae.load_state_dict(convert_ldm_vae_checkpoint(stored, vae.config))
    return vae


def _with_sizes(shapes: Mapping[str, Sequence[int]], file: Path, device: str = "cpu") -> AutoencoderKL:
    """A VAE whose sizes are those of stored tensors, by name."""
    from diffusers import AutoencoderKL

    with _told_of_layout(file), torch.device(device):
        levels = len({name.split(".")[2] for name in shapes if name.startswith("encoder.down.")})
        blocks = {name.split(".")[4] for name in shapes if name.startswith("encoder.down.0.block.")}
        widths = [shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)]
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(widths),
            layers_per_block=len(blocks),
            latent_channels=shapes["decoder.conv_in.weight"][1],
            scaling_factor=_SCALE,
            shift_factor=_SHIFT,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


@contextmanager
def _told_of_layout(file: Path) -> Iterator[None]:
    """What goes wrong inside becomes `ModelFolderError`: the file has another layout."""
    try:
        yield
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise ModelFolderError(
            f"is not a VAE in FLUX's layout: {str(error).splitlines()[0]}",
            where=str(file),
            way_out="Copy the file of the released model.",
        ) from error
