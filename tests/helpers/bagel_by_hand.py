"""BAGEL written from the formulas, token by token in fp64: what the tests of the model compare it with. Nothing of the
package is used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tests.helpers.tiny_bagel import LATENT_SIDE, PATCH, TOWER_SIDE

PICTURES = ("seen", "given", "drawn", "noisy")


def toy_latents(pixels: torch.Tensor, _seed: int = 0) -> torch.Tensor:
    """(4, H / 2, W / 2) of a picture: stands for the VAE."""
    small = pixels.double()[:, ::2, ::2] / 255
    return torch.cat([small, small.mean(dim=0, keepdim=True) - 0.5])


def pixels_of(run: Path, number: int, stride: int) -> torch.Tensor:
    """(3, H, W) uint8 of a file, its sides the nearest multiples of the stride."""
    picture = Image.open(run.parent / "rows" / f"{number}.png")
    width, height = (round(side / stride) * stride for side in picture.size)
    return torch.tensor(np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))).permute(2, 0, 1)


def squares(planes: torch.Tensor, side: int) -> list[torch.Tensor]:
    """Row by row, each flattened over its rows, columns, planes."""
    rows, columns = planes.shape[1] // side, planes.shape[2] // side
    return [
        planes[:, r * side : (r + 1) * side, c * side : (c + 1) * side].permute(1, 2, 0).flatten()
        for r in range(rows)
        for c in range(columns)
    ]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def linear(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(()))


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """A head's numbers turned by RoPE, base 1e6: number i with number i + half."""
    half = x.shape[-1] // 2
    angles = position / 1e6 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def table_row(state: dict[str, torch.Tensor], name: str, place: tuple[int, int], side: int) -> torch.Tensor:
    """Of a place (row, column), in a table that is stored in fp32."""
    return state[f"{name}.pos_embed"][place[0] * side + place[1]]


