import shlex
import sys
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser

from django_workflows.broker import without_password
from testproject.orders.management.batch_command import BatchCommand, at_least_one
from testproject.worker import running_worker


def python() -> str:
    """This interpreter as it is typed here: relative where it lies below."""
    path, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


class Command(BatchCommand):
    help = "Migrate, run a worker, place orders, and watch them being fulfilled."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--orders", type=at_least_one, default=100, metavar="N", help="How many (default: 100)."
        )
        parser.add_argument(
            "--threads",
            type=at_least_one,
            default=4,
            metavar="N",
            help="Of the worker (default: 4).",
        )
        super().add_arguments(parser)

    def handle(self, **options: Any) -> None:
        self.refuse_memory()
        call_command("migrate", interactive=False, verbosity=0)
        with running_worker(options["threads"]) as worker:
            batch = self.new_batch(options["orders"], options)
            summary = self.follow(batch, options, check=worker.check_running)
        self.report(summary, options)
        manage = f"{python()} manage.py"
        if not options["json"]:
            self.stdout.write(
                f"The worker's log is {worker.log}. To look at what is left in the admin:\n\n"
                f"  {manage} createsuperuser\n"
                f"  {manage} runserver\n\n"
                f"and open http://127.0.0.1:8000/admin/"
            )
        self.fail_if_unfinished(
            summary,
            options,
            hint=f"the worker's log is {worker.log}, and BROKER_URL is "
            f"{without_password(settings.BROKER_URL)!r}: is that broker there?",
        )

    def refuse_memory(self) -> None:
        if settings.DATABASES["default"]["NAME"] == ":memory:":
            raise CommandError(
                f"DATABASE_URL is {settings.DATABASE_URL!r}, a database in memory, which the "
                f"worker's process cannot see. Name a file, as in sqlite:///demo.sqlite3."
            )
