"""The command `mm models`: lists the families of models and what is proven of each."""

from __future__ import annotations

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.tasks.models import catalogue
from mindspeed_mm.tasks.requests.look import ModelsRequest

EXAMPLES = """
\b
Examples:
  mm models
  mm models qwen3vl
  mm models models/Qwen3-VL-2B-Instruct
"""


@click.command(epilog=EXAMPLES)
@takes(ModelsRequest)
def command(request: ModelsRequest) -> None:
    """List the families of models, or show what is known of one.

    NAME is a family, a model_id, a class, a name on the hub or a model's folder. A family shows its released sizes with
    what one device trains of each, the smallest YAML, the names of its parts and layers, and example files. A model of
    transformers that is not listed trains by its class alone.
    """
    cards = catalogue.find(request.name) if request.name else families()
    if request.as_json:
        say_json(list(map(catalogue.as_record, cards)), indent=2)
    elif request.as_markdown:
        say(catalogue.as_markdown(cards))
    elif request.name and request.proof:
        say("\n\n".join(catalogue.as_proof(card) for card in cards))
    elif request.name:
        say("\n\n".join(catalogue.as_card(card) for card in cards))
    else:
        say(catalogue.as_text(cards))
