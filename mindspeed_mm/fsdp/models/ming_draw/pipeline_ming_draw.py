"""What draws in Ming-Lite-Omni, as a pipeline in the manner of diffusers: pictures of captions, and of pictures that
captions change.

The language model reads a caption and, behind it, squares of learned tokens; what it makes of the last square goes
through a connector and is the condition. Facts: `modeling_bailingmm.py` and `pipeline_stable_diffusion_3.py` of
inclusionAI/Ming at d97e2f3. Shapes: L tokens; H features of the language model, K of the connector; Q = s² learned
tokens of the largest square of s by s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion_3.pipeline_output import StableDiffusion3PipelineOutput
from PIL import Image
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.behaviour.shared_media import with_media
from mindspeed_mm.fsdp.models.ming.language_ming import IMAGE
from mindspeed_mm.fsdp.models.ming.modeling_ming import BailingMMNativeForConditionalGeneration, tell_transformers
from mindspeed_mm.fsdp.models.ming.processing_ming import CHAT_TEMPLATE


class MingReader(BailingMMNativeForConditionalGeneration):
    """The model that understands, as the part of a pipeline that reads captions."""

    @classmethod
    @override
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        tell_transformers()  # how its released weights are named
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


class MingQueries(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Learned tokens, and the layers around the connector. They lie in the released folder `mlp`.

    Args:
        hidden_size: H.
        connector_size: K.
        scales: Sides of the squares of learned tokens, the largest last.
    """

    @register_to_config
    def __init__(self, hidden_size: int = 2048, connector_size: int = 1536, scales: Sequence[int] = (4, 8, 16)) -> None:
        super().__init__()
        tables = {f"{side}x{side}": nn.Parameter(torch.zeros(side * side, hidden_size)) for side in scales}
        self.query_tokens_dict = nn.ParameterDict(tables)
        self.proj_in = nn.Linear(hidden_size, connector_size)
        self.proj_out = nn.Linear(connector_size, hidden_size)

    def tokens(self) -> torch.Tensor:
        """(sum of s², H): all squares, one behind the other."""
        return torch.cat([self.query_tokens_dict[f"{side}x{side}"] for side in self.config.scales])


def condition(reader: MingReader, queries: MingQueries, connector: Any, read: dict[str, torch.Tensor]) -> torch.Tensor:
    """(Q, H) of one caption, rows of length 1.

    Args:
        reader: Of the caption.
        queries: Behind it.
        connector: A language model whose tokens all see one another.
        read: What the processor made of the caption, and of the picture that is edited: (1, L) `input_ids` and
            `mm_token_type_ids`; of a picture `pixel_values` and `image_grid_thw`.
    """
    config, scales = reader.config, queries.config.scales
    device, patch = reader.device, config.llm_config.image_patch_token
    merge, pieces, kinds, grids = config.vision_config.spatial_merge_size, [], [], []
    for side in scales:  # as the tokens of a picture of one row
        pieces += [patch + 1, *[patch] * side**2, patch + 2]
        kinds += [0, *[IMAGE] * side**2, 0]
        grids.append([1, merge, merge * side**2])
    ids = torch.cat([read["input_ids"].to(device), torch.tensor([pieces], device=device)], dim=1)
    all_kinds = torch.cat([read["mm_token_type_ids"].to(device), torch.tensor([kinds], device=device)], dim=1)
    seen, grid = [queries.tokens().to(device)], torch.tensor(grids, device=device)
    if "pixel_values" in read:
        of_picture = read["image_grid_thw"].to(device)
        seen.insert(0, reader.get_image_features(read["pixel_values"].to(device), of_picture))
        grid = torch.cat([of_picture, grid])
    words = reader.get_input_embeddings()(ids)
    embeds = with_media(words, all_kinds == IMAGE, torch.cat([each.to(words.dtype) for each in seen]))
    positions, _ = reader.get_rope_index(ids, all_kinds, grid)
    states = reader.get_decoder()(inputs_embeds=embeds, mm_token_type_ids=all_kinds, position_ids=positions)
    last = scales[-1] ** 2
    # The last square without the mark behind it.
    rows = queries.proj_in(states.last_hidden_state[:, -last - 1 : -1].to(queries.dtype))
    all_see_all = rows.new_zeros(1, 1, last, last)  # is added to the scores
    made = connector.model(inputs_embeds=rows.to(connector.dtype), attention_mask=all_see_all.to(connector.dtype))
    return F.normalize(queries.proj_out(made.last_hidden_state.to(queries.dtype))[0], dim=-1)