def seen_features(state: dict[str, torch.Tensor], patches: list[torch.Tensor], columns: int) -> list[torch.Tensor]:
    """SigLIP's two layers on one picture, the connector, and the table of places."""
    side = TOWER_SIDE // PATCH
    name = "vit_model.vision_model."
    places = [divmod(number, columns) for number in range(len(patches))]
    x = linear(state, f"{name}embeddings.patch_embedding", torch.stack(patches))
    x = x + torch.stack([state[f"{name}embeddings.position_embedding.weight"][r * side + c] for r, c in places])

    def norm(x: torch.Tensor, own: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{own}.weight"], state[f"{own}.bias"], 1e-6)

    for layer in range(2):
        own = f"{name}encoder.layers.{layer}."
        y = norm(x, f"{own}layer_norm1")
        q, k, v = (linear(state, f"{own}self_attn.{each}_proj", y).view(len(y), 2, 12) for each in "qkv")
        heads = [(q[:, h] @ k[:, h].T / math.sqrt(12)).softmax(-1) @ v[:, h] for h in range(2)]
        x = x + linear(state, f"{own}self_attn.out_proj", torch.cat(heads, dim=-1))
        y = linear(state, f"{own}mlp.fc1", norm(x, f"{own}layer_norm2"))
        x = x + linear(state, f"{own}mlp.fc2", F.gelu(y, approximate="tanh"))
    x = F.gelu(linear(state, "connector.fc1", norm(x, f"{name}post_layernorm")), approximate="tanh")
    return [
        f + table_row(state, "vit_pos_embed", place, side)
        for f, place in zip(linear(state, "connector.fc2", x), places, strict=True)
    ]


def latent_embedding(state: dict[str, torch.Tensor], latent: torch.Tensor, time: float, place: Any) -> torch.Tensor:
    speeds = 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    waves = torch.cat([(time * speeds).cos(), (time * speeds).sin()])
    told = linear(state, "time_embedder.mlp.2", F.silu(linear(state, "time_embedder.mlp.0", waves)))
    return linear(state, "vae2llm", latent) + told + table_row(state, "latent_pos_embed", place, LATENT_SIDE)


class Hand:
    """A row, part by part: embeddings, positions, who belongs to which part, and what is asked of which token."""

    def __init__(self, run: Path, state: dict[str, torch.Tensor], tokenizer: Any) -> None:
        self.run, self.state, self.tokenizer = run, state, tokenizer
        self.embeds: list[torch.Tensor] = []
        self.positions: list[int] = []
        self.part: list[int] = []
        self.is_noise: list[bool] = []
        self.is_latent: list[bool] = []
        self.is_picture: list[bool] = []
        self.words: list[tuple[int, int]] = []
        self.targets: list[tuple[int, torch.Tensor]] = []

    def _put(self, embed: torch.Tensor, position: int, part: int, kind: str, *, latent: bool = False) -> None:
        self.embeds.append(embed)
        self.positions.append(position)
        self.part.append(part)
        self.is_noise.append(kind in ("drawn", "noisy"))
        self.is_picture.append(kind in PICTURES)
        self.is_latent.append(latent)

    def embed(self, token: str | int) -> torch.Tensor:
        number = token if isinstance(token, int) else self.tokenizer.convert_tokens_to_ids(token)
        return self.state["language_model.model.embed_tokens.weight"][number]

    def read(self, parts: list[tuple[str, Any]], noise: Any) -> None:
        """`noise`: gives, for each drawn picture in turn, its time and ε of each token."""
        position = 0
        for number, (kind, content) in enumerate(parts):
            if kind in ("text", "said"):
                ids = self.tokenizer(content, add_special_tokens=False)["input_ids"]
                end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
                for token, follows in zip(["<|im_start|>", *ids], [*ids, end], strict=True):
                    if kind == "said":
                        self.words.append((len(self.embeds), follows))
                    self._put(self.embed(token), position, number, kind)
                    position += 1
                self._put(self.embed("<|im_end|>"), position, number, kind)
                position += 1
                continue
            if kind == "begun":  # an answer so far
                for token in content:
                    self._put(self.embed(token), position, number, kind)
                    position += 1
                continue
            self._put(self.embed("<|vision_start|>"), position, number, kind)
            if kind == "seen":
                shown_in_fp32 = np.float32(pixels_of(self.run, content, PATCH)) / np.float32(127.5) - np.float32(1)
                pixels = torch.tensor(shown_in_fp32.astype(np.float64))
                for feature in seen_features(self.state, squares(pixels, PATCH), pixels.shape[2] // PATCH):
                    self._put(feature, position, number, kind)
            elif kind == "noisy":
                time, columns, tokens = content
                for index, token in enumerate(tokens):
                    self.targets.append((len(self.embeds), token))
                    embed = latent_embedding(self.state, token, time, divmod(index, columns))
                    self._put(embed, position, number, kind, latent=True)
            else:
                latents = toy_latents(pixels_of(self.run, content, 4))
                time, noise_of_picture = next(noise) if kind == "drawn" else (0.0, None)
                for index, latent in enumerate(squares(latents, 2)):
                    place = divmod(index, latents.shape[2] // 2)
                    shown = latent
                    if noise_of_picture is not None:
                        shown = (1 - time) * latent + time * noise_of_picture[index]
                        self.targets.append((len(self.embeds), noise_of_picture[index] - latent))
                    embed = latent_embedding(self.state, shown, time, place)
                    self._put(embed, position, number, kind, latent=True)
            self._put(self.embed("<|vision_end|>"), position, number, kind)
            position += kind != "drawn"

    def sees(self, one: int, other: int) -> bool:
        if self.part[one] == self.part[other]:
            return self.is_picture[one] or other <= one
        return other < one and not self.is_noise[other]

    def states(self) -> torch.Tensor:
        """(L, H) normed states of the whole row."""
        state, ends = self.state, ["_moe_gen" if latent else "" for latent in self.is_latent]
        count = len(ends)
        x = torch.stack(self.embeds)
        mask = torch.tensor([[self.sees(one, other) for other in range(count)] for one in range(count)])

        def each(make: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([make(x[token], ends[token]) for token in range(count)])

        for layer in range(2):
            own = f"language_model.model.layers.{layer}."

            def heads(name: str, x: torch.Tensor, count: int, own: str = own) -> torch.Tensor:
                made = each(lambda t, end: linear(state, f"{own}self_attn.{name}_proj{end}", t), x).unflatten(
                    1, (count, 8)
                )
                if name == "v":
                    return made
                made = each(lambda t, end: rms(t, state[f"{own}self_attn.{name}_norm{end}.weight"]), made)
                return torch.stack([turned(t, p) for t, p in zip(made, self.positions, strict=True)])

            y = each(lambda t, end, own=own: rms(t, state[f"{own}input_layernorm{end}.weight"]), x)
            q, k, v = heads("q", y, 4), heads("k", y, 2), heads("v", y, 2)
            attended = []
            for head in range(4):
                scores = (q[:, head] @ k[:, head // 2].T / math.sqrt(8)).masked_fill(~mask, -math.inf)
                attended.append(scores.softmax(-1) @ v[:, head // 2])
            y = torch.cat(attended, dim=-1)
            x = x + each(lambda t, end, own=own: linear(state, f"{own}self_attn.o_proj{end}", t), y)

            def mlp(t: torch.Tensor, end: str, own: str = own) -> torch.Tensor:
                t = rms(t, state[f"{own}post_attention_layernorm{end}.weight"])
                gate, up = (linear(state, f"{own}mlp{end}.{name}_proj", t) for name in ("gate", "up"))
                return linear(state, f"{own}mlp{end}.down_proj", F.silu(gate) * up)

            x = x + each(mlp, x)
        return each(lambda t, end: rms(t, state[f"language_model.model.norm{end}.weight"]), x)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ −log p over words, Σ squared error over numbers of latents."""
        states, words, squares_ = self.states(), torch.zeros(()), torch.zeros(())
        for place, follows in self.words:
            logits = linear(self.state, "language_model.lm_head", states[place])
            words = words - logits.log_softmax(-1)[follows]
        for place, target in self.targets:
            squares_ = squares_ + (linear(self.state, "llm2vae", states[place]) - target).square().sum()
        return words, squares_
