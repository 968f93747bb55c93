"""PURE: hides secrets in text that will be shown to people: exceptions, tracebacks, URLs.

Runs in: every process. Needs: nothing. Thread-safe.

What is hidden is what carries its own sign: the password in a URL, the value behind a name such as
``password`` or ``Authorization``, a private key. A bare value (``hunter2`` in the middle of a
sentence) cannot be told from text, and ``--password hunter2``, without a sign between the two, is
not recognised either. In doubt more is hidden, not less: ``password_file=/etc/app/pw`` loses its
path.

Every pattern below takes time linear in the text, as it runs on whatever a failing actor raised.
That rests on two rules. No pattern begins with something of open length, so no stretch of text is
looked at anew from each of its characters. And an open-ended part either cannot fail any more, or
ends at the very sign with which the next attempt begins.
"""

from __future__ import annotations

import re

MASK = "***"

# user:password@ in a URL. A password ends at the last @ before the path. One with a slash, ? or #
# that somebody forgot to quote has no @ there, so it ends at the first one after. But in
# http://host:8080/a@b the number is a port.
_URL = re.compile(
    r"""
    ( :// [^\s/?\#:@\[\]"'<>]* : )
    (?! \d{1,5} (?: [/?\#] | $ ) )
    (?:   [^\s/?\#"'<>]+
      |   [^\s/?\#@"'<>]* (?: (?: /(?!/) | [?\#] ) [^\s/?\#@"'<>]* )+
    )
    (?=@)
    """,
    re.VERBOSE,
)

# In one piece, or as the lines of an exception group with their "|" at the margin.
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)[A-Za-z0-9+/=\s\\|]+")

# Shorter words are prose ("Bearer authentication failed").
_BEARER = re.compile(r"\b([Bb]earer[ \t]{1,4})[A-Za-z0-9._~+/=-]{20,}")

# The rest of the name that holds a secret word: password_hash, secretKey, token2; not tokens, tokenizer.
_NAME_GOES_ON = r"(?: [_.-]\w{0,40} | (?<=[a-z])[A-Z]\w{0,40} | \d{1,3} )?"

# What ends a quoted name, and a sign: password=, "password": , \"password\":, environ["PASSWORD"] =
_SIGN = r"""\\{0,3} ["']? \]? [ \t]{0,8} (?: => | :=? (?!//|:) | ={1,2} ) [ \t]{0,8}"""

# Worth seeing when looking for a mistake, and no secret: nothing, a switch, a type.
_HARMLESS = r"""(?: None | null | [Tt]rue | [Ff]alse | str | bytes | "" | '' ) (?: [\s,;&)\]}] | $ )"""

# In quotes; what was cut off inside them goes on to the end of the line. The last two are quotes
# within a quoted text, as in the repr of a JSON document.
_QUOTED = r"""
    [bru]{0,2} (?:
        " [^"\\\r\n]* (?: \\. [^"\\\r\n]* )* "?
      | ' [^'\\\r\n]* (?: \\. [^'\\\r\n]* )* '?
      | \\{1,3}" [^"\r\n]* "?
      | \\{1,3}' [^'\r\n]* '?
    )
"""
# Passwords may hold a comma or semicolon, so only one before white space, the end or a next name ends them.
_BARE = r"""[^\s,;&]* (?: [,;&] (?! \s | $ | ["']?[\w.-]{1,64}["']?[ ]?[=:] ) [^\s,;&]* )*"""
_IN_BRACKETS = rf"[\[({{] [^\])}}\r\n]* [\])}}]? {_BARE}"

_PAIR = re.compile(
    rf"""
    ( (?i: passwords? | passwd | passphrase | pwd | secrets? | token | credentials?
         | (?:api|access|private)[_.-]?key | sess(?:ion)?[_.-]?id )
      {_NAME_GOES_ON} {_SIGN} )
    (?! {_HARMLESS} )
    ( (?i: bearer | basic )[ \t]{{1,4}} | )
    ( {_QUOTED} | {_IN_BRACKETS} | {_BARE} )
    """,
    re.VERBOSE,
)

# Headers of HTTP. After a scheme comes one word, otherwise the value may have several parts, whose end
# cannot be told from what follows on its line.
_HEADER = re.compile(
    rf"""
    ( (?i: authorization | cookies? ) {_NAME_GOES_ON} {_SIGN} )
    (?! {_HARMLESS} )
    ( (?i: bearer | basic )[ \t]{{1,4}} (?= [^\s"',;] ) )?
    ( (?(2) {_BARE} | (?: {_QUOTED} | [^\r\n]* ) ) )
    """,
    re.VERBOSE,
)

_OPENING_QUOTE = re.compile(r"""[bru]{0,2}(\\{0,3}["'])""")


def mask(text: str) -> str:
    """Return ``text`` with ``***`` in the place of each secret that can be recognised.

    User and host of a URL, names, quotes and line breaks stay, so that the text can still be
    read. Masking twice gives the same as masking once.
    """
    text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    text = _URL.sub(rf"\1{MASK}", text)
    text = _HEADER.sub(_without_value, text)
    text = _PAIR.sub(_without_value, text)
    return _BEARER.sub(rf"\1{MASK}", text)


def _without_value(found: re.Match[str]) -> str:
    name, scheme, value = found[1], found[2] or "", found[3]
    if opening := _OPENING_QUOTE.match(value):
        rest = value[opening.end() :]
        closing = next((end for end in (opening[1], opening[1][-1]) if rest.endswith(end)), "")
        return f"{name}{scheme}{opening[0]}{MASK}{closing}"
    inside = value
    if not any(bracket in value for bracket in "([{<"):
        # The end of what the pair stands in is no part of the value: f(password=x), "token=x".
        inside = value.rstrip("\"')]}>,;.")
        if not inside:
            return found[0]
    return f"{name}{scheme}{MASK}{value[len(inside) :]}"