def as_read(processor: Any, caption: str, picture: object | None, longest: int) -> dict[str, torch.Tensor]:
    """What the processor makes of a caption, as a person's turn that an answer follows. Special tokens in the caption,
    marks of media among them, are text.

    Args:
        processor: Of the model.
        caption: At most `longest` tokens of it are read.
        picture: In front of the caption; None: there is none.
        longest: Tokens.
    """
    content: list[JsonObject] = []
    pictures: dict[str, Any] = {}
    if picture is not None:
        content.append({"type": "image"})
        pictures["images"] = [picture]
    turn = [{"role": "user", "content": content}]
    before = processor.apply_chat_template(turn, chat_template=CHAT_TEMPLATE)
    whole = processor.apply_chat_template(turn, chat_template=CHAT_TEMPLATE, add_generation_prompt=True)
    read = dict(processor(text=[before], return_tensors="pt", **pictures))
    words = processor.tokenizer(caption, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    behind = processor.tokenizer(whole.removeprefix(before), add_special_tokens=False)["input_ids"]
    said = [*words[:longest], *behind]
    read["input_ids"] = torch.cat([read["input_ids"], torch.tensor([said])], dim=1)
    read["mm_token_type_ids"] = F.pad(read["mm_token_type_ids"], (0, len(said)))
    return read


class MingDrawPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Text to picture; with a picture, editing.

    Args:
        transformer: `MingImageTransformer`.
        vae: `AutoencoderKL`.
        text_encoder: `MingReader`.
        tokenizer: `BailingMMProcessor`.
        queries: `MingQueries`.
        connector: `Qwen2ForCausalLM`.
        scheduler: `FlowMatchEulerDiscreteScheduler`.
    """

    def __init__(
        self,
        transformer: Any,
        vae: Any,
        text_encoder: Any,
        tokenizer: Any,
        queries: Any,
        connector: Any,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            queries=queries,
            connector=connector,
            scheduler=scheduler,
        )
        self.vae_scale_factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor)

    @torch.no_grad()
    def encode_prompt(
        self, prompt: Sequence[str], image: Image.Image | None = None, max_sequence_length: int = 2048
    ) -> tuple[torch.Tensor]:
        """(B, Q, H) conditions. That of an empty caption is zero: what the published code guides away from.

        Args:
            prompt: Captions.
            image: What the captions change; None: nothing.
            max_sequence_length: Tokens of a caption that are read.
        """
        rows = []
        for caption in prompt:
            if caption:
                read = as_read(self.tokenizer, caption, image, max_sequence_length)
                rows.append(condition(self.text_encoder, self.queries, self.connector, read))
            else:
                settings = self.queries.config
                rows.append(self.queries.proj_out.weight.new_zeros(settings.scales[-1] ** 2, settings.hidden_size))
        return (torch.stack(rows),)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Image.Image | None = None,
        height: int = 512,
        width: int = 512,
        num_inference_steps: int = 30,
        guidance_scale: float = 5.0,
        latents: torch.Tensor | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        max_sequence_length: int = 2048,
        output_type: str = "np",
        return_dict: bool = True,
    ) -> StableDiffusion3PipelineOutput | tuple[Any]:
        """Pictures of prompts.

        Args:
            prompt: One or several.
            image: What they change, in the size of the pictures; None: nothing.
            height: A multiple of the VAE's ratio times the patch.
            width: The same.
            num_inference_steps: Euler steps of the scheduler.
            guidance_scale: Of guidance away from the condition 0; at most 1: none.
            latents: (B, C, h, w) noise; None: it is drawn.
            generator: Draws it.
            max_sequence_length: Tokens of a prompt that are read.
            output_type: `np`, `pil`, `pt`, or `latent`.
            return_dict: False: a tuple.
        """
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        device, dtype, guides = self.vae.device, self.transformer.dtype, guidance_scale > 1
        (rows,) = self.encode_prompt(texts, image, max_sequence_length)
        rows = rows.to(device, dtype)
        if guides:
            rows = torch.cat([rows, rows * 0])
        given: dict[str, Any] = {"encoder_hidden_states": rows}
        if latents is None:
            channels, ratio = self.transformer.config.in_channels, self.vae_scale_factor
            latents = self._drawn((len(texts), channels, height // ratio, width // ratio), generator)
        latents = latents.to(device, torch.float32)
        if image is not None:
            source = self._latents_of(image, height, width).to(dtype)
            given["ref_hidden_states"] = source.expand(len(rows), -1, -1, -1)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        for time in self.progress_bar(self.scheduler.timesteps):
            noisy = torch.cat([latents] * 2) if guides else latents
            (said,) = self.transformer(
                hidden_states=noisy.to(dtype), timestep=time.expand(len(noisy)), return_dict=False, **given
            )
            said = said.float()
            if guides:
                wanted, away = said.chunk(2)
                said = away + guidance_scale * (wanted - away)
            (latents,) = self.scheduler.step(said, time, latents, return_dict=False)
        if output_type == "latent":
            pictures: Any = latents
        else:
            unscaled = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
            decoded = self.vae.decode(unscaled.to(self.vae.dtype), return_dict=False)[0]
            pictures = self.image_processor.postprocess(decoded, output_type=output_type)
        return StableDiffusion3PipelineOutput(images=pictures) if return_dict else (pictures,)

    def _latents_of(self, image: Image.Image, height: int, width: int) -> torch.Tensor:
        pixels = self.image_processor.preprocess(image, height, width).to(self.vae.device, self.vae.dtype)
        mode = self.vae.encode(pixels).latent_dist.mode()
        return (mode - self.vae.config.shift_factor) * self.vae.config.scaling_factor  # type: ignore[no-any-return]

    def _drawn(self, shape: tuple[int, ...], generator: object) -> torch.Tensor:
        from diffusers.utils.torch_utils import randn_tensor

        source = list(generator) if isinstance(generator, Sequence) else generator
        made: torch.Tensor = randn_tensor(shape, generator=source, device=self.vae.device, dtype=torch.float32)
        return made
