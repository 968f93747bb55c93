"""Which secrets are hidden in texts for people, and that hiding them is safe to do with any text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dramatiq_safeops.masking import mask

KEY_BLOCK = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow+/\nabcd==\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("amqp://guest:hunter2@rabbit:5672/vh", "amqp://guest:***@rabbit:5672/vh"),
        ("redis://:hunter2@cache:6379/0", "redis://:***@cache:6379/0"),
        ("postgresql+psycopg://app:p%40ss@db/app", "postgresql+psycopg://app:***@db/app"),
        ("amqp://app:p@ss:w@rabbit", "amqp://app:***@rabbit"),
        ("amqp://app:pa/ss@rabbit/vh", "amqp://app:***@rabbit/vh"),
        ("amqp://app:12345@rabbit/vh", "amqp://app:***@rabbit/vh"),
        ("https://u:p@host/find?mail=a@b.org", "https://u:***@host/find?mail=a@b.org"),
        ("amqp://u:p@one,amqp://v:q@two", "amqp://u:***@one,amqp://v:***@two"),
    ],
)
def test_the_password_in_a_url_is_hidden_and_user_and_host_stay(text: str, shown: str):
    """Drivers quote the URL they could not reach; the dead letter queue has more readers than the vault."""
    assert mask(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("password=hunter2", "password=***"),
        ("PASSWD: hunter2", "PASSWD: ***"),
        ("pwd = hunter2", "pwd = ***"),
        ("DB_PASSWORD=hunter2 HOST=db", "DB_PASSWORD=*** HOST=db"),
        ("host=db password=hun,t;er2 dbname=app", "host=db password=*** dbname=app"),
        ("Server=db;Password=hunter2;Database=app", "Server=db;Password=***;Database=app"),
        ("connect(host='db', password='hunter 2')", "connect(host='db', password='***')"),
        ("Settings(user=app, password=hunter2)", "Settings(user=app, password=***)"),
        ("password=b'hunter2', x=1", "password=b'***', x=1"),
        ("{'password': 'hunter2', 'user': 'app'}", "{'password': '***', 'user': 'app'}"),
        ('{"client_secret": "a \\"b\\" c", "x": 1}', '{"client_secret": "***", "x": 1}'),
        ('"{\\"token\\": \\"hunter2\\", \\"x\\": 1}"', '"{\\"token\\": \\"***\\", \\"x\\": 1}"'),
        ("GET /x?api_key=abc&page=2", "GET /x?api_key=***&page=2"),
        ("apikey=abc, X-Api-Key: abc", "apikey=***, X-Api-Key: ***"),
        ("aws_secret_access_key = wJal/rX+K7", "aws_secret_access_key = ***"),
        ("awsSecretAccessKey=wJal/rX+K7", "awsSecretAccessKey=***"),
        ("access-key: abc", "access-key: ***"),
        ("private_key='abc'", "private_key='***'"),
        ("password2 => hunter2", "password2 => ***"),
        ('os.environ["DB_PASSWORD"] = "hunter2"', 'os.environ["DB_PASSWORD"] = "***"'),
        ("passwords=['one', 'two'] rest", "passwords=*** rest"),
        ("PHPSESSID=abc; path=/", "PHPSESSID=***; path=/"),
        ("session_id: abc", "session_id: ***"),
        ("password='cut off in the middle\nnext line", "password='***\nnext line"),
    ],
)
def test_the_value_behind_a_secret_name_is_hidden_and_its_neighbours_stay(text: str, shown: str):
    """What stands beside the password is what the person on call needs to see."""
    assert mask(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def, Host: x", "Authorization: Bearer ***, Host: x"),
        ("authorization=Basic dXNlcjpwYXNz", "authorization=Basic ***"),
        ("{'Authorization': 'Bearer abc', 'Host': 'x'}", "{'Authorization': '***', 'Host': 'x'}"),
        ("Authorization: token ghp_abc\nHost: x", "Authorization: ***\nHost: x"),
        ("Proxy-Authorization: Basic abc", "Proxy-Authorization: Basic ***"),
        ("token: Bearer abc", "token: Bearer ***"),
        ("Cookie: a=b; c=d\nHost: x", "Cookie: ***\nHost: x"),
        ("Set-Cookie: sid=abc; HttpOnly", "Set-Cookie: ***"),
        ("sent Bearer eyJhbGciOiJIUzI1NiJ9.e30.abc", "sent Bearer ***"),
    ],
)
def test_credentials_in_http_headers_are_hidden(text: str, shown: str):
    """An HTTP client's exception carries the request, and the token in it works for whoever reads it."""
    assert mask(text) == shown


