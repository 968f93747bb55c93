"""The door of the package: the names users import, and what importing them costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import types

import pytest

import dramatiq_safeops


def test_every_public_name_can_be_imported_from_the_root():
    """A name in ``__all__`` that is not there breaks ``from dramatiq_safeops import *`` only at the user's."""
    missing = [name for name in dramatiq_safeops.__all__ if not hasattr(dramatiq_safeops, name)]

    assert missing == []


def test_every_name_imported_into_the_root_is_public():
    """A re-export that ``__all__`` forgets works in an editor and is an error for a type checker."""
    # Given what the root imports from its own modules, private names aside
    tree = ast.parse(inspect.getsource(dramatiq_safeops))
    imported = {
        alias.asname if alias.asname is not None else alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    public = {name for name in imported if not name.startswith("_")}

    # Then it is what __all__ says
    assert public
    assert public <= set(dramatiq_safeops.__all__)


def test_the_public_names_are_sorted_and_stand_there_once():
    """A sorted list shows in a diff what was added."""
    assert dramatiq_safeops.__all__ == sorted(set(dramatiq_safeops.__all__))


def test_no_public_name_is_a_module():
    """``from .broker import ...`` leaves ``broker`` behind as an attribute; it must not become a promise."""
    public = {name: getattr(dramatiq_safeops, name) for name in dramatiq_safeops.__all__}
    modules = [name for name, value in public.items() if isinstance(value, types.ModuleType)]

    assert modules == []


@pytest.mark.parametrize("heavy", ["apscheduler", "click", "prometheus_client", "psycopg", "rich", "typer"])
def test_importing_the_package_stays_light(heavy):
    """Each is an extra that may be missing, and prometheus_client chooses its mode when it is imported."""
    code = f"import sys, dramatiq_safeops; sys.exit({heavy!r} in sys.modules)"

    assert run_python(code).returncode == 0


def test_importing_the_package_opens_nothing_and_reads_no_environment_of_ours():
    """Whoever imports it in a web process, a test or a notebook has not asked for a connection or a thread."""
    # Given an interpreter that notes every look at a SAFEOPS_ variable, every connection and every thread;
    # dramatiq, which reads the environment for itself, is imported before
    code = """
import os, sys, threading
import dramatiq, dramatiq.brokers.rabbitmq

seen = []
class Noting(type(os.environ)):
    def __getitem__(self, name):
        seen.append(name)
        return super().__getitem__(name)
    def __iter__(self):
        seen.append("all of it")
        return super().__iter__()
os.environ.__class__ = Noting
sys.addaudithook(lambda event, details: seen.append(event) if event.startswith(("socket.", "subprocess.")) else None)
before = threading.active_count()

import dramatiq_safeops

ours = [name for name in seen if name.startswith(("SAFEOPS_", "all", "socket.", "subprocess."))]
sys.exit(f"noted: {ours}" if ours or threading.active_count() != before else 0)
"""

    # When the package is imported
    done = run_python(code)

    # Then nothing was noted
    assert (done.returncode, done.stderr) == (0, "")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
