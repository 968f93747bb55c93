"""What the shop writes down, in one SQLite file that all its processes share."""

import json
import os
import sqlite3
import time
from contextlib import closing

from dramatiq.middleware import Middleware
from dramatiq.rate_limits import RateLimiterBackend
from dramatiq.results.backend import Missing, ResultBackend

TABLES = """
CREATE TABLE IF NOT EXISTS journal (at REAL, what TEXT, facts TEXT);
CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, result TEXT);
CREATE TABLE IF NOT EXISTS counters (key TEXT PRIMARY KEY, value INTEGER);
"""


def _execute(statement, *parameters):
    with closing(sqlite3.connect(os.environ["SHOP_DATABASE"], timeout=30)) as connection, connection:
        connection.executescript(TABLES)
        cursor = connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else cursor.rowcount


def record(what, **facts):
    """Write down that something was done."""
    _execute("INSERT INTO journal VALUES (?, ?, ?)", time.time(), what, json.dumps(facts))


def journal(what):
    """Return what was recorded, with the time as ``at``."""
    rows = _execute("SELECT at, facts FROM journal WHERE what = ? ORDER BY at", what)
    return [{"at": at, **json.loads(facts)} for at, facts in rows]


class SavedResults(ResultBackend):
    def _store(self, message_key, result, ttl):
        _execute("INSERT OR REPLACE INTO results VALUES (?, ?)", message_key, json.dumps(result))

    def _get(self, message_key):
        rows = _execute("SELECT result FROM results WHERE key = ?", message_key)
        return json.loads(rows[0][0]) if rows else Missing


class Counters(RateLimiterBackend):
    def add(self, key, value, ttl):
        return _execute("INSERT OR IGNORE INTO counters VALUES (?, ?)", key, value) == 1

    def incr(self, key, amount, maximum, ttl):
        _execute("INSERT OR IGNORE INTO counters VALUES (?, 0)", key)
        changed = "UPDATE counters SET value = value + ? WHERE key = ? AND value + ? <= ?"
        return _execute(changed, amount, key, amount, maximum) == 1

    def decr(self, key, amount, minimum, ttl):
        changed = "UPDATE counters SET value = value - ? WHERE key = ? AND value - ? >= ?"
        return _execute(changed, amount, key, amount, minimum) == 1


class Audit(Middleware):
    """Notes each message that was worked on, and each that was tried in vain."""

    @property
    def actor_options(self):
        return {"audited"}

    def after_process_message(self, broker, message, *, result=None, exception=None):
        actor = broker.get_actor(message.actor_name)
        if actor.options.get("audited"):
            record("audit", actor=message.actor_name, failed=exception is not None)
