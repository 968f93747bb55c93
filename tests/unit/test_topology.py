"""What is declared on RabbitMQ, argument by argument: most of these lines are there because without them messages vanish.

RabbitMQ accepts all of the mistakes that are ruled out here without a word.
"""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_safeops.rabbitmq.delays import STEPS_MS, step_name
from dramatiq_safeops.rabbitmq.topology import (
    DEAD_LETTER_EXCHANGE,
    DELIVERY_EXCHANGE,
    UNROUTABLE,
    Declaration,
    apply,
    dead_letter_queue,
    delay_step,
    explain_refusal,
    topology_for,
)

EVERYTHING = [
    pytest.param(topology_for("reports"), id="a quorum work queue"),
    pytest.param(topology_for("reports", "classic"), id="a classic work queue"),
    pytest.param(topology_for("reports", "classic", max_priority=9), id="one with priorities"),
    *(pytest.param(delay_step(step), id=step_name(step)) for step in (STEPS_MS[0], 30_000, STEPS_MS[-1])),
]


def queues(declarations: list[Declaration]) -> dict[str, dict[str, Any]]:
    """The arguments of each declared queue, by its name."""
    return {
        one.arguments["queue"]: one.arguments["arguments"]
        for one in declarations
        if one.method == "queue_declare"
    }


def bindings(declarations: list[Declaration]) -> set[tuple[str, str, str]]:
    return {
        (one.arguments["exchange"], one.arguments["routing_key"], one.arguments["queue"])
        for one in declarations
        if one.method == "queue_bind"
    }


@pytest.mark.parametrize("declarations", EVERYTHING)
def test_everything_outlives_a_restart_of_rabbitmq(declarations: list[Declaration]):
    """Hurts everybody: what is not durable is gone with the messages in it."""
    for one in declarations:
        if one.method != "queue_bind":
            assert one.arguments["durable"] is True, one
            assert not one.arguments.get("auto_delete"), one
            assert not one.arguments.get("exclusive"), one


@pytest.mark.parametrize("declarations", EVERYTHING)
def test_all_but_a_classic_work_queue_is_a_quorum_queue_with_a_delivery_limit_out_of_reach(
    declarations: list[Declaration],
):
    """Hurts everybody: RabbitMQ 4 destroys a message after 20 returns, and -1 means "after the first" on 3.10."""
    for name, arguments in queues(declarations).items():
        if name == "reports" and "x-queue-type" not in arguments:
            continue  # exactly what stock Dramatiq declares, see below
        assert arguments["x-queue-type"] == "quorum", name
        assert arguments["x-delivery-limit"] >= 10_000, name


@pytest.mark.parametrize("declarations", EVERYTHING)
def test_no_queue_drops_messages_for_its_length(declarations: list[Declaration]):
    """Hurts everybody: the default overflow of RabbitMQ is to throw the oldest message away."""
    for name, arguments in queues(declarations).items():
        assert not {"x-max-length", "x-max-length-bytes", "x-expires"} & set(arguments), name


def test_only_the_delay_steps_expire_messages():
    """Hurts whoever comes back from two weeks of holidays and finds the dead letters gone."""
    for declarations in (topology_for("reports"), topology_for("reports", "classic")):
        assert all("x-message-ttl" not in arguments for arguments in queues(declarations).values())
    for step in STEPS_MS:
        expiring = {
            name: arguments["x-message-ttl"]
            for name, arguments in queues(delay_step(step)).items()
            if "x-message-ttl" in arguments
        }
        assert expiring == {step_name(step): step}


@pytest.mark.parametrize("declarations", EVERYTHING)
def test_at_least_once_dead_lettering_always_goes_with_reject_publish(declarations: list[Declaration]):
    """Hurts delayed messages: without it RabbitMQ falls back to at-most-once, and only its log says so."""
    for name, arguments in queues(declarations).items():
        if "x-dead-letter-strategy" in arguments:
            assert arguments["x-dead-letter-strategy"] == "at-least-once", name
            assert arguments["x-overflow"] == "reject-publish", name
            assert arguments["x-queue-type"] == "quorum", name


@pytest.mark.parametrize("step", STEPS_MS)
def test_every_delay_step_hands_over_at_least_once_under_the_queues_own_name(step: int):
    """Hurts delayed messages: a routing key of the step's own would send all of them to one queue."""
    arguments = queues(delay_step(step))[step_name(step)]

    assert arguments["x-dead-letter-exchange"] == DELIVERY_EXCHANGE
    assert arguments["x-dead-letter-strategy"] == "at-least-once"
    assert "x-dead-letter-routing-key" not in arguments
    assert (step_name(step), "", step_name(step)) in bindings(delay_step(step))


def test_a_step_is_a_fanout_so_that_the_routing_key_stays_the_queues_name():
    """Hurts delayed messages: with any other type the step would need a binding per work queue."""
    types = {
        one.arguments["exchange"]: one.arguments["exchange_type"]
        for one in delay_step(1_000)
        if one.method == "exchange_declare"
    }

    assert types[step_name(1_000)] == "fanout"
    assert types[DELIVERY_EXCHANGE] == "direct"


