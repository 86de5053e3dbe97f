"""`/v1/images/generations` and `/v1/videos/generations`, answered by the engine of a generator."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from anyio import to_thread
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import MadeSample
from mindspeed_mm.fsdp.utils.media_files import image_bytes, video_bytes
from mindspeed_mm.tasks.draw.engine import DrawEngine, DrawJob
from mindspeed_mm.tasks.serve.fields import Names, RequestFields, read_fields, refuse_unsupported
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.serve.waiting import result_of, within_limit


class DrawFields(RequestFields):
    """OpenAI's request for pictures, and what samplers take beside it."""

    prompt: str
    n: Annotated[int, Field(ge=1)] | None = None
    size: Annotated[str, Field(pattern=r"^(auto|\d{1,5}x\d{1,5})$")] | None = None
    response_format: str | None = None
    output_format: Literal["png", "jpeg", "webp", "mp4"] | None = None
    quality: str | None = None
    style: str | None = None
    background: str | None = None
    moderation: str | None = None
    output_compression: int | None = None
    stream: bool | None = None
    partial_images: int | None = None
    negative_prompt: str | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=100, strict=False)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[float, Field(gt=0, le=240, strict=False)] | None = None


_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": ((None, "b64_json"), "Leave it out: samples come as 'b64_json', as nothing is stored here."),
    "quality": ((None, "auto"), "Leave it out, and set 'num_inference_steps' and 'size'."),
    "style": ((None,), "Leave it out, and describe the style in the prompt."),
    "background": ((None, "auto", "opaque"), "Leave it out: pictures are opaque."),
    "moderation": ((None, "auto"), "Leave it out: nothing is moderated here."),
    "output_compression": ((None,), "Leave it out, or choose another 'output_format'."),
    "stream": ((None, False), "Leave it out: samples come whole."),
    "partial_images": ((None, 0), "Leave it out: samples come whole."),
}
_SETTINGS = {"num_inference_steps", "guidance_scale", "num_frames", "fps"}
"""Fields that samplers call the same."""


@dataclass(frozen=True)
class DrawRoutes:
    """What makes pictures and clips."""

    engine: DrawEngine
    limits: Limits
    names: Names
    metrics: Metrics

    async def images(self, request: Request) -> Response:
        """Answer a request for pictures with JSON that holds each as base64. Raises `RefusedError` where the request is
        refused."""
        return await self._draw(request, is_clip=False)

    async def videos(self, request: Request) -> Response:
        """Answer a request for clips with JSON that holds each as base64. Raises `RefusedError` where the request is
        refused."""
        return await self._draw(request, is_clip=True)

    async def _draw(self, request: Request, *, is_clip: bool) -> Response:
        async with within_limit(self.limits):
            fields = read_fields(await request.body(), DrawFields)
            refuse_unsupported(fields, _WITHOUT_EFFECT)
            self.names.check(fields.model)
            jobs = await to_thread.run_sync(self._jobs, fields, is_clip)
            try:
                futures = [self.engine.submit(job) for job in jobs]
            except RuntimeError as error:
                raise RefusedError(503, "the server is ending.", code="ending") from error
            try:
                samples = [await result_of(future, request, lambda: None) for future in futures]
            finally:
                for future in futures:
                    future.cancel()
            data = await to_thread.run_sync(self._encoded, samples, jobs, fields.output_format or "png")
        self.metrics.count("samples", "Pictures and clips made.", len(samples))
        return JSONResponse({"created": int(time.time()), "data": data})

    def _jobs(self, fields: DrawFields, is_clip: bool) -> list[DrawJob]:
        self._check_amounts(fields)
        asked = fields.model_dump(include=_SETTINGS, exclude_none=True)
        if fields.size not in (None, "auto"):
            asked["width"], asked["height"] = map(int, str(fields.size).split("x"))
        sampling = self.engine.defaults.model_copy(update={"num_samples": fields.n or 1, **asked})
        seed = fields.seed
        if seed in (None, -1):
            seed = int.from_bytes(np.random.bytes(7), "little")  # 56 bits: below the largest seed
        prompt = Prompt(0, fields.prompt, "request", negative_prompt=fields.negative_prompt, seed=seed)
        try:
            jobs = self.engine.jobs(prompt, sampling)
        except MMError as error:
            problem = error.problems[0]
            raise RefusedError(400, f"{problem.what.rstrip('.')}. {problem.way_out}", code="invalid_value") from error
        size = jobs[0].sampling
        frames, pixels = size.num_frames or 1, (size.height or 0) * (size.width or 0)
        self.limits.check("max_pixels", pixels, f"a sample has {pixels:,} pixels")
        self.limits.check("max_frames", frames, f"a clip has {frames:,} frames")
        if (frames > 1) != is_clip:
            right = "videos" if frames > 1 else "images"
            raise RefusedError(404, f"this model answers /v1/{right}/generations.", code="wrong_route")
        if fields.output_format is not None and (fields.output_format == "mp4") != is_clip:
            right = "mp4" if is_clip else "png, jpeg or webp"
            message = f"'output_format': '{fields.output_format}' does not fit: {right}."
            raise RefusedError(400, message, param="output_format", code="invalid_value")
        return jobs

    def _check_amounts(self, fields: DrawFields) -> None:
        steps, samples = fields.num_inference_steps or 1, fields.n or 1
        characters = len(fields.prompt) + len(fields.negative_prompt or "")
        self.limits.check("max_samples", samples, f"{samples} samples are asked for")
        self.limits.check("max_steps", steps, f"{steps} denoising steps are asked for")
        self.limits.check("max_characters", characters, f"the request has {characters:,} characters of text")

    def _encoded(self, samples: list[MadeSample], jobs: list[DrawJob], kind: str) -> list[dict[str, str]]:
        found = []
        for each, job in zip(samples, jobs, strict=True):
            if len(each.frames) == 1:
                file = image_bytes(each.frames[0], kind)
            else:
                assert job.sampling.fps
                file = video_bytes(each.frames, job.sampling.fps, sound=each.sound)
            found.append({"b64_json": base64.b64encode(file).decode()})
        return found
