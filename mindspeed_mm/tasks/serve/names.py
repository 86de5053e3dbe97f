"""The names that requests call the model by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.tasks.serve.limits import RefusedError


@dataclass(frozen=True)
class Names:
    """The model's name; a request that gives none means it."""

    shown: str
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, asked: str) -> None:
        """Raise when a request names another model.

        Raises:
            RefusedError: With the name of this one.
        """
        if asked not in ("", self.shown):
            message = f"there is no model '{asked[:100]}' here, only '{self.shown}'."
            raise RefusedError(404, message, param="model", code="model_not_found")

    def listed(self) -> list[dict[str, Any]]:
        """As `/v1/models` lists them."""
        return [{"id": self.shown, "object": "model", "created": self.created, "owned_by": "mindspeed-mm"}]
