"""Settings of the Redis tier: the meaning of a URL, and that no message shows a secret."""

import copy
import subprocess
import traceback
from itertools import product
from urllib.parse import quote

import pytest
from disk_commands import kvoffload
from rich.pretty import pretty_repr

from kvoffload import open_backend
from kvoffload.backends.redis.options import Access, RedisOptions, parse_url, redacted
from kvoffload.config import parse_config
from kvoffload.errors import ConfigError, shown

HEAD, TAIL = "hunter", "tiger"
"""Halves of a password: no message may show either, with any character between them."""
SPECIAL = ["/", "?", "#", "@", ":", "%", "[", "]", "%zz", ",", " ", "://", "="]
PASSWORDS = [
    form for c in SPECIAL for form in (f"{HEAD}{c}{TAIL}", f"{c}{HEAD}{TAIL}", f"{HEAD}{TAIL}{c}")
]
SCHEMES = ["redis", "unix", "redis+sentinel", "redsi"]
URLS = [
    "{scheme}://u:{password}@host:6379/0",
    "{scheme}://{password}@host",
    "{scheme}://:{password}@[::1]/m",
    "{scheme}://u:{password}@host:port/1",
    "{scheme}://u:{password}@h1,h2:99999",
    "{scheme}://u:1234{password}@host",
    "{scheme}://u:p@host/0?password={password}",
    "{scheme}://u:p@host/0?{password}",
    "{scheme}://u:p@host?db={password}",
    "{scheme}://u:p@host/m#{password}",
    "{scheme}:/u:{password}@host",
    "{scheme}//u:{password}@host",
    "u:{password}@host",
]


def everything_said_about(error):
    """Every text of an error that a log, a handler or a user may show."""
    said = traceback.format_exception(error, limit=0)  # lines of code tell nothing of a URL
    while error is not None:
        said += [str(error), repr(vars(error))]
        error = error.__cause__ or error.__context__
    return "\n".join(said)


def printed_by_rich(thing):
    return pretty_repr(thing, max_width=500) + repr(thing)


@pytest.mark.parametrize("password", PASSWORDS)
def test_no_url_gives_its_password_away(password):
    """As password, user, query and port, in valid and invalid URLs: in no error and no repr."""
    for scheme, form in product(SCHEMES, URLS):
        url = form.format(scheme=scheme, password=password)
        try:
            seen = repr(parse_url(url))
        except ConfigError as error:
            seen = everything_said_about(error)
        with pytest.raises(ConfigError) as caught:  # another key is wrong
            open_backend("redis", {"url": url, "tmeout_s": 1, "connections": 0}, "n")
        seen += everything_said_about(caught.value)
        try:
            options = RedisOptions(url=url)
            backend = open_backend("redis", {"url": url}, "n")
        except ConfigError as error:
            seen += everything_said_about(error)
        else:
            for thing in (options, copy.copy(options), [options], backend, parse_url(url)):
                seen += printed_by_rich(thing) + str(thing)
            seen += repr(Access(options))
        config = {"cpu_bytes": 1, "backends": [{"type": "redis", "url": url}]}
        seen += printed_by_rich(parse_config(config))
        for wrong in (
            {"load_timeout_s": -1},
            {"backends": [{"url": url}]},
            {url: 1},
            {"kind": url},
        ):
            with pytest.raises(ConfigError) as caught:
                parse_config(config | wrong)
            seen += everything_said_about(caught.value)
        seen += redacted(url)
        assert HEAD not in seen, url
        assert TAIL not in seen, url


def test_every_user_name_can_be_written_in_a_url():
    for name in PASSWORDS:
        target = parse_url(f"rediss://{quote(name, safe='')}@host:7/3")
        assert target.username == name
        assert (str(target.addresses[0]), target.db) == ("host:7", 3)


def test_a_password_is_refused_with_the_remedy_also_where_it_ends_the_host_too_early():
    for word in PASSWORDS:
        for url in (f"redis://u:{word}@host", f"redis://:{quote(word, safe='')}@host"):
            with pytest.raises(ConfigError, match="password_file"):
                parse_url(url)


