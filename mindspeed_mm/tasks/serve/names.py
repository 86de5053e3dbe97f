"""The names that requests call the model by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.tasks.serve.limits import RefusedError


@dataclass(frozen=True)
class Names:
    """The model's name, and those of its adapters; a request that gives none means the model without."""

    shown: str
    adapters: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    """What it answers: of `chat`, `transcriptions`, `images`, `videos` and `speech`."""
    voices: tuple[str, ...] = ()
    """That requests for speech may name."""
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, asked: str) -> None:
        """Raise when a request names another model.

        Raises:
            RefusedError: With the name of this one.
        """
        self.chosen(asked)

    def chosen(self, asked: str) -> str | None:
        """The adapters that a request names; None: none.

        Raises:
            RefusedError: It names another model.
        """
        if asked in ("", self.shown):
            return None
        if asked in self.adapters:
            return asked
        known = ", ".join(f"'{name}'" for name in (self.shown, *self.adapters))
        message = f"there is no model '{asked[:100]}' here, only {known}."
        raise RefusedError(404, message, param="model", code="model_not_found")

    def listed(self) -> list[dict[str, Any]]:
        """Return an entry of `/v1/models` for the model and for each of its adapters."""
        facts = {"object": "model", "created": self.created, "owned_by": "mindspeed-mm", "routes": list(self.routes)}
        if self.voices:
            facts["voices"] = list(self.voices)
        return [{"id": name, **facts} for name in (self.shown, *self.adapters)]