@pytest.mark.parametrize("declarations", EVERYTHING)
def test_where_lost_letters_go_is_declared_before_whatever_names_it(declarations: list[Declaration]):
    """Hurts delayed messages: without a route they hang in their step for minutes, again and again."""
    there: set[str] = set()
    bound: set[str] = set()
    for one in declarations:
        arguments = one.arguments
        if one.method == "exchange_declare":
            alternate = arguments.get("arguments", {}).get("alternate-exchange")
            if alternate is not None:
                assert alternate in bound, one  # with its queue behind it
            there.add(arguments["exchange"])
        elif one.method == "queue_declare":
            target = arguments["arguments"].get("x-dead-letter-exchange")
            assert target in (None, "") or target in there, one
            there.add(arguments["queue"])
        else:
            assert {arguments["queue"], arguments["exchange"]} <= there, one
            bound.add(arguments["exchange"])


@pytest.mark.parametrize("declarations", EVERYTHING)
def test_both_exchanges_where_nobody_waits_for_a_return_have_an_alternate(declarations: list[Declaration]):
    """Hurts dead letters and delayed messages of a queue that somebody deletes: they would vanish."""
    alternates = {
        one.arguments["exchange"]: one.arguments.get("arguments", {}).get("alternate-exchange")
        for one in declarations
        if one.method == "exchange_declare"
    }

    assert alternates[DEAD_LETTER_EXCHANGE] == UNROUTABLE
    assert alternates[DELIVERY_EXCHANGE] == UNROUTABLE
    assert (UNROUTABLE, "", UNROUTABLE) in bindings(declarations)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_work_queue_gets_its_dead_letters_and_its_delayed_messages_under_its_own_name(queue_type: str):
    """Hurts everybody: these two bindings are the way back."""
    declarations = topology_for("reports", queue_type)

    assert (DEAD_LETTER_EXCHANGE, "reports", "reports.dlq") in bindings(declarations)
    assert (DELIVERY_EXCHANGE, "reports", "reports") in bindings(declarations)
    assert {"reports", "reports.dlq", UNROUTABLE} == set(queues(declarations))


def test_a_dead_letter_queue_keeps_what_it_has():
    """Hurts whoever looks at a dead letter in the RabbitMQ UI: looking is a return, and must not be counted to a limit."""
    for queue_type in ("quorum", "classic"):
        arguments = queues(topology_for("reports", queue_type))[dead_letter_queue("reports")]

        assert set(arguments) == {"x-queue-type", "x-delivery-limit"}
        assert arguments["x-delivery-limit"] >= 10_000


def test_a_message_rejected_by_hand_in_the_ui_becomes_a_dead_letter():
    """Hurts operators who reject a message there and expect to find it in the dead letters."""
    arguments = queues(topology_for("reports"))["reports"]

    assert arguments["x-dead-letter-exchange"] == DEAD_LETTER_EXCHANGE
    assert arguments["x-dead-letter-routing-key"] == "reports"


def test_a_classic_work_queue_is_declared_exactly_as_stock_dramatiq_declares_it():
    """Hurts whoever moves over from stock Dramatiq: any other argument and RabbitMQ refuses the queue."""
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    for max_priority in (None, 9):
        stock = RabbitmqBroker(url="amqp://guest:guest@127.0.0.1:1/", max_priority=max_priority)
        expected = stock._build_queue_arguments("reports")

        ours = topology_for("reports", "classic", max_priority=max_priority)

        assert queues(ours)["reports"] == expected


def test_all_queues_agree_on_what_they_share():
    """Hurts every second queue: RabbitMQ refuses a declaration that differs from the first."""
    seen: dict[tuple[str, str], Declaration] = {}
    for declarations in (
        topology_for("a"),
        topology_for("b", "classic"),
        *(delay_step(step) for step in STEPS_MS),
    ):
        for one in declarations:
            if one.method != "queue_bind":
                name = one.arguments.get("queue") or one.arguments["exchange"]
                assert seen.setdefault((one.method, name), one) == one


def test_declarations_are_carried_out_in_their_order():
    """Hurts delayed messages, see above: the order is part of the declaration."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class Channel:
        def __getattr__(self, method: str) -> Any:
            return lambda **arguments: calls.append((method, arguments))

    declarations = topology_for("reports")
    apply(declarations, Channel())

    assert calls == [(one.method, one.arguments) for one in declarations]


@pytest.mark.parametrize(
    ("queue_type", "way_out"), [("quorum", "queue_type='classic'"), ("classic", "max_priority")]
)
def test_a_queue_with_other_arguments_is_an_error_that_names_the_ways_out(queue_type: str, way_out: str):
    """Hurts whoever moves over from stock Dramatiq: a bare 406 has sent many people to the source code."""
    answer = "406 PRECONDITION_FAILED - inequivalent arg 'x-queue-type'"

    sentence = explain_refusal("reports", queue_type, answer)

    assert "'reports'" in sentence
    assert answer in sentence
    assert way_out in sentence
    assert "another queue_name" in sentence
