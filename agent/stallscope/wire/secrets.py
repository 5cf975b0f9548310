"""What looks like a secret in a program's own words: values of its environment, words of its command lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

__all__ = ["CUT", "without_secrets", "words_without_secrets"]

CUT = "[cut]"
DECODINGS = 2  # what is written with %XX may hold such a text again
# "me:pw@host"; a URL's user may stand without a password.
_USER = re.compile(r"(?<=://)\S*@|(?<![^\s=,;\"'])[^\s:/@=,;\"']{1,256}:[^\s:/@=,;\"']{1,256}@(?=[\w.\[-])(?!sha256:)")
# A word begins where none stands before: without that, a long one takes time by its square.
_NAME = re.compile(r"(?<![\w.%-])([\w.%-]+)[\"']?\s{0,4}[=:]\s{0,4}")
_VALUE = re.compile(r"(?:(?:bearer|basic)(?:\s|%20){1,4})?(?:\"[^\"]*\"?|'[^']*'?|[^,;&\s\"']+)", re.IGNORECASE)
# Ways to count and to cut text into tokens, and keys of an attention layer, are no secrets.
_SECRET_NAME = re.compile(
    r"(?<!mon)key(?!board|word|s(?![a-z])|[._-]?value)|token(?!i[sz]|s(?![a-z]))|secret|passw|passphrase|credential|cookie|"
    r"signature|jwt|auth(?!or(?:s|ed|ity)?$)|(?<![a-z])(?:pwd?|pass|sig|pat|sas|creds?)(?![a-z]|-through)",
    re.IGNORECASE,
)
_NAME_ALONE = re.compile(r"(?<!\S)(--?[\w.-]{1,64}|[\w.]{1,64})\s{1,4}(?=[^\s=:-])")
# Words that are secrets wherever they stand: of GitHub, GitLab, Slack, AWS, Google, Hugging Face, OpenAI, NVIDIA, npm,
# Grafana, Vault, Dynatrace; a JWT; PEM.
_SECRET_WORD = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:gh[a-z]_|github_pat_|glpat-|xox[a-z]-|xapp-|AIza|ya29\.|hf_|sk-|[sr]k_live_|nvapi-|npm_|gl(?:sa|c)_|"
    r"hv[sb]\.|dt0[cs]01\.|eyJ)[\w.+/=-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|-----BEGIN.*|[Bb](?:earer|asic)(?:\s|%20){1,4}[\w.+/=-]{8,})",
    re.DOTALL,
)


def without_secrets(text: str) -> str:
    """The text with CUT for user and password in a URL, for what stands behind the name of a secret, and for words of a
    form that tokens have; decoded where only that shows one."""
    found = _cut(text)
    decoded = found
    for _ in range(DECODINGS):
        if "%" not in decoded:
            break
        decoded = unquote(decoded)
        if (cut := _cut(decoded)) != decoded:
            found = decoded = cut
    return found


def words_without_secrets(words: Iterable[str]) -> list[str]:
    """The same of a command line, where a value may stand in the word behind its name: `--api-key VALUE`."""
    found: list[str] = []
    is_next = False
    for word in words:
        is_option = word.startswith("-")
        found.append(CUT if is_next and word and not is_option else without_secrets(word))
        is_next = is_option and len(word) <= 64 and "=" not in word and _SECRET_NAME.search(word) is not None
    return found


def _cut(text: str) -> str:
    text = _USER.sub(f"{CUT}@", text)
    text = _without(text, _NAME)
    text = _without(text, _NAME_ALONE)
    return _SECRET_WORD.sub(CUT, text)


def _without(text: str, pattern: re.Pattern[str]) -> str:
    """What stands behind a name that `pattern` finds, if the name is a secret's, is replaced."""
    parts: list[str] = []
    done = at = 0
    while (name := pattern.search(text, at)) is not None:
        at = name.end()
        value = _VALUE.match(text, at) if _SECRET_NAME.search(name[1]) else None
        if value is not None and not text.startswith(CUT, at):
            parts += [text[done:at], CUT]
            done = at = value.end()
    return "".join([*parts, text[done:]])
