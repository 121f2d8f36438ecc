"""Orders while workers are killed, the broker is wiped and PostgreSQL is restarted.

    python -m tests.chaos --broker redis --orders 500 --json

`rundramatiq --processes 2` runs on a PostgreSQL of its own, and a supervisor starts it again
whenever it ends. While `place_orders --wait` places orders and waits, a random worker process is
killed with SIGKILL every few seconds; at two random points of the work the broker is wiped and
PostgreSQL is restarted. Then every row is counted. `tests/test_chaos.py` runs the same.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.processes import (
    ROOT,
    Workers,
    environment,
    is_alive,
    run_manage,
    supervised,
    workflow_settings,
)
from tests.services import Postgres, postgres_server, rabbitmq_vhost, redis_server, wipe_broker

KILL_AFTER = (1.0, 4.0)  # seconds of life
ONCE_BETWEEN = (0.05, 0.8)  # of the work: the wipe, and the restart
#: A worker that was killed is missed after three seconds instead of half a minute.
SETTINGS = workflow_settings(LEASE=timedelta(seconds=3))
APPS = {"class": "orders", "functions": "orders_functions"}
TABLES = ("payment", "pick", "shipment", "receipt")
#: Deliveries of an order that are handled, and the steps of its workflow, by how it ended.
HANDLED = {"completed": 9, "declined": 3}
STEPS = {"completed": 5, "declined": 2}


@dataclass
class Story:
    """What was done to the orders, when, and what was found wrong in the end."""

    broker: str
    style: str
    orders: int
    seed: int
    kills: int = 0
    wipes: int = 0
    restarts: int = 0
    events: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    log_tail: str = ""
    started: float = field(default_factory=time.monotonic)

    def note(self, event: str) -> None:
        self.events.append(f"{time.monotonic() - self.started:6.1f} s  {event}")

    def __str__(self) -> str:
        head = f"{self.orders} orders ({self.style}) over {self.broker}, seed {self.seed}"
        done = f"{self.kills} kills, {self.wipes} wipes, {self.restarts} restarts of PostgreSQL"
        wrong = self.wrong or ["nothing is wrong"]
        log = ["The workers' log ends:", self.log_tail] if self.wrong else []
        return "\n".join([head, *self.events, done, json.dumps(self.summary), *wrong, *log])


def run(
    postgres: Postgres,
    broker_url: str,
    directory: Path,
    *,
    orders: int,
    style: str = "class",
    seed: int | None = None,
    timeout: int = 240,
) -> Story:
    """Place orders on this server and go at it until they have ended; nothing is left running."""
    seed = random.randrange(10**6) if seed is None else seed
    story = Story(broker_url.partition(":")[0], style, orders, seed)
    env = environment(postgres.url, broker_url, SETTINGS)
    run_manage("migrate", "--verbosity", 0, env=env)
    workers = Workers(env, directory / "workers.log", processes=2, threads=4)
    try:
        workers.start()
        with placing(story, env, directory, timeout) as client, supervised(workers):
            wreck(story, workers, client, postgres, broker_url)
        workers.stop()
    finally:
        workers.kill()
    story.log_tail = workers.read_log()[-10_000:]
    judge(story, postgres)
    return story


@contextmanager
def placing(
    story: Story, env: dict[str, str], directory: Path, timeout: int
) -> Iterator["subprocess.Popen[str]"]:
    """`place_orders N --wait --json` in a process of its own, whose output becomes the summary."""
    command = [sys.executable, "manage.py", "place_orders", str(story.orders), "--wait", "--json"]
    command += ["--style", story.style, "--timeout", str(timeout)]
    output = directory / "place_orders.txt"
    with output.open("w") as file:
        client = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield client
    finally:
        client.kill()
        client.wait()
    said = output.read_text()
    with suppress(ValueError):
        story.summary = json.loads(next((s for s in said.splitlines() if s[:1] == "{"), ""))
    if client.returncode:
        story.wrong.append(f"place_orders ended with {client.returncode}:\n{said[-5000:]}")


def wreck(
    story: Story,
    workers: Workers,
    client: "subprocess.Popen[str]",
    postgres: Postgres,
    broker_url: str,
) -> None:
    """Kill, wipe and restart until the client has ended, which its own timeout sees to."""
    dice = random.Random(story.seed)
    wipe_at, restart_at = dice.uniform(*ONCE_BETWEEN), dice.uniform(*ONCE_BETWEEN)
    next_kill = time.monotonic() + dice.uniform(*KILL_AFTER)
    while client.poll() is None:
        time.sleep(0.1)
        living = [pid for pid in workers.worker_pids if is_alive(pid)]
        if living and time.monotonic() >= next_kill:
            kill_one_of(living, story, dice)
        if not living or time.monotonic() >= next_kill:
            next_kill = time.monotonic() + dice.uniform(*KILL_AFTER)
        if story.wipes and story.restarts:
            continue
        share = share_done(story, postgres)
        if not story.wipes and share >= wipe_at:
            wipe_broker(broker_url, queues=["default"])
            story.wipes += 1
            story.note(f"wiped the broker at {share:.0%} of the work")
        if not story.restarts and share >= restart_at:
            postgres.restart()
            story.restarts += 1
            story.note(f"restarted PostgreSQL at {share:.0%} of the work")
    story.note(f"place_orders ended with {client.returncode}")


def kill_one_of(living: list[int], story: Story, dice: random.Random) -> None:
    pid = dice.choice(living)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        story.kills += 1
        story.note(f"killed worker {pid}, one of {len(living)}")


def share_done(story: Story, postgres: Postgres) -> float:
    [(handled,)] = query(
        postgres, "SELECT count(*) FROM django_workflows_delivery WHERE status = 'handled'"
    )
    return float(handled) / (HANDLED["completed"] * story.orders)


def query(postgres: Postgres, sql: str, *params: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(postgres.url) as connection:
        return connection.execute(sql, params).fetchall()  # type: ignore[call-overload]


# The judgement


def judge(story: Story, postgres: Postgres) -> None:
    """Count every row, and say of each rule how many rows break it and which."""
    app = APPS[story.style]

    def none(rule: str, sql: str, *params: object) -> None:
        if rows := query(postgres, sql.format(app=app), *params):
            shown = "\n".join(f"    {row}" for row in rows[:20])
            story.wrong.append(f"{len(rows)} rows: {rule}\n{shown}")

    [(placed,)] = query(postgres, f"SELECT count(*) FROM {app}_order")
    if placed != story.orders:
        story.wrong.append(f"{placed} of {story.orders} orders are stored")
    if not (story.kills and story.wipes and story.restarts):
        story.wrong.append("the orders ended before everything was done to them")
    if story.summary.get("unfinished") != 0:
        story.wrong.append("place_orders did not say that every order had ended")
    judge_orders(none)
    judge_deliveries(none)


def judge_orders(none: Callable[..., None]) -> None:
    none(
        "an order without exactly one instance that has ended as completed or declined",
        "SELECT o.id, count(s.id), min(s.status), min(s.lifecycle) FROM {app}_order o "
        "LEFT JOIN {app}_fulfilmentstate s ON s.order_id = o.id GROUP BY o.id "
        "HAVING count(s.id) <> 1 OR min(s.ended_at) IS NULL OR min(s.lifecycle) <> 'completed' "
        "OR min(s.status) NOT IN ('completed', 'declined')",
    )
    none(
        "an instance without an order",
        "SELECT id, order_id FROM {app}_fulfilmentstate "
        "WHERE order_id NOT IN (SELECT id FROM {app}_order)",
    )
    for status, steps in STEPS.items():
        none(
            f"an instance that is {status}, but not after {steps} steps",
            "SELECT id, version FROM {app}_fulfilmentstate WHERE status = %s AND version <> %s",
            status,
            steps,
        )
    for table in TABLES:
        none(
            f"a completed order without exactly one {table}, or another with more than one",
            "SELECT o.id, s.status, count(r.id) FROM {app}_order o "
            "LEFT JOIN {app}_fulfilmentstate s ON s.order_id = o.id "
            f"LEFT JOIN {{app}}_{table} r ON r.order_id = o.id GROUP BY o.id, s.status "
            "HAVING count(r.id) <> 1 AND s.status = 'completed' OR count(r.id) > 1",
        )
        none(
            f"a {table} without an order",
            f"SELECT id, order_id FROM {{app}}_{table} "
            "WHERE order_id NOT IN (SELECT id FROM {app}_order)",
        )


def judge_deliveries(none: Callable[..., None]) -> None:
    none(
        "a delivery that is pending, running, failed or ignored",
        "SELECT id, message_name, handler, status, reason, claims, attempts, losses, conflicts, "
        "due_at, relay_at, now(), error FROM django_workflows_delivery "
        "WHERE status NOT IN ('handled', 'cancelled')",
    )
    none(
        "an order whose timeout is not cancelled, or not the only thing that is",
        "SELECT o.id, array_agg(d.message_name || ' ' || d.status) FROM {app}_order o "
        "LEFT JOIN django_workflows_delivery d ON d.correlation_id = o.message_id "
        "AND (d.status = 'cancelled' AND NOT d.undoes OR d.message_name LIKE '%%PaymentOverdue') "
        "GROUP BY o.id "
        "HAVING array_agg(d.message_name || ' ' || d.status) "
        "<> ARRAY['{app}.PaymentOverdue cancelled']",
    )
    for status, count in HANDLED.items():
        none(
            f"an order that is {status}, but not after {count} deliveries",
            "SELECT o.id, count(d.id), array_agg(d.message_name) FROM {app}_order o "
            "JOIN {app}_fulfilmentstate s ON s.order_id = o.id "
            "LEFT JOIN django_workflows_delivery d ON d.correlation_id = o.message_id "
            "AND d.status = 'handled' WHERE s.status = %s GROUP BY o.id HAVING count(d.id) <> %s",
            status,
            count,
        )
    none(
        "an attempt that failed for another reason than the payment provider's: perhaps work that "
        "was done twice, or an outage that was taken for an error",
        "SELECT d.id, d.message_name, f FROM django_workflows_delivery d, "
        "jsonb_array_elements(d.failures) f WHERE f->>'error' NOT LIKE '%%ProviderError%%'",
    )


# By hand


@contextmanager
def broker(name: str) -> Iterator[str]:
    match name:
        case "db":
            yield "db://"
        case "redis":
            with redis_server() as url:
                yield url
        case _:
            with rabbitmq_vhost() as url:
                yield url


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--broker", choices=["db", "redis", "rabbitmq"], default="db")
    parser.add_argument("--orders", type=int, default=500)
    parser.add_argument("--style", choices=sorted(APPS), default="class")
    parser.add_argument("--seed", type=int, help="of the times and victims of the kills")
    parser.add_argument("--timeout", type=int, default=240, help="seconds (default: 240)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        with (
            broker(options.broker) as broker_url,
            postgres_server() as postgres,
            tempfile.TemporaryDirectory(prefix="chaos-") as directory,
        ):
            story = run(
                postgres,
                broker_url,
                Path(directory),
                orders=options.orders,
                style=options.style,
                seed=options.seed,
                timeout=options.timeout,
            )
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        facts = asdict(story)
        del facts["started"]
        print(json.dumps(facts))
    else:
        print(story)
    return 1 if story.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
