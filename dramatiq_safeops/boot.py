"""Checks before a broker is made or an actor declared: does every option exist?

Runs in: worker processes, and wherever actors are declared. Needs: nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence, Set
from typing import Any
from urllib.parse import urlsplit

import dramatiq.brokers.rabbitmq
import pika

from .errors import ConfigError, refuse
from .options import check_known, did_you_mean

#: What must be Python's own: the I/O thread runs beside threads that wait for it.
_PATCHED = ("socket", "select", "threading")


def check_threads() -> None:
    """Raise ``ConfigError`` if gevent or eventlet has put green threads in the place of Python's.

    Time limits could strike whichever green thread happens to run, and the I/O thread would wait for its turn.
    """
    gevent = sys.modules.get("gevent.monkey")
    eventlet = sys.modules.get("eventlet.patcher")
    if gevent is not None and any(map(gevent.is_module_patched, _PATCHED)):
        patched_by = "gevent"
    elif eventlet is not None and any(map(eventlet.is_monkey_patched, ("socket", "select", "thread"))):
        patched_by = "eventlet"
    else:
        return
    raise ConfigError(
        f"{patched_by} has patched this process, and RabbitmqBroker needs real threads: start workers with `dramatiq`"
        " (not dramatiq-gevent), and web servers with workers that are threads or processes (gunicorn: gthread)"
    )


_OWN_PARAMETERS = {
    *("url", "middleware", "queue_type", "max_priority", "send_timeout", "park_limit"),
    *("confirm_delivery", "parameters"),
}

#: What subclasses of Dramatiq's broker override, and what does its work here.
_OVERRIDES = {
    "_build_queue_arguments": "queue_type, or a RabbitMQ policy",
    "_declare_queue": "queue_type, or a RabbitMQ policy",
    "_declare_dq_queue": "nothing: delayed messages wait in the delay ladder",
    "_declare_xq_queue": "nothing: dead letters wait in <queue>.dlq",
    "consumer_class": "a middleware",
}


def check_overrides(kind: type) -> None:
    """Raise ``ConfigError`` if a subclass overrides what Dramatiq's broker would call and this one never does."""
    for name, way in _OVERRIDES.items():
        if getattr(kind, name) is not getattr(dramatiq.brokers.rabbitmq.RabbitmqBroker, name):
            raise ConfigError(f"{kind.__name__} overrides {name}, which this broker does not call; use {way}")


def check_parameters(names: Iterable[str]) -> None:
    """Raise ``ConfigError`` for what is neither an option of RabbitmqBroker nor one of pika's connection parameters."""
    pikas = set(inspect.signature(pika.ConnectionParameters.__init__).parameters) - {"self", "kwargs"}
    check_known("RabbitmqBroker", list(names), pikas | _OWN_PARAMETERS)


def check_urls(url: str | Sequence[str] | None) -> None:
    """Raise ``ConfigError`` for a URL that is none of AMQP's: pika takes the address of the UI for one."""
    urls = url.split(";") if isinstance(url, str) else url or ()
    for one in urls:
        scheme, found, _ = str(one).partition("://")
        if not found or scheme.lower() not in ("amqp", "amqps"):
            shown = scheme if found else "no scheme"
            raise ConfigError(f"expected RabbitmqBroker.url to begin with amqp:// or amqps://, got {shown!r}")
        parts = urlsplit(one)
        if parts.username is not None and parts.password is None:
            raise ConfigError(f"RabbitmqBroker.url names the user {parts.username!r} without a password")
        if not parts.hostname:
            # pika would take this machine, and whatever happens to listen on its standard port.
            raise ConfigError(
                "expected RabbitmqBroker.url to name a host, as in amqp://user:password@host/vhost"
            )


class _KnownOptions(set[str]):
    """The options that actors may have. Asked for unknown ones, it says which were likely meant.

    Dramatiq computes ``set(options) - broker.actor_options`` and can only say that some are undefined.
    """

    def __rsub__(self, asked: Set[Any]) -> set[Any]:
        unknown = set(asked).difference(self)
        for name in sorted(unknown):
            refuse(
                f"unknown actor option {name!r}{did_you_mean(name, self)}; known options: {', '.join(sorted(self))}"
                " (an option of a middleware is known once that middleware is in the broker's list)"
            )
        return unknown


def known_options(names: Iterable[str]) -> set[str]:
    """Return ``names`` as a set that answers for unknown ones with a sentence."""
    return _KnownOptions(names)
