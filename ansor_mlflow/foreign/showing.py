"""How text from elsewhere is shown: without credentials and without control characters."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote, unquote

_HIDDEN = "…"
_KEY = (
    r"(?:(?:passw(?:or)?d|passphrase|pwd|secret)[\w.-]{0,40}|token|connection[_-]?string"
    r"|(?:api|access|account|private|storage|encryption)[_-]?key(?:[_-]?id)?)"
)
"""How names of secrets end, or go on; `tokens`, `token_type_ids` and `rpc_key` are none."""
_OF_A_QUERY = r"(?:user(?:name)?|uid|key|code|sig|signature|auth|jwt|x-amz-[\w-]+|odbc_connect)"
"""Names that are those of credentials in a query, and ordinary words elsewhere."""
_DATABASE = r"\b(?:postgres(?:ql)?|mysql|mariadb|mssql|oracle|sqlite|cockroachdb|snowflake|redshift)(?:\+\w+)?"

_LONGEST = 9000  # characters of a password, as databases take tokens; where it ends, the next URI begins at the latest
_USER = r"[^\s:/]{0,200}:"  # with "@", as in the user@server of Azure
_USER_INFO = (
    # a database's user and password, as SQLAlchemy reads them: with blanks, and the latter with "/"
    re.compile(rf"(?i)({_DATABASE}://)[^\n:/]{{0,200}}:(?:(?!://)[^\n]){{0,{_LONGEST}}}@"),
    # as urllib reads it, if it is no port that is meant, of a host that the sentence goes on behind
    re.compile(rf"(://){_USER}(?!\d{{1,5}}(?:[/?#]|\W*\s|\W*$))(?! )(?:(?!://)[^\n\"'`]){{0,{_LONGEST}}}@"),
    re.compile(rf"(://){_USER}(?:(?!://)\S){{0,{_LONGEST}}}@"),
    re.compile(rf"(://)[^\s/]{{1,{_LONGEST}}}@"),
)
_QUOTED = re.compile(rf"""(?ix)({_KEY}["']\s*:\s*)(["'])(?:\\.|(?!\2).)*""")
"""A secret as JSON and Python's dictionaries print it: a quoted text behind its name."""
_QUOTED_VALUE = re.compile(rf"""(?i)({_KEY}\s*[=:]\s*)(["'])(?:\\.|(?!\2).)+""")
_NAMED = re.compile(
    rf"(?i)((?:{_KEY}|[?&]{_OF_A_QUERY}|X-Amz-(?:Signature|Credential)|\bCredential)(?:\s?=\s?|%3D)"
    rf"|{_KEY}:\s*|--[\w-]*{_KEY}\s+|[,?& ]Signature=(?=\S{{16}}))([^\s&]+)"
)
_HEADER = re.compile(r"""(?i)((?:authorization|cookie)["']?\s*[:=]\s*)(?:(["'])(?:(?!\2).)+|[^\s"'][^\n]*)""")
_BEARER = re.compile(r"\b(Bearer\s+)[\w.~+/=-]{8,}")
_ELEMENT = re.compile(
    r"(<\w*(?:AccessKeyId|SignatureProvided|StringToSign\w*|CanonicalRequest\w*|Token|Secret\w*)>)[^<]+"
)
_SHAPED = re.compile(r"\b(?:A[KS]IA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)")
"""Key IDs of AWS, and JSON web tokens."""

_OF_ENVIRONMENT = re.compile(
    r"(?i)(?:password|passwd|passphrase|_pwd|_pass|secret|token|[a-z]_?key|connection_string)$"
)
_MIN_CHARS = 6  # length from which the value of a variable is looked for in other texts
_ORDINARY = {"ansor", "mlflow", "ansor_mlflow", "ansor-mlflow", "password", "postgres", "secret", "tracking"}
"""Passwords that would hide half of a message."""


def without_credentials(text: str) -> str:
    """Hides the credentials in a text: those of URIs and queries, of headers, and what the environment keeps secret."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, _HIDDEN)
    for pattern in _USER_INFO:
        text = pattern.sub(rf"\1{_HIDDEN}@", text)
    for pattern in (_QUOTED, _QUOTED_VALUE):
        text = pattern.sub(rf"\1\2{_HIDDEN}", text)
    text = _HEADER.sub(lambda found: f"{found[1]}{found[2] or ''}{_HIDDEN}", text)
    text = _NAMED.sub(_without_value, text)
    for pattern in (_BEARER, _ELEMENT):
        text = pattern.sub(rf"\1{_HIDDEN}", text)
    return _SHAPED.sub(_HIDDEN, text)


def _without_value(found: re.Match[str]) -> str:
    """The name alone, and what closes a sentence or a quotation behind its value."""
    name, value = found.groups()
    closing = value[len(value.rstrip(")]}>\"'`,;.:")) :]
    return found[0] if value == closing else f"{name}{_HIDDEN}{closing}"


def _secrets_of_environment() -> list[str]:
    """The values of variables that are called secret, and the passwords in those that are URIs; the longest first."""
    names = list(os.environ)  # MLflow's telemetry removes a variable from its own thread
    found = {secret for name in names for secret in _secrets_of(name, os.environ.get(name, ""))}
    spelled = {form for secret in found for form in (secret, quote(secret), quote(secret, safe=""), unquote(secret))}
    return sorted((s for s in spelled if len(s) >= _MIN_CHARS and s.lower() not in _ORDINARY), key=len, reverse=True)


def _secrets_of(name: str, value: str) -> Iterator[str]:
    if _OF_ENVIRONMENT.search(name):
        yield value
    scheme, is_uri, rest = value.partition("://")
    if not is_uri or not scheme.replace("+", "").isalnum():
        return
    user_info, at, _ = rest.rpartition("@")
    if at and ":" in user_info:
        yield user_info.partition(":")[2]
    for key, secret in parse_qsl(rest.partition("?")[2]):
        if re.search(rf"(?i){_KEY}$|^sig$", key):
            yield secret


_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
"""What moves a terminal's cursor, changes its colours or the order of letters, or is not seen; and half characters."""


def printable(text: str) -> str:
    """A text from anywhere for a terminal, a log or a page: without credentials, control characters as escapes."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), without_credentials(text))


def printable_line(text: str) -> str:
    """A text as `printable` makes it, on one line."""
    return printable(" ".join(text.split("\n")))


def printable_json(text: str) -> str:
    """JSON with what moves a terminal's cursor as escapes of JSON, which mean the same."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PrintableFormatter(logging.Formatter):
    """Formats what is logged as `printable`, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def for_shell(text: str, variable: str) -> str:
    """A word of a command line. One with credentials is left to an environment variable that has, or is to have, this
    text, and without which the shell says what to do.
    """
    if without_credentials(text) == text:
        return shlex.quote(text)
    return f'"${{{variable}:?is to have it, with its credentials}}"'
