"""Takes secrets out of what is written down or shown: passwords, access tokens, keys, cookies and HTTP headers.

Three nets, from the surest to the widest: values under a secret name (`is_secret_name`) or below `headers`; values that
a configuration or an environment variable gave under such a name (`remember_secrets`), wherever they appear; and known
shapes of tokens, passwords in addresses and assignments in text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

REDACTED = "•••"
HEADERS = frozenset({"headers", "extra_headers", "http_headers", "default_headers", "request_headers", "cookies"})
"""Keys that hold secrets by names of their own."""
_OF_DOORS = HEADERS | {"api_key_env", "api_key_header"}
_SECRET_WORDS = frozenset(
    re.findall(
        r"\w+",
        "password passwd passphrase pwd secret secrets cookie authorization bearer credential credentials apikey "
        "accesskey privatekey secretkey authkey accesstoken authtoken apitoken hftoken",
    )
)
"""Last words of names that always hold a secret."""
_BEFORE_TOKEN = frozenset(
    re.findall(
        r"\w+",
        "eos bos pad padding unk sep cls mask image images picture video audio sound img media vision visual start end "
        "begin stop special boi eoi boa eoa bov eov eot bot think im system user assistant next first last per new "
        "text speech prefix suffix placeholder context patch tile row column separator newline extra decoder encoder "
        "target source task class mode time frame object point box ref quad tool latent codec tts forced label answer "
        "question caption prompt",
    )
)
"""Words before `token` that make it an entry of a vocabulary."""
_BEFORE_KEY = frozenset(
    re.findall(
        r"\w+",
        "image images picture video audio media text caption label id row column field prompt answer question dict "
        "primary sort cache query kv state foreign solution response score target source json map group name attention "
        "cross hash index config data sample thinking",
    )
)
"""Words before `key` that make it the name of a column or an entry."""

_NAMES = (
    r"(?:password|passwd|passphrase|secret|cookie|authorization|api[_-]?key|access[_-]?key|private[_-]?key|credentials?"
    r"|(?:access|auth|api|bearer|hf|hub|wandb|github|git)[_-]?token)"
)
_ASSIGNMENT = re.compile(
    rf"""(?ix)
    (?P<key> (?<![\w-]) (?:[\w.-]*[._-])? {_NAMES} | (?<![\w.-]) (?:[\w.-]+\.)? token )
    (?P<sign> ["']? \s* [:=] \s* )
    (?! null\b | ~ )
    (?: "[^"\n]*" | '[^'\n]*' | (?:bearer|basic)\s+[^\s,}}\]#"'&]+ | [^\s,}}\]#"'&]+ )
    """
)
_SHAPES = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
_IN_ADDRESS = re.compile(r"(?:(?<=://)|(?<=ps:/)|(?<=tp:/))[^/\s@\"']+(?=@)")
"""Of an address that became a path, too: there `https://` is `https:/`."""
_IN_QUERY = re.compile(r"(?i)([?&](?:[\w-]*(?:key|token|secret|signature|password)|sig|auth)=)[^&\s\"'#]+")
_SHORTEST = 6
"""Characters of a value that is looked for in texts: shorter ones are part of other words."""

_known: set[str] = set()


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: `key`, `X-Api-Key`, `hfToken`, `token`; not `eos_token`,
    `max_new_tokens`, `image_key`, `api_key_env`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(".", "_").split("_")
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _SECRET_WORDS:
        return True
    if last == "token":
        return before not in _BEFORE_TOKEN
    return last == "key" and before not in _BEFORE_KEY


def remember_secrets(value: object, key: str = "") -> None:
    """Take the secrets of nested values, and a text under a secret key, out of every later text."""
    _known.update(text for text in secrets_in(value, key) if len(text) >= _SHORTEST)


def secrets_in(value: object, key: str = "") -> Iterator[str]:
    """The texts that `redact` would take out whole."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_in(item, _key_of(key, str(name)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, key)
    elif isinstance(value, str) and _hides(key, value) and value != REDACTED:
        yield value
        if rest := value.partition(" ")[2]:  # `Bearer KEY`
            yield rest


def without_secrets(text: str) -> str:
    """The text without the values of secret keys, known secrets, known shapes of tokens and passwords in addresses."""
    for known in sorted(_known, key=len, reverse=True):
        text = text.replace(known, REDACTED)
    text = _ASSIGNMENT.sub(rf"\g<key>\g<sign>{REDACTED}", text)
    return without_passwords(_SHAPES.sub(REDACTED, text))


def without_passwords(text: str) -> str:
    """The text without the passwords and keys that addresses hold."""
    return _IN_QUERY.sub(rf"\g<1>{REDACTED}", _IN_ADDRESS.sub(REDACTED, text))


def redact(value: object, key: str = "") -> Any:
    """Nested dicts and lists without their secrets: values under secret keys whole, other strings as text."""
    hidden = hide(value, key)
    return _cleaned(hidden)


def hide(value: object, key: str = "") -> object:
    """The same, of values under secret keys alone.

    Args:
        value: Dicts and lists of plain values.
        key: The name that it has.
    """
    if isinstance(value, Mapping):
        return {name: hide(item, _key_of(key, str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide(item, key) for item in value]
    if _hides(key, value):
        return REDACTED
    return value


def without_credentials(value: object) -> object:
    """Nested dicts and lists without what only opens a door: two configurations that differ in it alone are the same.
    Left out are secrets, headers, and where keys come from (`api_key_env`, `api_key_header`)."""
    if isinstance(value, Mapping):
        names = [name for name in value if str(name).lower() not in _OF_DOORS and not is_secret_name(str(name))]
        return {name: without_credentials(value[name]) for name in names}
    if isinstance(value, list | tuple):
        return [without_credentials(item) for item in value]
    if isinstance(value, str):
        return without_passwords(value).replace(f"{REDACTED}@", "")
    return value


def is_below_secret(names: Sequence[str]) -> bool:
    """Whether a value is secret that is reached by these names, the outermost first."""
    key = ""
    for name in names:
        key = _key_of(key, name)
    return key.lower() in HEADERS or is_secret_name(key)


def _key_of(holder: str, name: str) -> str:
    """What an entry counts as: everything below `headers`, or below a secret key, is secret."""
    is_below = holder.lower() in HEADERS or is_secret_name(holder)
    if is_below:
        return holder
    return name


def _hides(key: str, value: object) -> bool:
    """Whether a value is secret. What is on or off, or not given, is no secret."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    return key.lower() in HEADERS or is_secret_name(key)


def _cleaned(value: object) -> object:
    if isinstance(value, dict):
        return {name: _cleaned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, str):
        return without_secrets(value)
    return value
