"""Hide texts in logs that look like secrets.

    >>> mask_secrets("HF_TOKEN=hf_abcdefghijklmnopqrst python train.py --api-key 0123abcd")
    'HF_TOKEN=(hidden) python train.py --api-key (hidden)'

A secret is recognized by its name (report/rundir.py) or by the form of a service's keys. Hashes, addresses and numbers
are kept, also next to a name such as `num_tokens`: an unreadable log proves nothing. Limits: secrets with neither a
known name nor a known form, and secrets of several lines, are not hidden.
"""

from __future__ import annotations

import re

from allranks.report.rundir import is_secret_name

HIDDEN = "(hidden)"

# NAME=value, NAME="value", --name value, "name": "value", environ["NAME"] = "value".
_NAME = r"[A-Za-z_][\w.-]{0,80}"
_VALUE = r"""(?P<value>\\?"[^"]*"?|\\?'[^']*'?|[^\s"'&;]+)"""
_NAMED = re.compile(
    rf"""(?:(?<![\w.-])--?(?P<flag>{_NAME})(?:[ \t]*=[ \t]*|[ \t]+(?!-))"""
    rf"""|(?<![\w.-])(?P<name>{_NAME})(?P<sign>=|[ \t]*[:=])[ \t]*(?![=/])"""
    rf"""|\\?(?P<quote>["'])(?P<key>{_NAME})\\?(?P=quote)\]?[ \t]*[:=,][ \t]*){_VALUE}"""
)
_HARMLESS_NAME = re.compile(
    r"tokeniz|keyword|keyerror|keyboard|keypoint|monkey|key_padding|token_(?:id|type|ids|mask)", re.I
)
_HARMLESS_NAMES = frozenset(("key", "keys", "token", "tokens"))
"""Of entries of a mapping, or of a vocabulary."""
_STRONG_NAME = re.compile(r"secret|passw|credential", re.I)
_PLAIN_VALUE = re.compile(r"""["']?(?:[-+]?[0-9][0-9.,_e+-]*%?|true|false|none|null)["']?[,)\]}]*""", re.I)
_BRACKETS = ("[", "(", "{", "<")

# Order matters: the first that fits a place hides it. Forms as the services document them.
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=://)[^\s/:@\"']{0,200}:(?P<value>[^\s/@\"']+)(?=@)",  # a URL's password
        r"(?i)\bbearer[ \t]+(?P<value>(?=\S*[0-9])[A-Za-z0-9._~+/=-]{8,})",
        r"(?i)\bauthorization[\"']?[ \t]*[:=][ \t]*[\"']?basic[ \t]+(?P<value>[A-Za-z0-9+/=]{6,})",
        r"(?<![A-Za-z0-9])(?P<value>hf_[A-Za-z0-9]{16,})",  # Hugging Face
        r"(?<![A-Za-z0-9_-])(?P<value>sk-(?=[\w-]*[0-9])[A-Za-z0-9_-]{16,})",  # OpenAI, Anthropic
        r"(?<![A-Za-z0-9])(?P<value>gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,})",
        r"(?<![A-Za-z0-9])(?P<value>xox[abprs]-[A-Za-z0-9-]{10,})",  # Slack
        r"(?<![A-Za-z0-9])(?P<value>(?:AKIA|ASIA)[0-9A-Z]{16})(?![0-9A-Za-z])",  # AWS
        r"(?<![A-Za-z0-9])(?P<value>AIza[\w-]{35})(?![\w-])",  # Google
        r"(?<![\w-])(?P<value>eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)",  # JSON web tokens
        r"(?i)api[ _-]?key\W{1,6}(?:is\W{1,3})?(?P<value>[0-9a-f]{40})(?![0-9a-f])",  # Weights & Biases
        r"(?i)wandb[ \t]+login[ \t]+(?:--relogin[ \t]+)?(?P<value>[0-9a-f]{40})(?![0-9a-f])",
    )
)


def mask_secrets(text: str) -> str:
    """Return the text with everything that looks like a secret replaced by `(hidden)`."""
    for form in _FORMS:
        text = form.sub(_hide, text)
    parts = []
    done = at = 0
    while match := _NAMED.search(text, at):
        at = match.start("value")  # of a harmless name: another may stand in the value
        if hidden := _hide_value(match):
            parts += [text[done:at], hidden]
            done = at = match.end()
    return "".join([*parts, text[done:]])


def _hide(match: re.Match[str]) -> str:
    start, end = (at - match.start() for at in match.span("value"))
    return match[0][:start] + HIDDEN + match[0][end:]


def _hide_value(match: re.Match[str]) -> str | None:
    """Return the replacement of a value; None if it is not a secret."""
    name, value = match["flag"] or match["name"] or match["key"], match["value"]
    if not _is_secret(name, value, is_loose=match["sign"] not in (None, "=")):
        return None
    if opening := re.match(r"""\\?["']""", value):
        quote = opening[0]
        after = quote if len(value) >= 2 * len(quote) and value.endswith(quote) else ""
    else:
        quote, after = "", value[len(value.rstrip(",)]}\\")) :]
    return f"{quote}{HIDDEN}{after}"


def _is_secret(name: str, value: str, *, is_loose: bool) -> bool:
    """Whether a value is hidden; `is_loose`: `name: value`, which is mostly something else (KeyError: 'layer.3')."""
    if not is_secret_name(name) or not value.strip("\\\"'") or HIDDEN in value:
        return False
    if _STRONG_NAME.search(name):
        return True
    if name.lower() in _HARMLESS_NAMES or _HARMLESS_NAME.search(name):
        return False
    if is_loose and not re.search(r"[A-Za-z][^\s]*[0-9]|[0-9][^\s]*[A-Za-z]", value):
        return False
    return not _PLAIN_VALUE.fullmatch(value) and not value.startswith(_BRACKETS)
