"""The ``safeops`` command without a server: what it prints, and how it says no."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dramatiq_safeops.cli.exit_codes import EXIT_OK, EXIT_USAGE
from dramatiq_safeops.cli.root import safeops
from dramatiq_safeops.rabbitmq.topology import Declaration, ladder, topology_for


def run(*arguments: str) -> Result:
    return CliRunner().invoke(safeops, arguments, prog_name="safeops")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def declarations_of(*arguments: str) -> list[dict[str, Any]]:
    result = run("topology", *arguments, "--json")
    assert result.exit_code == EXIT_OK, result.output
    return json.loads(result.stdout)


def as_json(declarations: list[Declaration]) -> list[dict[str, Any]]:
    return [{"method": d.method, "arguments": d.arguments} for d in declarations]


def test_version_names_what_a_bug_report_needs():
    """Whoever helps a user asks for these five first."""
    found = json.loads(run("version", "--json").stdout)

    assert list(found) == ["dramatiq-safeops", "dramatiq", "pika", "msgspec", "python"]
    assert all(number[0].isdigit() for number in found.values())


def test_version_for_people_says_the_same_as_version_for_programs():
    """Two lists that differ would send the helper after the wrong release."""
    found = json.loads(run("version", "--json").stdout)

    assert [tuple(line.split()) for line in run("version").stdout.splitlines()] == list(found.items())


def test_the_module_is_the_command():
    """``python -m dramatiq_safeops`` works where the scripts of an environment are not on the path."""
    done = python("-m", "dramatiq_safeops", "version", "--json")

    assert done.returncode == EXIT_OK
    assert json.loads(done.stdout)["python"].startswith("3.")
    assert done.stderr == ""


def test_topology_prints_each_declaration_once_and_in_order():
    """An operator declares them by hand in this order; a queue before its exchange would be refused."""
    # Given what the broker declares for two queues, of which a part is the same for both
    of_reports = topology_for("reports", "quorum")
    of_mails = [d for d in topology_for("mails", "quorum") if d not in of_reports]

    # When both are printed
    printed = declarations_of("--queue", "reports", "--queue", "mails")

    # Then the shared part stands there once, before all that needs it
    assert len(of_mails) < len(of_reports)
    assert printed == as_json(of_reports + of_mails)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_topology_declares_the_queue_type_that_was_asked_for(queue_type):
    """A plan that shows quorum queues where the broker makes classic ones misleads an operator."""
    printed = declarations_of("--queue", "reports", "--queue-type", queue_type)

    assert printed == as_json(topology_for("reports", queue_type))


def test_topology_lists_the_delay_ladder_when_asked():
    """An operator who grants permissions name by name needs the names of all its steps."""
    of_queue = topology_for("reports", "quorum")
    of_ladder = [d for d in ladder() if d not in of_queue]

    printed = declarations_of("--queue", "reports", "--ladder")

    assert of_ladder
    assert printed == as_json(of_queue + of_ladder)


def test_topology_for_people_names_every_queue_exchange_and_argument():
    """People compare this table with the RabbitMQ UI, line by line."""
    table = run("topology", "--queue", "reports").stdout

    for declaration in topology_for("reports", "quorum"):
        for key, value in declaration.arguments.items():
            words = value if isinstance(value, dict) else {key: value}
            for word in words.values():
                assert (str(word).lower() if isinstance(word, bool) else str(word)) in table


def test_a_long_queue_name_is_not_broken_in_two_in_a_pipe():
    """A wrapped name cannot be found with grep."""
    name = "a_queue_with_quite_a_long_name." * 3 + "end"

    assert f"{name}.dlq" in run("topology", "--queue", name).stdout


@pytest.mark.parametrize("name", ["", "two words", "9lives", "ünicode", "-queue"])
def test_a_queue_name_that_no_actor_can_have_is_refused(name):
    """Dramatiq refuses it later, and an empty one would mean something else to RabbitMQ."""
    result = run("topology", "--queue", name)

    assert result.exit_code == EXIT_USAGE
    assert f"{name!r} is no queue name" in result.stderr
    assert result.stdout == ""


def test_a_mistyped_option_gets_the_likely_name():
    """Who types one letter too few should not have to read the help."""
    result = run("version", "--jsn")

    assert result.exit_code == EXIT_USAGE
    assert "--json" in result.stderr


def test_a_wrong_choice_names_the_right_ones():
    """The error is all the user sees."""
    result = run("topology", "--queue-type", "quorm")

    assert result.exit_code == EXIT_USAGE
    assert "'quorum', 'classic'" in result.stderr


@pytest.mark.parametrize("command", [[], *([name] for name in safeops.commands)], ids=" ".join)
def test_help_ends_in_examples_that_work(command):
    """Examples are what people copy; one that fails is worse than none."""
    # Given the lines below "Examples:", the last part of the help
    _, _, examples = run(*command, "--help").stdout.partition("Examples:\n")
    lines = [line.split() for line in examples.splitlines() if line.strip()]
    assert lines

    # When each is run
    codes = [run(*words).exit_code for (_, *words) in lines]

    # Then each is a call of safeops, and works
    assert {words[0] for words in lines} == {"safeops"}
    assert set(codes) == {EXIT_OK}


@pytest.mark.parametrize("library", ["click", "rich"])
def test_without_its_extra_the_command_says_what_to_install(library):
    """``pip install dramatiq-safeops`` puts the script there also without its libraries."""
    # Given an interpreter that cannot import the library
    code = f"import sys; sys.modules[{library!r}] = None; from dramatiq_safeops.cli import main; sys.exit(main())"

    # When the command is called
    done = python("-c", code)

    # Then one sentence says what to do
    assert done.returncode == EXIT_USAGE
    assert done.stderr.splitlines() == [
        "The safeops command needs click and rich: pip install 'dramatiq-safeops[cli]'"
    ]


def test_an_import_that_fails_for_another_reason_is_not_blamed_on_the_extra():
    """Advice to install what is installed sends a user in circles."""
    code = "import sys; sys.modules['json'] = None; from dramatiq_safeops.cli import main; main()"

    done = python("-c", code)

    assert "dramatiq-safeops[cli]" not in done.stderr
    assert "ModuleNotFoundError" in done.stderr
