"""Hide secrets in whatever is written or shown: commands, environments, events, lines of logs. The one table of them.

    >>> mask_secrets("HF_TOKEN=hf_abcdefghijklmnopqrst python train.py --api-key 0123abcd")
    'HF_TOKEN=(hidden) python train.py --api-key (hidden)'
    >>> mask_command(["train.py", "--hf-token", "two words", "hub.token=abc", "--num-tokens", "512"])
    ['train.py', '--hf-token', '(hidden)', 'hub.token=(hidden)', '--num-tokens', '512']

A secret is recognized by its name or by the form of a service's keys. Only the value is hidden, so that a command stays
readable. Hashes, addresses and numbers are kept, also next to a name such as `num_tokens`: an unreadable log proves
nothing. Limits: secrets with neither a known name nor a known form are not hidden.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from allranks.model.finding import Finding, Verdict
from allranks.model.secret_names import STRONG_NAME, is_secret_name
from allranks.model.setting import Setting

HIDDEN = "(hidden)"

_PATH_NAME = re.compile(r"(?:file|path|dir|name|id)s?$", re.I)
"""Says where a secret is, or what it is called."""
_SWITCH_NAME = re.compile(r"(?:use|no|has|with|is|skip|allow|require)[_-]", re.I)
"""Mostly without a value: the next word is another argument."""
_HARMLESS_NAMES = frozenset(("key", "keys", "token", "tokens"))
"""Of entries of a mapping, or of a vocabulary."""
_PLAIN_VALUE = re.compile(r"""["']?(?:[-+]?[0-9][0-9.,_e+-]{0,40}%?|true|false|none|null)["']?[,)\]}]{0,9}""", re.I)
_MIXED_VALUE = re.compile(r"(?=\D*[0-9])(?=[^A-Za-z]*[A-Za-z])")
_RANDOM_VALUE = re.compile(r"(?=[^\s/]*[0-9])(?=[^\s/]*[A-Za-z])[^\s/]{8,}|\S{32,}")
_BRACKETS = ("[", "(", "{", "<")
_HEAD = len(HIDDEN) + 2
"""Of a value: quotes, and whether it is hidden already."""
_CANNOT_HOLD = re.compile(r"[\w./-]{0,14}", re.ASCII)
"""Shorter than any form, and without a name."""

# NAME=value, NAME="value", --name value, "name": "value", environ["NAME"] = "value".
_NAME = r"[A-Za-z_][\w.-]{0,80}"
_VALUE = re.compile(r"""\\?"[^"]*"?|\\?'[^']*'?|[^\s"'&;]+""")
_NAMED = re.compile(
    rf"""(?:(?<![\w.-])--?(?P<flag>{_NAME})(?:[ \t]*=[ \t]*|[ \t]+(?!-))"""
    rf"""|(?<![\w.-])(?P<name>{_NAME})(?P<sign>=|[ \t]*[:=])[ \t]*(?![=/])"""
    rf"""|\\?(?P<quote>["'])(?P<key>{_NAME})\\?(?P=quote)\]?[ \t]*[:=,][ \t]*)"""
)
_FLAG = re.compile(rf"--?({_NAME})")
_ASSIGNED = re.compile(rf"([-+~]*({_NAME})=)(.*)", re.DOTALL)
"""A word of a command: NAME=value, --name=value, hydra's +a.b.token=value; the value may have blanks."""

# Order matters: the first that fits a place hides it. Forms as the services document them.
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?s)-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?P<value>.*?)(?:(?=-----END)|$)",
        r"(?<=://)[^\s/:@\"']{0,200}:(?P<value>[^\s/\"']+)(?=@)",  # a URL's password
        r"(?i)[?&](?:sig|(?:x-[a-z]{1,8}-)?(?:signature|credential))=(?P<value>[^\s&\"'#]+)",  # a signed URL
        r"(?i)\bbearer[ \t]+(?P<value>(?=\S*[0-9])[A-Za-z0-9._~+/=-]{8,})",
        r"(?i)\bauthorization[\"']?[ \t]*[:=][ \t]*[\"']?(?:basic|token|apikey)[ \t]+(?P<value>[A-Za-z0-9+/=._-]{6,})",
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


def mask_variable(name: str, value: str) -> str:
    """Return the value of a variable of the environment as it may be shown.

    >>> mask_variable("WANDB_API_KEY", "abc"), mask_variable("ALL_PROXY", "http://me:pw@proxy:3128")
    ('(hidden)', 'http://me:(hidden)@proxy:3128')
    """
    is_secret = is_secret_name(name) and (STRONG_NAME.search(name) or not _PLAIN_VALUE.fullmatch(value))
    return HIDDEN if value and is_secret else mask_secrets(value)


def mask_command(words: Iterable[str], env: Mapping[str, str] | None = None) -> list[str]:
    """Return the words of a command as they may be shown: each keeps its place, only values are hidden.

    Args:
        words: a program and its arguments.
        env: its environment; the values of secret variables are hidden wherever they occur.
    """
    values = {value for name, value in (env or {}).items() if len(value) >= 8 and mask_variable(name, value) == HIDDEN}
    longest_first = sorted(values, key=len, reverse=True)  # one may be the beginning of another
    shown: list[str] = []
    flag = ""
    """Name of the option before this word, if its value may be a secret."""
    for word in words:
        for value in longest_first:
            word = word.replace(value, HIDDEN)
        if named := _FLAG.fullmatch(word):
            flag = named[1]
            shown.append(word)
            continue
        is_secret = bool(flag) and _is_secret(flag, word, is_argument=True)
        shown.append(HIDDEN if is_secret else _mask_word(word))
        if not (is_secret and flag.lower().endswith("s")):  # --api-keys takes several
            flag = ""
    return shown


