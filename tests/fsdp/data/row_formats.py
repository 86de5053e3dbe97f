"""One conversation in the row formats of other tools, written as their documents and readers have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUESTION, ANSWER, WORSE = "Which digit is this?", "A seven.", "A one."
PICTURE = "a.png"
Row = dict[str, Any]


def marked(media: bool, text: str = QUESTION) -> str:
    return f"<image>{text}" if media else text


def turn(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def said(who: str, value: Any, **more: Any) -> Row:
    return {"from": who, "value": value, **more}


def parts(media: bool, medium: Row, text: str = "text") -> list[Row]:
    return [*([medium] if media else []), {"type": "text", text: QUESTION}]


def with_images(media: bool, **row: Any) -> Row:
    return {**row, "images": [PICTURE]} if media else row


@dataclass(frozen=True)
class Format:
    """A format: how its rows look, and what each method makes of them."""

    row: Callable[[bool], Row]
    """Without or with a picture → a row."""
    sft: str = ""
    """Why supervised training refuses the rows; empty: it reads question and answer."""
    dpo: str = "the field is missing"
    """The same for pairs."""
    grpo: str = ""
    """The same for prompts, which have the question alone."""
    turns: str = "user assistant"
    """Roles of the conversation."""
    system: str = ""
    unread: tuple[str, ...] = ()
    """What supervised training reports."""


def llava(media: bool) -> Row:
    row = {"id": "000", "conversations": [said("human", marked(media)), said("gpt", ANSWER)]}
    return {**row, "image": PICTURE} if media else row


def qa_pairs(media: bool) -> Row:
    exchange = {"human": marked(media), "assistant": ANSWER}
    return with_images(media, system="Be brief.", conversation=[exchange])


def tools(media: bool) -> Row:
    turns = [said("human", marked(media)), said("function_call", '{"name": "look", "arguments": {}}')]
    turns += [said("observation", "7"), said("gpt", ANSWER)]
    return with_images(media, conversations=turns, tools='[{"name": "look", "parameters": {}}]')


def v1(media: bool) -> Row:
    asked = parts(media, {"type": "image_url", "value": PICTURE}, "value")
    answer = [{"type": "text", "value": ANSWER}]
    return {"messages": [turn("user", asked, loss_weight=0.0), turn("assistant", answer, loss_weight=1.0)]}


def deepseek(media: bool) -> Row:
    """Of DeepSeek-VL2, whose turns list their pictures themselves."""
    own = {"images": [PICTURE]} if media else {}
    return {"id": 0, "conversations": [turn("<|User|>", marked(media), **own), turn("<|Assistant|>", ANSWER)]}


def openai(media: bool) -> Row:
    asked = parts(media, {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}})
    return {"messages": [turn("user", asked), turn("assistant", ANSWER)]}


def hugging_face(media: bool) -> Row:
    asked = parts(media, {"type": "image", "path": PICTURE, "text": None})
    return {"messages": [turn("user", asked), turn("assistant", [{"type": "text", "text": ANSWER}])]}


def verl(media: bool) -> Row:
    return with_images(
        media,
        data_source="digits",
        prompt=[turn("user", marked(media))],
        ability="sight",
        reward_model={"style": "rule", "ground_truth": "7"},
        extra_info={"split": "train", "index": 0},
    )


NO_ANSWER = "holds a question, and nothing answers it"
NO_TURN = "no trainable token"
A_PAIR = "holds a preference pair and no answer of its own"
PAIR = {"chosen": ANSWER, "rejected": WORSE}
FORMATS: dict[str, Format] = {
    "LLaVA": Format(llava),
    "ShareGPT, question and answer": Format(qa_pairs, turns="system user assistant", system="Be brief."),
    "messages": Format(lambda m: with_images(m, messages=[turn("user", marked(m)), turn("assistant", ANSWER)])),
    "turns with pictures": Format(deepseek),
    "OpenAI parts": Format(openai),
    "Hugging Face parts": Format(hugging_face),
    "LLaMA-Factory v1 parts": Format(v1),
    "tools": Format(tools, turns="user assistant tool assistant"),
    "Alpaca": Format(lambda m: with_images(m, instruction=marked(m), input="", output=ANSWER)),
    "query and response": Format(lambda m: with_images(m, query=marked(m), response=ANSWER)),
    "prompt and completion": Format(lambda m: with_images(m, prompt=marked(m), completion=ANSWER)),
    "prompt and completion in turns": Format(
        lambda m: with_images(m, prompt=[turn("user", marked(m))], completion=[turn("assistant", ANSWER)])
    ),
    "question and answer": Format(lambda m: with_images(m, question=marked(m), answer=ANSWER)),
    "document": Format(
        lambda m: with_images(m, text=ANSWER), turns="", dpo="the field is missing", grpo="asks nothing"
    ),
    "verl": Format(verl, sft=NO_ANSWER),
    "prompts": Format(lambda m: with_images(m, prompt=marked(m), solution_of="7"), sft=NO_ANSWER),
    "messages and rejected_response": Format(
        lambda m: with_images(
            m, messages=[turn("user", marked(m)), turn("assistant", ANSWER)], rejected_response=WORSE
        ),
        dpo="",
        unread=("column 'rejected_response'",),
    ),
    "messages and rejected_messages": Format(
        lambda m: with_images(
            m,
            messages=[turn("user", marked(m)), turn("assistant", ANSWER)],
            rejected_messages=[turn("user", marked(m)), turn("assistant", WORSE)],
        ),
        dpo="",
        unread=("column 'rejected_messages'",),
    ),
    "LLaMA-Factory pairs": Format(
        lambda m: with_images(
            m, conversations=[said("human", marked(m))], chosen=said("gpt", ANSWER), rejected=said("gpt", WORSE)
        ),
        sft=NO_TURN,
        dpo="",
    ),
    "TRL pairs": Format(
        lambda m: with_images(
            m,
            prompt=[turn("user", marked(m))],
            chosen=[turn("assistant", ANSWER)],
            rejected=[turn("assistant", WORSE)],
        ),
        sft=A_PAIR,
        dpo="",
    ),
    "TRL pairs of conversations": Format(
        lambda m: with_images(
            m,
            chosen=[turn("user", marked(m)), turn("assistant", ANSWER)],
            rejected=[turn("user", marked(m)), turn("assistant", WORSE)],
        ),
        sft=A_PAIR,
        dpo="",
        grpo="no row format fits|preference pair",
    ),
    "hh-rlhf": Format(
        lambda m: with_images(
            m,
            chosen=f"\n\nHuman: {marked(m)}\n\nAssistant: {ANSWER}",
            rejected=f"\n\nHuman: {marked(m)}\n\nAssistant: {WORSE}",
        ),
        sft=A_PAIR,
        dpo="",
        grpo="no row format fits|preference pair",
    ),
    "RLAIF-V": Format(lambda m: with_images(m, question=marked(m), **PAIR), sft=A_PAIR, dpo=""),
}
"""Name → a format of rows."""