@pytest.mark.parametrize(
    "text", [KEY_BLOCK, KEY_BLOCK.replace("\n", "\n  | "), KEY_BLOCK.replace("\n", "\\n")]
)
def test_a_private_key_is_hidden_wherever_its_lines_break(text: str):
    """A key in an exception group is indented, one in a repr has its line breaks written out."""
    shown = mask(f"bad key {text}\nnext line")

    assert "MIIEow" not in shown
    assert "abcd==" not in shown
    assert shown.startswith("bad key -----BEGIN RSA PRIVATE KEY-----***")
    assert shown.endswith("-----END RSA PRIVATE KEY-----\nnext line")


@pytest.mark.parametrize(
    "text",
    [
        "http://rabbit:15672/api/queues/bob@example.org",
        "http://[::1]:5672/a@b",
        '{"url":"http://rabbit:5672","mail":"bob@example.org"}',
        'FATAL:  password authentication failed for user "app"',
        "KeyError: 'token'",
        "the secret of success: work",
        "max_tokens=512, tokenizer: gpt",
        "secret://vault/path",
        "Bearer authentication failed",
        "password=",
        "password=None, token: null, secret=True",
        "def login(user: str, password: str) -> None:",
        "if not password:\n    raise Missing",
        'File "/app/reports.py", line 12, in build_report',
        "ZeroDivisionError: division by zero",
        "",
    ],
)
def test_ordinary_text_is_left_alone(text: str):
    """A traceback full of stars would be as useless as none."""
    assert mask(text) == text


# Pieces that the patterns look for, to be put together in ways that nobody thought of.
WORDS = ["password", "Token", "bearer ", "basic ", "authorization", "cookie", "api_key", "None", "x" * 25]
SIGNS = ["=", ":", ": ", "=>", "://", "/", "@", "'", '"', "\\", "\\'", '\\"', *"()[]{},;&|_. \n\t"]
REST = ["***", "a", "Z9", "8080", "b'", "é", "-----BEGIN PRIVATE KEY-----"]
PIECES = st.sampled_from([*WORDS, *SIGNS, *REST])


@settings(max_examples=1_000, deadline=None, derandomize=True)
@given(st.lists(PIECES, max_size=16).map("".join))
def test_masking_twice_is_masking_once(text: str):
    """A text may be masked where it is made and again where it is shown."""
    once = mask(text)

    assert mask(once) == once


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["{}", "'{}'", '"{}"', "f({})", "{{'x': 1, {}}}", "a=1 {} b=2", "{};", "({}, c=3)"]),
    st.sampled_from(
        ["password={}", "'password': '{}'", "api_key: {}", "amqp://u:{}@h", "Authorization: Bearer {}"]
    ),
    # Not = and :, as ",name=" ends a value, and not // with which another URL begins.
    st.text("abcXYZ019.,;&+/!%$-_~#?", min_size=1, max_size=30).filter(lambda noise: "//" not in noise),
)
def test_no_password_is_readable_in_any_common_surrounding(around: str, sign: str, noise: str):
    """Generated passwords hold the very characters that end a value elsewhere."""
    # Given a password whose first, middle and last parts can be recognised
    secret = f"QQ{noise}WW{noise}JJ"

    # When it is shown in some surrounding
    shown = mask(around.format(sign.format(secret)))

    # Then no part of it can be read
    assert not {"QQ", "WW", "JJ"} & {shown[i : i + 2] for i in range(len(shown))}


HOSTILE = {
    name: piece * (1_000_000 // len(piece))
    for name, piece in {
        "letters": "a",
        "slashes": "/",
        "urls": "://a:b",
        "urls with paths": "://a:/b",
        "urls with at": "://a:@",
        "names": "password_",
        "camel names": "passwordA",
        "signs": "password=",
        "quotes": "password='",
        "mixed quotes": "password='a\" ",
        "escapes": 'password="\\',
        "commas": "password=a,",
        "brackets": "password=[",
        "blanks": "password        ",
        "headers": "authorization: ",
        "keys": "-----BEGIN PRIVATE KEY-----",
        "bearers": "Bearer a",
        "backslashes": "\\",
        "lines": "\n",
        "wide characters": "é😀",
    }.items()
}
HOSTILE["one url with slashes"] = "://a:" + "b/" * 500_000
HOSTILE["one long user"] = "://" + "a" * 1_000_000
HOSTILE["one value with commas"] = "password=" + ",a" * 500_000
HOSTILE["one quoted value with escapes"] = "password='" + "\\a" * 500_000
HOSTILE["one value with commas and names"] = "password=" + (",a" * 20 + "b" * 60) * 10_000


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_megabyte_takes_seconds_at_most(text: str):
    """A pattern that backtracks would hold the worker's only interpreter lock for hours."""
    before = time.monotonic()
    mask(text)

    # Linear patterns need about 0.2 s, half a second at worst. A quadratic one would need more than an hour.
    assert time.monotonic() - before < 10
