"""Why there is no connection, in one sentence that says what to do.

Runs in: every process. Needs: nothing. Thread-safe: pure functions. No password is ever shown.
"""

from __future__ import annotations

import socket

import pika
import pika.exceptions
from pika.adapters.utils.connection_workflow import AMQPConnectorStackTimeout


def address(parameters: pika.connection.Parameters) -> str:
    """Return where ``parameters`` lead, without the password."""
    vhost = "" if parameters.virtual_host == "/" else f"/{parameters.virtual_host}"
    return f"{parameters.host}:{parameters.port}{vhost}"


def close_reason(reason: BaseException) -> tuple[int, str]:
    """Return AMQP's code and text of a closed connection or channel; code 0 where RabbitMQ said nothing."""
    code = getattr(reason, "reply_code", 0)
    text = getattr(reason, "reply_text", "")
    if code:
        return int(code), f"{code} {text}"
    return 0, str(reason) or type(reason).__name__


#: What people should do about an error, by its class.
_CLUES = (
    (
        (pika.exceptions.ProbableAuthenticationError, pika.exceptions.AuthenticationError),
        "RabbitMQ at {where} refused the login of user {user!r}: check user and password in the URL",
    ),
    (
        (pika.exceptions.ProbableAccessDeniedError,),
        "RabbitMQ at {where} refused user {user!r} access to the vhost {vhost!r}: create the vhost or grant the permission"
        " (rabbitmqctl add_vhost, rabbitmqctl set_permissions)",
    ),
    (
        (pika.exceptions.IncompatibleProtocolError,),
        "what answers at {where} does not speak AMQP: check host and port (AMQP is usually 5672, 15672 is the UI)",
    ),
    (
        (socket.gaierror,),
        "the host name {host!r} cannot be resolved: check the URL",
    ),
    (
        (ConnectionRefusedError,),
        "nothing listens at {where}: start RabbitMQ, or check host and port in the URL",
    ),
    (
        (TimeoutError, pika.exceptions.AMQPHeartbeatTimeout, AMQPConnectorStackTimeout),
        "no answer from {where} in time: check that RabbitMQ is up and reachable",
    ),
)

#: RabbitMQ 4.3 takes no smaller one, and says so to nobody but its log.
LEAST_FRAME_MAX = 8_192

#: What no waiting will heal.
FINAL_ERRORS = (
    pika.exceptions.ProbableAuthenticationError,
    pika.exceptions.AuthenticationError,
    pika.exceptions.ProbableAccessDeniedError,
)

#: AMQP's codes for what no waiting will heal: access refused, and a vhost that is not there.
FINAL_CODES = (403, 530)


def explain(error: BaseException, parameters: pika.connection.Parameters, *, lasting: bool = False) -> str:
    """Say in one sentence why no connection came up, and what to do. Never shows a password.

    ``lasting`` says that it has been so for a while, so that a server that just starts is not the reason.
    """
    causes = list(_causes(error))
    facts = {
        "where": address(parameters),
        "host": parameters.host,
        "user": getattr(parameters.credentials, "username", "?"),
        "vhost": parameters.virtual_host,
    }
    if any(_broke_off(cause) for cause in causes):
        sentence = (
            f"the connection to {facts['where']} broke while it was being opened: RabbitMQ is just starting or stopping,"
            " or something between here and there cuts connections"
        )
        if 0 < parameters.frame_max < LEAST_FRAME_MAX:
            sentence += (
                f", or it is of version 4 and does not take the URL's frame_max={parameters.frame_max}:"
                f" at least {LEAST_FRAME_MAX} fit all versions"
            )
        return sentence
    if not lasting and any(_hung_up(cause) for cause in causes):
        return (
            f"what answers at {facts['where']} hung up at once: RabbitMQ is just starting or stopping, or something else"
            " listens there (AMQP is usually 5672, 15672 is the UI)"
        )
    for kinds, sentence in _CLUES:
        if any(isinstance(cause, kinds) for cause in causes):
            return sentence.format(**facts)
    for cause in causes:
        code = getattr(cause, "reply_code", 0)
        if code == 530:
            return (
                f"RabbitMQ at {facts['where']} has no vhost {facts['vhost']!r}: create it (rabbitmqctl add_vhost)"
                " or check the URL"
            )
        if code:
            return f"RabbitMQ at {facts['where']} refused the connection: {code} {getattr(cause, 'reply_text', '')}"
    last = causes[-1]
    return f"no connection to RabbitMQ at {facts['where']}: {type(last).__name__} {last}".rstrip()


def is_final(error: BaseException) -> bool:
    """Tell whether trying again cannot help: wrong login, missing vhost, no permission."""
    causes = _causes(error)
    if any(_broke_off(cause) for cause in causes):
        return False
    return any(
        isinstance(cause, FINAL_ERRORS) or getattr(cause, "reply_code", 0) in FINAL_CODES for cause in causes
    )


def _broke_off(cause: BaseException) -> bool:
    """Whether the connection was cut in the middle of its handshake: pika then guesses at a login or a protocol."""
    if isinstance(cause, ConnectionResetError):
        return True
    guesses = (*FINAL_ERRORS, pika.exceptions.IncompatibleProtocolError)
    return isinstance(cause, guesses) and "StreamLostError" in str(cause) and not _hung_up(cause)


def _hung_up(cause: BaseException) -> bool:
    """Whether the other side closed the connection in order, as a server does that is asked in a foreign protocol."""
    return isinstance(cause, pika.exceptions.IncompatibleProtocolError) and "EOF" in str(cause)


def _causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` and all that pika has wrapped into it, outermost first."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if one in found:
            continue
        found.append(one)
        inner = [
            *getattr(one, "exceptions", ()),
            getattr(one, "exception", None),
            one.__cause__,
            one.__context__,
            *one.args,
        ]
        waiting.extend(cause for cause in inner if isinstance(cause, BaseException))
    return found