@pytest.mark.parametrize(
    ("url", "addresses", "db", "service"),
    [
        ("redis://Host", "host:6379", 0, ""),
        ("redis://host:/2", "host:6379", 2, ""),
        ("redis://[::1]:7000?db=4", "[::1]:7000", 4, ""),
        ("unix:///run/a%40b.sock?db=3", "/run/a@b.sock", 3, ""),
        ("redis+sentinel://a,b:1/my%20master/5", "a:26379 b:1", 5, "my master"),
        ("REDISS+cluster://u@a:1,b", "a:1 b:6379", 0, ""),
    ],
)
def test_a_url_says_where_and_what(url, addresses, db, service):
    target = parse_url(url)
    assert " ".join(map(str, target.addresses)) == addresses
    assert (target.db, target.service) == (db, service)


@pytest.mark.parametrize(
    "url",
    [
        "redis://", "redis:///0", "redis://h:99999", "redis://h:x", "redis://[::1", "redis://::1",
        "redis://h/-1", "redis://h/١", "redis://h/" + "9" * 5000, "redis://h?db=0&db=1",
        "redis://h?timeout=1", "redis://h?", "redis://h#", "unix://host/path", "unix://",
        "redis+sentinel://h", "redis+cluster://h/1", "redis://a,b", "redis+other://h",
    ],
)  # fmt: skip
def test_what_is_no_url_of_ours_is_refused(url):
    if url == "redis://h?":
        assert parse_url(url) == parse_url("redis://h")  # an empty query says nothing
        return
    with pytest.raises(ConfigError, match="url = "):
        parse_url(url)


def test_what_is_right_is_shown_without_its_user():
    assert redacted("redis+sentinel://u@a,b:1/m?db=1") == "redis+sentinel://a:26379,b:1/m"
    assert repr(RedisOptions(url="redis://u@h")) == "RedisOptions(url='redis://h:6379')"


def test_other_values_are_shown_as_they_are():
    for value in (5, None, "text", "/a/path@2", "me@host", ["a", {"b": 1.5}], {"root": "/x"}):
        assert shown(value) == value
    assert shown({"url": "s3://key:word@bucket", "password": "x", "password_file": "/f"}) == {
        "url": "s3://***", "password": "***", "password_file": "/f",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["doctor", "inspect", "gc"])
@pytest.mark.parametrize("c", ["/", "@"])
def test_no_command_shows_a_part_of_a_password(command, c):
    for scheme in ("redis", "redsi"):
        url = f"{scheme}://u:{HEAD}{c}{TAIL}@127.0.0.1:1"
        away = "redis://127.0.0.1:1"
        for words in ([url], [away, "-o", url], [away, "-o", f"{url}=1"]):
            code, *told = kvoffload(command, *words)
            said = "".join(told)
            assert code in (1, 2)
            assert said, words
            assert HEAD not in said
            assert TAIL not in said


def secret_error(options):
    with pytest.raises(ConfigError) as caught:
        open_backend("redis", options, "n")
    return caught.value


def test_a_password_file_that_is_no_text_is_named_without_its_content(tmp_path):
    (tmp_path / "pw").write_bytes(b"hunter\xff\xfetiger")
    error = secret_error({"url": "redis://h", "password_file": f"{tmp_path}/pw"})
    assert error.field == "password_file"
    assert "UTF-8" in error.remedy
    assert HEAD not in everything_said_about(error)


def test_certificates_and_keys_are_blamed_each_for_itself(tmp_path):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1",
         "-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/cert"],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(
        ["openssl", "rsa", "-aes128", "-passout", "pass:x", "-in", f"{tmp_path}/key",
         "-out", f"{tmp_path}/locked"],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "broken").write_text("nothing")
    good = {"url": "rediss://h", "cert_file": f"{tmp_path}/cert", "key_file": f"{tmp_path}/key"}
    open_backend("redis", good, "n")
    for change, field in (
        ({"ca_file": f"{tmp_path}/broken"}, "ca_file"),
        ({"ca_file": "/nowhere/x"}, "ca_file"),
        ({"cert_file": f"{tmp_path}/broken"}, "cert_file"),
        ({"key_file": "/nowhere/x"}, "key_file"),
        ({"key_file": f"{tmp_path}/locked"}, "cert_file"),  # OpenSSL does not ask for its password
        ({"cert_file": ""}, "key_file"),
        ({"cert_file": "", "url": "redis://h"}, "key_file"),
    ):
        assert secret_error(good | change).field == field, change
