"""What `mm chat` is asked: a model to talk to, here or behind a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.request import Request, argument, option
from mindspeed_mm.core.seeds import MOST_SEED
from mindspeed_mm.tasks.requests.shared import checkpoint_option, plugin_option

_OF_SERVERS = ("name", "key_file")
_OF_FOLDERS = ("lora", "config", "plugins")


@dataclass(frozen=True)
class ChatRequest(Request):
    """A model, and how it is talked to."""

    model: str = argument()
    images: tuple[Path, ...] = option("Picture that is sent with the first message.", (), flag="--image")
    videos: tuple[Path, ...] = option("Video that is sent with the first message.", (), flag="--video")
    audios: tuple[Path, ...] = option("Audio file that is sent with the first message.", (), flag="--audio")
    system: str = option("System prompt; default: that of the model's chat template.", "")
    max_new_tokens: int | None = option(
        "Maximum length of an answer in tokens. [default: 512, or the server's]", least=1
    )
    temperature: float | None = option(
        "Sampling temperature; 0 is greedy. Default: that of the model's generation_config.json.", least=0
    )
    top_p: float | None = option(
        "Sample from the most likely tokens whose probabilities add up to this; default: generation_config.json.",
        above=0,
        most=1,
    )
    seed: int | None = option("Seed of each answer; default: a new one each time.", least=0, most=MOST_SEED)
    lora: Path | None = option("Folder of adapters to apply to the weights.")
    config: Path | None = option("YAML whose data section sets the chat template and media sizes; default: the run's.")
    name: str = option("Name of a server's model to talk to; default: the first one listed.", "")
    key_file: Path | None = option("File with the API key of a server.")
    as_json: bool = option("Print each answer as a line of JSON, once it is complete.", False, flag="--json")
    plugins: tuple[str, ...] = plugin_option()
    checkpoint: str | None = checkpoint_option()

    def check_for_server(self) -> None:
        """Raise `UsageError` for an option that only a model which is loaded here takes."""
        self._refuse(_OF_FOLDERS, "is for models that are loaded here, and a server has loaded its own")

    def check_for_folder(self) -> None:
        """Raise `UsageError` for an option that only a server takes."""
        self._refuse(_OF_SERVERS, "is for servers")

    def check_choice(self) -> None:
        """Raise `UsageError` where options of sampling contradict one another."""
        if self.temperature == 0 and self.top_p is not None:
            raise UsageError("does nothing with --temperature 0", key="--top-p", way_out="Leave one of them out.")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, name):
                raise UsageError(why, key=f"--{name.replace('_', '-')}", way_out="Leave it out.")
