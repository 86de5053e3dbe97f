"""A vision-language model as the judge, behind a server of OpenAI's interface (`mm serve`, vLLM, SGLang)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.core.outbound import OutboundError, key_header
from mindspeed_mm.fsdp.posttrain_rewards.http import (
    AskedModel,
    OnFailure,
    picture_as_base64,
    reward_server,
    skips_failures,
)
from mindspeed_mm.fsdp.posttrain_rewards.pictures import frames_of
from mindspeed_mm.fsdp.posttrain_rewards.registry import KEY, Row, reward_register

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_INSTRUCTION = (
    "How well does what follows fit this request? Request: {prompt}\nAnswer with one number from 0 (not at all) to "
    "{most} (perfectly), and nothing else."
)


@reward_register.register("vlm_judge")
class VlmJudge:
    """The number that the model answers with, by the largest that it may: 0 to 1; null where it names none.

    Args:
        url: Of the server, up to `/v1`.
        model: Its name there.
        instruction: With `{prompt}` and `{most}`; the picture, the frames of a clip or the answer follow it.
        most: The largest number.
        api_key_env: Name of the environment variable that holds the key of the server.
        frames: Frames of a clip that are shown, evenly spread.
        timeout_s: For one request.
        retries: After a request that failed.
        concurrency: Requests under way at a time.
        on_failure: `error` ends the run, `skip` leaves the sample unjudged.
    """

    def __init__(
        self,
        url: str,
        model: str,
        instruction: str = _INSTRUCTION,
        most: float = 10,
        api_key_env: str | None = None,
        frames: int = 4,
        timeout_s: float = 60.0,
        retries: int = 3,
        concurrency: int = 8,
        on_failure: OnFailure = "error",
    ) -> None:
        key = key_header(api_key_env, f"{KEY}.settings.api_key_env")
        self._server = reward_server(url, timeout_s, key, "vlm_judge")
        self._judge = AskedModel(self._server, model, retries)
        self._instruction, self._most, self._frames = instruction, most, frames
        self._concurrency, self._skips = concurrency, skips_failures(on_failure)

    def check_server(self) -> None:
        """Raise `MachineError` where the server is not there, and is needed."""
        if not self._skips:
            self._server.check()

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[object], rows: Sequence[Row]
    ) -> list[float | None]:
        """One score a sample, in order.

        Raises:
            OutboundError: The server cannot be reached, is too slow or answers with something else.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(self._score, prompts, completions))

    def _score(self, prompt: str, completion: object) -> float | None:
        words = self._instruction.replace("{prompt}", prompt).replace("{most}", f"{self._most:g}")
        shown = [{"type": "text", "text": words}, *self._shown(completion)]
        try:
            answer = self._judge.answer(shown)
        except OutboundError:
            if self._skips:
                return None
            raise
        number = _NUMBER.search(answer)
        value = float(number[0]) / self._most if number else None
        if value is not None and value <= 1:
            return value
        return None

    def _shown(self, completion: object) -> list[JsonMapping]:
        if isinstance(completion, str):
            return [{"type": "text", "text": completion}]
        frames = frames_of(completion, self._frames)
        uris = [f"data:image/png;base64,{picture_as_base64(frame)}" for frame in frames]
        return [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