def mask_fields(told: Any) -> Any:
    """Return data as it may be written: in lists of words, in texts, and in entries with a secret's name.

    >>> mask_fields({"command": ["a.py", "--hf-token", "abc"], "env": {"DB_PASSWORD": "abc"}, "pid": 7})
    {'command': ['a.py', '--hf-token', '(hidden)'], 'env': {'DB_PASSWORD': '(hidden)'}, 'pid': 7}
    """
    match told:
        case str():
            return mask_secrets(told)
        case {}:
            return {name: _mask_entry(str(name), value) for name, value in told.items()}
        case [*items]:
            return mask_command(items) if all(isinstance(item, str) for item in items) else [*map(mask_fields, items)]
    return told


def mask_setting(setting: Setting) -> Setting:
    """Return a setting as it may be shown."""
    return replace(setting, value=mask_variable(setting.name, setting.value))


def mask_finding(finding: Finding) -> Finding:
    """Return a finding as it may be written and shown: it quotes lines of logs, and what was started."""
    texts = {
        name: mask_secrets(text) for name in ("message", "fix", "ask", "subject") if (text := getattr(finding, name))
    }
    evidence = tuple(msgspec.structs.replace(shown, seen=mask_secrets(shown.seen)) for shown in finding.evidence)
    return msgspec.structs.replace(finding, **texts, evidence=evidence, notes=tuple(map(mask_secrets, finding.notes)))


def mask_verdict(verdict: Verdict) -> Verdict:
    """Return a verdict as it may be written and shown."""
    return msgspec.structs.replace(verdict, findings=tuple(map(mask_finding, verdict.findings)))


def mask_secrets(text: str) -> str:
    """Return the text with everything that looks like a secret replaced by `(hidden)`."""
    if _CANNOT_HOLD.fullmatch(text):
        return text
    for form in _FORMS:
        text = form.sub(_hide, text)
    parts = []
    done = at = 0
    while named := _NAMED.search(text, at):
        at = named.end()  # of a harmless name: another may stand in the value
        if (found := _find_secret(named)) is not None:
            start, at = found.span()
            parts += [text[done:start], _hide_value(found[0])]
            done = at
    return "".join([*parts, text[done:]])


def _mask_word(word: str) -> str:
    """Return one word of a command; its value may have blanks, quotes, or be JSON."""
    head, value = "", word
    if assigned := _ASSIGNED.fullmatch(word):
        head, name, value = assigned.groups()
        if _is_secret(name, value, is_argument=True):
            return head + HIDDEN
    if value.startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):  # then it is a text
            if (masked := mask_fields(data := json.loads(value))) != data:
                return head + json.dumps(masked, ensure_ascii=False)
    return head + mask_secrets(value)


def _mask_entry(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return HIDDEN if _is_secret(name, value, is_argument=True) else mask_secrets(value)
    if STRONG_NAME.search(name) and isinstance(value, dict | list | int | float) and not isinstance(value, bool):
        return HIDDEN
    return mask_fields(value)


def _hide(match: re.Match[str]) -> str:
    start, end = (at - match.start() for at in match.span("value"))
    return match[0][:start] + HIDDEN + match[0][end:]


def _find_secret(named: re.Match[str]) -> re.Match[str] | None:
    """Return the value after a name, if it is a secret. It is looked at only then: it may be megabytes."""
    name, text = named["flag"] or named["name"] or named["key"], named.string
    head = text[named.end() : named.end() + _HEAD]
    is_of_url = text[max(0, named.start() - 1) : named.start()] in ("?", "&")
    told = {"is_loose": named["sign"] not in (None, "="), "is_argument": is_of_url}
    if not _may_be_secret(name, head, is_argument=is_of_url) or not (value := _VALUE.match(text, named.end())):
        return None
    return value if _is_secret(name, value[0], **told) else None


def _hide_value(value: str) -> str:
    if opening := re.match(r"""\\?["']""", value):
        quote = opening[0]
        after = quote if len(value) >= 2 * len(quote) and value.endswith(quote) else ""
    else:
        quote, after = "", value[len(value.rstrip(",)]}\\")) :]
    return f"{quote}{HIDDEN}{after}"


def _is_secret(name: str, value: str, *, is_loose: bool = False, is_argument: bool = False) -> bool:
    """Whether a value is hidden.

    Args:
        is_loose: `name: value`, which is mostly something else (KeyError: 'layer.3').
        is_argument: it is certain that this is the value of this name: `token` is no entry of a vocabulary then.
    """
    if not value.strip("\\\"'") or not _may_be_secret(name, value, is_argument=is_argument):
        return False
    if STRONG_NAME.search(name) and not _SWITCH_NAME.match(name):
        return True
    last = name.rpartition(".")[2].lower()
    if _PLAIN_VALUE.fullmatch(value):
        return False
    if is_loose and not _MIXED_VALUE.search(value):
        return False
    is_weak = "key" in last or last.endswith("tokens") or _SWITCH_NAME.match(name)
    return not is_weak or bool(_RANDOM_VALUE.fullmatch(value.strip("\\\"',)]}")))


def _may_be_secret(name: str, head: str, *, is_argument: bool) -> bool:
    """Whether a name, and how its value begins, allow that it is one."""
    if not is_secret_name(name) or _PATH_NAME.search(name) or head.lstrip("\\\"'").startswith(HIDDEN):
        return False
    if STRONG_NAME.search(name) and not _SWITCH_NAME.match(name):
        return True
    is_of_mapping = name.rpartition(".")[2].lower() in _HARMLESS_NAMES and not (is_argument or name.isupper())
    return not is_of_mapping and not head.startswith(_BRACKETS)
